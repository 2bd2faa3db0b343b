"""The host's cost of a call on GPUs, in instructions, on a machine without any: ``make host-cost``."""
