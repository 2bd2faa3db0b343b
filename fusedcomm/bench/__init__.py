"""What `fusedcomm bench` measures, and how; benchmarks/ of the repository measures with the same."""
