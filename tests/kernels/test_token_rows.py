"""Dispatches and combines by kernels in Triton's interpreter: all ranks in one process, in random orders that streams
and flags allow; every host is far ahead.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import routed_rounds
from fusedcomm.plan.builder import Builder, layout_of
from fusedcomm.plan.routing import Routing, bytes_of_rows, counts_of, overflow, pack, sizes_of, totals
from fusedcomm.run.routed_rows import ByKernels
from tests.helpers.schedule.programs import GPU
from tests.helpers.schedule.random_orders import Gpus
from tests.ops import test_moe
from tests.ops.test_moe import Case, Problem

NUM_CALLS = 2


def program(gpus: Gpus, workspace: Workspace, problem: Problem, pieces: int) -> list[Tensor]:
    """A dispatch with products, and combines; rows, sums, offsets, the routing and products."""
    case, rank = problem.case, workspace.rank
    x, scores = problem.xs[rank].flatten(0, 1).to(case.dtype), problem.scores[rank].float().flatten(0, 1)
    ids, w = problem.ids[rank].flatten(), problem.w[rank * case.own :][: case.own].to(case.dtype)

    def call(program: Any, *tensors: Tensor | None, **facts: Any) -> list[Tensor]:
        device = GPU._replace(architecture=0, num_sms=2)
        s = Builder(workspace.memory_facts(), device, [None if t is None else layout_of(t) for t in tensors])
        schedule = s.finish(*program(s, *s.inputs, k=case.k, **facts))
        assert schedule.can_be_captured
        return gpus.call(workspace, schedule, tensors)

    sizes = {"capacity": problem.capacity, "alignment": case.alignment, "num_pieces": pieces}
    ws = w, w.mT.contiguous().mT
    rows, offsets, packed, *hs = call(routed_rounds.dispatch, x, ids, *ws, num_experts=problem.num_experts, **sizes)
    facts = {"num_tokens": len(x), "return_received": True}
    y, received = call(routed_rounds.combine, rows, None, scores, packed, **facts)
    multiplied, _ = call(routed_rounds.combine, rows, w, scores, packed, **facts)
    kept = [(torch.empty_like(t), t) for t in (rows, y, multiplied, offsets, packed, *hs)]
    for to, source in kept:
        gpus.enqueue(workspace, "keep", partial(to.copy_, source))
    for t in (rows, y, multiplied, received, offsets, packed, *hs):  # nobody reads them any more
        gpus.enqueue(workspace, "spoil", partial(t.fill_, -1))
    return [to for to, _ in kept]


@pytest.mark.parametrize(
    ("size", "columns", "case"),
    [
        (2, 70, Case(lead=3)),  # more than a block
        (3, 6, Case(lead=2, room="less", alignment=4, k=3, dtype=torch.bfloat16)),
        (2, 6, Case(lead=3, kind="idle", alignment=8)),
        (2, 6, Case(lead=2, kind="one", k=1, room="exact")),
        (2, 6, Case(lead=2, kind="twice", own=1, room="wide", dtype=torch.float16)),
        (2, 70, Case(lead=9, own=5, k=4, room="less", alignment=2)),
        (1, 6, Case(kind="none")),
    ],
    ids=str,
)
@pytest.mark.parametrize("pieces", [1, 2])
def test_rows_and_sums_are_right_in_a_random_order(
    size: int, columns: int, case: Case, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_moe, "H", columns)
    pieces = min(pieces, case.own)
    problems = [Problem(case, size, seed=100 * each) for each in range(NUM_CALLS)]
    slot_bytes = max(128, 8 * size**2 * case.own, *(bytes_of_rows(each.capacity, columns, 4) for each in problems))
    ranks, gpus = VirtualGroup(size, slot_bytes, "cpu").workspaces, Gpus()
    found = [[program(gpus, rank, problem, pieces) for problem in problems] for rank in ranks]
    gpus.run_all(seed=size)
    for rank, of_calls in zip(ranks, found, strict=True):
        rank.check("moe")
        for problem, (rows, y, multiplied, offsets, packed, *hs) in zip(problems, of_calls, strict=True):
            want_rows, ends = problem.rows(rank.rank)
            torch.testing.assert_close(rows.double(), want_rows, rtol=0, atol=0)
            for h in hs:
                torch.testing.assert_close(h.double(), problem.products(rank.rank), rtol=0, atol=0)
            assert offsets.tolist() == ends
            assert totals(packed).tolist() == problem.counts and overflow(packed).item() == problem.overflow
            for got, w in ((y, None), (multiplied, problem.w)):
                want = problem.ys(problem.xs, problem.scores, w)[rank.rank].flatten(0, 1)
                torch.testing.assert_close(got.double(), want, rtol=0, atol=0)
        assert int(rank._epoch_word()) == rank.epoch == (3 + pieces) * NUM_CALLS


@pytest.mark.parametrize(
    ("num_experts", "capacity", "alignment"), [(70, 300, 1), (70, 290, 4), (3, 700, 1), (1, 5, 8), (130, 0, 1)]
)
def test_a_routing_by_kernels_is_that_of_the_host(num_experts: int, capacity: int, alignment: int) -> None:
    """Several blocks of choices and of experts; experts outside of all ranks' are none."""
    (rank,), generator = VirtualGroup(1, 1 << 15, "cpu").workspaces, torch.Generator().manual_seed(capacity)
    ids = (torch.randn(300, 2, generator=generator) * num_experts / 3).long().clamp(-1, num_experts - 1).flatten()
    way = ByKernels(rank, "moe", 1)
    rows, offsets, packed = way.dispatch(torch.empty(300, 0), ids, num_experts, 2, capacity, alignment)
    want = pack(ids, 2, counts_of(ids, num_experts)[None], 0, capacity, alignment)
    got, must = (Routing(each, 0, 1, 600) for each in (packed, want))
    for name in ("overflow", "ends", "counts", "kept", "first", "filled", "returned", "shifts", "places"):
        assert torch.equal(getattr(got, name), getattr(must, name)), name
    assert torch.equal(got.indices[got.places >= 0], must.indices[got.places >= 0])
    assert sizes_of(packed) == [600, 2, capacity] and torch.equal(totals(packed), totals(want))
    assert torch.equal(offsets, must.ends) and rows.shape == (capacity, 0)
    wild = torch.where(ids == 0, num_experts, ids)
    _, _, other = way.dispatch(torch.empty(300, 0), wild, num_experts, 2, capacity, alignment)
    assert (Routing(other, 0, 1, 600).places[ids == 0] == -1).all()


def test_a_row_is_stored_once_on_a_rank() -> None:
    """A row that nobody has sent, by a wrong routing, is zero."""
    (rank,) = VirtualGroup(1, 256, "cpu").workspaces
    rank.segment[rank.layout.header_bytes :] = 0xFF
    x, way = torch.ones(3, 4), ByKernels(rank, "moe", 1)
    rows, _, packed = way.dispatch(x, torch.tensor([0, 1] * 3), 2, 2, 7, 1)
    slot = rank.segment[rank.slot_start(rank.epoch) :][: rows.nbytes].view(rows.dtype).view_as(rows)
    assert rows[:6].eq(1).all() and slot.isfinite().all(1).sum() == 3
    Routing(packed, 0, 1, 6).filled.add_(1)
    for scores in (None, torch.ones(6)):
        assert not way.send(x, scores, 2, Routing(packed, 0, 1, 6), 7)[6].any()
