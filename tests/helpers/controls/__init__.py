"""The table of protections that `tests/helpers/negative_controls.py` switches off, by what they protect."""
