"""The recorder of calls (fusedcomm.runtime.tape), where it is not seen by what prepared calls do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import fusedcomm

ROOT = Path(__file__).parents[2]


def calls_load_no_dynamo(rank: int) -> bool:
    x, w = (torch.ones(4, 4, requires_grad=True) for _ in range(2))
    for _ in range(4):  # in Python, recorded, and from their tapes
        fusedcomm.matmul_all_to_all(x, w, scatter_dim=0, gather_dim=1).sum().backward()
    return "torch._dynamo" not in sys.modules


NO_DYNAMO = """
from fusedcomm.launch.ranks import RankPool
from tests.runtime.test_tape import calls_load_no_dynamo
with RankPool(2) as pool:
    assert pool.run(calls_load_no_dynamo) == [True, True]
"""


def test_calls_load_no_dynamo() -> None:
    """The ranks are not forked from the server of the tests, which has loaded it."""
    done = subprocess.run([sys.executable, "-c", NO_DYNAMO], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
