"""The recorder of calls (fusedcomm.runtime.tape), where it is not seen by what prepared calls do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedcomm
from fusedcomm.runtime import tape
from fusedcomm.runtime.native_part import native
from fusedcomm.runtime.tape import Recorder
from tests.helpers.groups import call, check
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared import python_calls, recorded, started_group
from tests.helpers.problems import Problem

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


@pytest.mark.nightly
def test_calls_load_no_dynamo() -> None:
    """The ranks are not forked from the server of the tests, which has loaded it."""
    done = subprocess.run([sys.executable, "-c", NO_DYNAMO], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr


def test_memory_between_ops_is_freed_while_a_call_is_recorded() -> None:
    """A tensor at an address that was freed is another register of the tape."""
    argument, addresses = torch.ones(1000), set[int]()
    with Recorder([argument]) as recorder:
        for _ in range(100):
            addresses.add((argument + 1).data_ptr())
        registers = [index for kind, index in recorder._places.values() if kind == native.REGISTER]
    assert len(addresses) < 100 and registers == list(range(100)) and recorder.is_usable


ROUNDS = Problem("rounds", (24, 8), 12, 0, 1)


@on_ranks(2)
@pytest.mark.parametrize("most", [4, 1000])
def test_calls_of_many_rounds_stay_in_python(rank: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST_ROUNDS", most)
    with started_group("chunked", WORKSPACE_BYTES="2048") as group, python_calls() as ran, recorded() as recorders:
        for seed in range(6):
            check(group, ROUNDS, call(group, ROUNDS, seed), seed)
    (recorder,) = recorders
    if most == 4:
        assert recorder.reasons == ["it has 4 rounds or more, of which a tape would be large"] and len(ran) == 6
    else:
        assert recorder.is_usable and len(ran) == 2
