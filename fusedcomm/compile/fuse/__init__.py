"""Collectives beside matmuls become one op of fusedcomm. One file per op matches and rewrites."""
