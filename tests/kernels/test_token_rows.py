"""Dispatches and combines by kernels in Triton's interpreter: all ranks in one process, in random orders that streams
and flags allow; every host is far ahead.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import routed_rounds
from fusedcomm.plan.builder import Builder, layout_of
from fusedcomm.plan.routing import counts_of, pack, packed_shape
from fusedcomm.testing.virtual import VirtualGroup
from tests.helpers.schedule.programs import GPU
from tests.helpers.schedule.random_orders import Gpus
from tests.ops import test_moe
from tests.ops.test_moe import Case, Problem

NUM_CALLS = 2


def program(gpus: Gpus, workspace: Workspace, problem: Problem) -> list[Tensor]:
    """A dispatch and a combine; its rows and sums."""
    case, rank, size = problem.case, workspace.rank, problem.size
    x, scores = problem.xs[rank].flatten(0, 1).to(case.dtype), problem.scores[rank].float().flatten(0, 1)
    ids = problem.ids[rank].flatten()
    packed = ids.new_zeros(packed_shape(ids.numel(), problem.num_experts, size))

    def call(program: Any, *tensors: Tensor | None, **facts: Any) -> list[Tensor]:
        device = GPU._replace(architecture=0, num_sms=2)
        s = Builder(workspace.memory_facts(), device, [None if t is None else layout_of(t) for t in tensors])
        schedule = s.finish(*program(s, *s.inputs, **facts))
        assert schedule.can_be_captured
        return gpus.call(workspace, schedule, tensors)

    def plan() -> None:
        packed.copy_(pack(ids, case.k, counts, rank, problem.capacity, case.alignment))

    (counts,) = call(routed_rounds.tell_counts, counts_of(ids, problem.num_experts))
    gpus.enqueue(workspace, "plan", plan)
    (rows,) = call(routed_rounds.send, x, None, packed, k=case.k, capacity=problem.capacity)
    facts = {"num_tokens": len(x), "k": case.k, "return_received": True}
    y, received = call(routed_rounds.combine, rows, scores, packed, **facts)
    kept = [torch.full_like(t, float("nan")) for t in (rows, y)]
    for to, source in zip(kept, (rows, y), strict=True):
        gpus.enqueue(workspace, "keep", partial(to.copy_, source))
    for t in (rows, y, received):  # nobody reads them any more
        gpus.enqueue(workspace, "spoil", partial(t.fill_, float("nan")))
    return kept


@pytest.mark.parametrize(
    ("size", "columns", "case"),
    [
        (2, 70, Case(lead=3)),  # more than a block
        (3, 6, Case(lead=2, room="less", alignment=4, k=3, dtype=torch.bfloat16)),
        (2, 6, Case(lead=3, kind="idle", alignment=8)),
        (2, 6, Case(lead=2, kind="one", k=1, room="exact")),
        (2, 6, Case(lead=2, kind="twice", own=1, room="wide", dtype=torch.float16)),
        (1, 6, Case(kind="none")),
    ],
    ids=str,
)
def test_rows_and_sums_are_right_in_a_random_order(
    size: int, columns: int, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_moe, "H", columns)
    problems = [Problem(case, size, seed=100 * each) for each in range(NUM_CALLS)]
    slot_bytes = max(128, 8 * size**2 * case.own, *(each.capacity * columns * 4 for each in problems))
    ranks, gpus = VirtualGroup(size, slot_bytes, "cpu").workspaces, Gpus()
    found = [[program(gpus, rank, problem) for problem in problems] for rank in ranks]
    gpus.run_all(seed=size)
    for rank, of_calls in zip(ranks, found, strict=True):
        rank.check("moe")
        for problem, (rows, y) in zip(problems, of_calls, strict=True):
            torch.testing.assert_close(rows.double(), problem.rows(rank.rank)[0], rtol=0, atol=0)
            want = problem.ys(problem.xs, problem.scores, None)[rank.rank].flatten(0, 1)
            torch.testing.assert_close(y.double(), want, rtol=0, atol=0)
        assert int(rank._epoch_word()) == rank.epoch == 3 * NUM_CALLS
