"""Faults injected into ranks at named steps of the protocol, and what must come of each: docs/faults.md.

    cells.py           the matrix: algorithm / op / fault / step
    protocol_steps.py  the functions that are replaced, inside a rank and for one call, to be at a step
    tape_steps.py      ops of torch that are replaced so in a call on a tape, which runs no function of the package
    injections.py      what goes wrong there
    known_calls.py     calls whose right results are known, and memory around them
    rank.py            a cell in one rank: the call, its result, the memory around it, the way back
    rank_reports.py    what a rank reports about them
    judge.py           whether the ranks' reports are what the fault allows
    matrix.py          cells in pools of ranks, several at a time

Production code knows nothing of faults: a step is one of its functions, or an op of torch that it runs, which is
replaced while the faulty call runs.
"""

from fusedcomm.testing.faults.cells import CELLS, Cell, select
from fusedcomm.testing.faults.judge import Verdict
from fusedcomm.testing.faults.matrix import run_cells
from fusedcomm.testing.faults.protocol_steps import at

__all__ = ["CELLS", "Cell", "Verdict", "at", "run_cells", "select"]
