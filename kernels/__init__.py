"""Everything that is compiled; imported only as `fusedcomm.kernels`."""
