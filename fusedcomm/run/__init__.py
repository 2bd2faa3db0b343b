"""The execution of plans."""
