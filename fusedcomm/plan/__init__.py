"""The decisions: pure functions from facts to data. Nothing here knows a process group or CUDA."""
