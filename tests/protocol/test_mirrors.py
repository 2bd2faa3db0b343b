"""The model is what the code does: step by step where it runs here, and by digests of what it was read against."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.plan.schedule import Base, EndRound, Reduce, Signal, Wait, places_of
from fusedcomm.run.python_executor import Execution
from tests.helpers.problems import PROBLEMS, integers
from tests.protocol import mirrored, mirrors
from tests.protocol.mirrored import MIRRORED
from tests.protocol.scenario import (
    ALL_REDUCE,
    GATHER,
    PUSH,
    UNFUSED,
    Programs,
    Scenario,
    all_run,
    compile_script,
    empty_from,
)

WHAT = ("write", "signal", "wait", "read")
Steps = list[tuple[str, int, int]]  # (what, the other rank, epoch)


def recorded_steps(rank: int) -> Steps:
    """The steps of `chunked` with its peers, call by call. The own chunk needs no flag."""
    steps: Steps = []
    step, waited = Execution.step, rank

    def add(self: Execution, what: str, other: int) -> None:
        found = what, other, self.epoch
        if other != rank and found not in steps[-1:]:  # a chunk may be written, or read, in parts
            steps.append(found)

    def record(self: Execution, work: Any, stream: Any) -> None:
        nonlocal waited
        for to in places_of(getattr(work, "out", None) or getattr(work, "to", None)):
            if to.base == Base.SLOT:
                add(self, "write", to.number)
        if isinstance(work, Reduce):
            for src_rank in range(len(work.parts)):
                add(self, "read", src_rank)
        elif any(
            place.base == Base.SLOT for place in places_of((getattr(work, "source", None), getattr(work, "x", None)))
        ):
            add(self, "read", waited)
        if isinstance(work, Signal):
            add(self, "signal", work.dst_rank)
        if isinstance(work, Wait):
            waited = work.src_rank
            add(self, "wait", waited)
        step(self, work, stream)
        if isinstance(work, EndRound):
            waited = rank

    problem = next(p for p in PROBLEMS if p.name == "rows-gathered")
    x, w, _ = integers(problem, rank, dist.get_world_size())
    fusedcomm.close()
    with pytest.MonkeyPatch.context() as patch, fusedcomm.force_algorithm("chunked", strict=True):
        patch.setattr(Execution, "step", record)
        fusedcomm.matmul_all_to_all(x, w, problem.gather_dim, problem.scatter_dim)
        fusedcomm.matmul_all_to_all(x[:0], w, problem.gather_dim, problem.scatter_dim)
        fusedcomm.all_gather_matmul(x, w, 0)
        with fusedcomm.force_algorithm("unfused"):
            fusedcomm.all_gather_matmul(x, w, 0)
        fusedcomm.matmul_all_reduce(torch.ones(8, 4), torch.ones(4, 4))
    return steps


def in_program_order(programs: Programs) -> Steps:
    """The order of a host that runs both programs: what it sends comes first."""
    sends, receives = list(programs.sends), list(programs.receives)
    steps, received = [], 0
    while sends or receives:
        if sends and sends[0].after <= received:
            step = sends.pop(0)
        else:
            step, received = receives.pop(0), received + 1
        if step.what in WHAT:
            steps.append((step.what, step.other, step.epoch))
    return steps


def test_the_model_is_what_the_code_does(ranks: Any) -> None:
    scenario = Scenario(all_run(3, PUSH, empty_from(0, 1, 2), GATHER, UNFUSED, ALL_REDUCE))
    for rank, steps in enumerate(ranks(3).run(recorded_steps)):
        assert steps == in_program_order(compile_script(scenario, rank))


def test_the_code_is_what_the_model_was_read_against() -> None:
    found = mirrors.complaints(MIRRORED, mirrored.__name__)
    assert not found, "\n\n".join(found)


WAIT, NATIVE_WAIT = ("fusedcomm/memory/workspace.py:Workspace", "wait"), ("kernels/cpu/flags.h", "wait_word")


@pytest.mark.parametrize(
    ("source", "old", "new", "is_noticed"),
    [
        (WAIT, "if flag != epoch <<", "if flag < epoch <<", True),
        (WAIT, "self.fail(op, epoch, fingerprint)", "pass", True),
        (WAIT, "Acquire the flag that", "Get the flag that", False),
        (WAIT, "        if flag !=", "        # why\n        if flag !=", False),
        (NATIVE_WAIT, ">= epoch", "== epoch", True),
        (NATIVE_WAIT, "// the signal may", "// a signal may", False),
    ],
)
def test_a_change_of_mirrored_code_is_noticed(source: tuple[str, str], old: str, new: str, is_noticed: bool) -> None:
    place, names = source
    text = (mirrors.ROOT / place.partition(":")[0]).read_text()
    assert old in text
    assert (mirrors.digest(place, names, text.replace(old, new)) != mirrors.digest(place, names)) == is_noticed


def test_a_change_is_told_with_what_to_do() -> None:
    place, name = WAIT
    (text,) = mirrors.complaints({"model._wait": {place: (name, "another digest")}}, mirrored.__name__)
    assert all(each in text for each in (place, name, "model._wait", mirrors.digest(place, name)))
