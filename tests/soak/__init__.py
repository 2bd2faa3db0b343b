"""Random programs of fused calls, as long as wanted, each result compared: ``python -m tests.soak``."""
