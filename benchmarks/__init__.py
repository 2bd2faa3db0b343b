"""Measurements of fusedcomm, a command a module; ``python -m benchmarks.ops`` has each op beside its baseline."""
