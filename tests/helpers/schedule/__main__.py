"""Prints what the simulator predicts for the start program: `python -m tests.helpers.schedule`. Nothing is measured."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # nothing is compiled

from tests.helpers.schedule.start_program import table

print("\n".join(table()))
