"""Microbenchmarks, also of `fusedcomm bench`, and `gpu_check`: proofs and speeds on one GPU."""
