"""What `fusedcomm bench` measures, and how; bench/ of the repository measures with the same."""
