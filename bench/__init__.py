"""Microbenchmarks, those of `fusedcomm bench` among them, and `gpu_check`: what one GPU can prove."""
