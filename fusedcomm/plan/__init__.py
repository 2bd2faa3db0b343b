"""The decisions: geometry, costs, the choice of an algorithm, and its steps as data. No process group, no CUDA."""
