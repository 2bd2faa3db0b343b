"""Collectives beside matmuls become one op of fusedcomm: one file per op finds, matches and rewrites."""
