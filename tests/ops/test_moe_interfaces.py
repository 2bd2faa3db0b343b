"""The ops of a mixture of experts behind torch's and torchtitan's interfaces."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

import fusedcomm
from fusedcomm.ops import routed
from fusedcomm.plan.routing import bytes_of_rows
from tests.helpers.groups import empty_is_nan, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.ops.test_moe import Case, H, N, Problem, integers

SIZE = 2
HAS_SWITCH = find_spec("torch.distributed._token_switch") is not None


def flat_problem(rank: int) -> tuple[Problem, Tensor, Tensor, Tensor, Tensor]:
    """It, and this rank's x, expert_ids, scores and experts, of tokens in one dim."""
    case = Case(own=3)
    problem = Problem(case, SIZE, 5)
    x, ids, scores = (each[rank].flatten(0, 1) for each in (problem.xs, problem.ids, problem.scores))
    w = problem.w[rank * case.own : (rank + 1) * case.own]
    return problem, x.float().requires_grad_(), ids, scores.float().requires_grad_(), w.float().requires_grad_()


def check(problem: Problem, rank: int, y: Tensor, inputs: tuple[Tensor, ...], scores: list[Tensor]) -> None:
    """y and the gradients of x, experts' w and, if given, scores: as by loops."""
    xs, all_w = [t.clone().requires_grad_() for t in problem.xs], problem.w.clone().requires_grad_()
    wants = problem.ys(xs, scores, all_w)
    grads = [integers(7 + r, *want.shape) for r, want in enumerate(wants)]
    own = slice(rank * problem.case.own, (rank + 1) * problem.case.own)
    torch.testing.assert_close(y.double(), wants[rank].flatten(0, 1), rtol=0, atol=0)
    got = torch.autograd.grad(y, inputs, grads[rank].flatten(0, 1).float())
    of = [xs[rank], all_w, *[scores[rank]] * (len(inputs) - 2)]
    of_x, of_w, *of_scores = torch.autograd.grad(wants, of, grads)
    for a, b in zip(got, [of_x.flatten(0, 1), of_w[own], *(t.flatten(0, 1) for t in of_scores)], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0)


def experts(rows: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """As torchtitan's: what lies behind the last row is garbage."""
    offsets = counts.cumsum(0, dtype=torch.int32)
    h = torch.ops.fusedcomm.moe_grouped_matmul(rows, w, offsets)
    is_row = torch.arange(len(h))[:, None] < offsets[-1]
    return h.where(is_row, torch.nan)


@on_ranks(SIZE)
def test_token_dispatcher(rank: int) -> None:
    problem, x, ids, scores, w = flat_problem(rank)
    for options in ({"num_max_tokens_per_rank": 14}, {"capacity": 50, "alignment": 8}):
        dispatcher = fusedcomm.moe.TokenDispatcher(num_experts=6, top_k=2, **options).build()
        dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (SIZE,)))
        counts = torch.bincount(ids[ids >= 0], minlength=6)
        rows, counts, metadata = dispatcher.dispatch(x, scores, ids, counts)
        y = dispatcher.combine(experts(rows, w, counts), metadata, x)
        check(problem, rank, y, (x, w, scores), [t.clone().requires_grad_() for t in problem.scores])
    dispatcher = fusedcomm.moe.TokenDispatcher(num_experts=6, top_k=2).build()
    with pytest.raises(ValueError, match="ep_mesh must be a 1-D DeviceMesh, got None"):
        dispatcher.wire_meshes(ep_mesh=None)
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (SIZE,)))
    assert dispatcher.dispatch(x[:4], scores[:4], ids[:4], None)[0].shape == (2 * 4 * 2, H)


@pytest.mark.skipif(HAS_SWITCH, reason="torch is 2.15 or newer")
def test_token_switch_needs_a_torch_that_has_it() -> None:
    with pytest.raises(ValueError, match=r"torch must be 2\.15 or newer, got"):
        fusedcomm.moe.TokenSwitch(None, 6, 14, 4)


@on_ranks(SIZE)
@pytest.mark.skipif(not HAS_SWITCH, reason="torch is older than 2.15")
def test_token_switch(rank: int) -> None:
    """torch's methods around it; a token's rows are weighed by the caller, with weights that came with the rows."""
    problem, x, ids, scores, w = flat_problem(rank)
    switch = fusedcomm.moe.TokenSwitch(None, 6, 14, problem.capacity, 4 * H)
    with empty_is_nan():
        counts = torch.full((4,), -1, dtype=torch.int32)
        routing = switch.create_routing(ids, counts, layout="expert_major")
        assert counts.tolist() == [*problem.counts[rank * 3 : rank * 3 + 3], -1]
        rows, weights, idx = switch.dispatch(routing, x, scores.detach(), problem.capacity)
        assert idx is None
        y = switch.combine(routing, experts(rows * weights[:, None], w, counts[:3]))
        check(problem, rank, y, (x, w), problem.scores)
        out: Any = torch.empty_like(rows), torch.empty_like(weights), None
        assert switch.dispatch(routing, x, scores, out=out) is out and out[0].equal(rows) and out[1].equal(weights)
        assert switch.combine(routing, rows.detach(), out=torch.empty_like(x.detach())).isfinite().all()
    with pytest.raises(ValueError, match="layout must be 'expert_major' or 'flat', got None"):
        switch.create_routing(ids, layout=None)
    with pytest.raises(ValueError, match="out_tokens must be"):
        switch.dispatch(routing, x, scores, 3)
    with pytest.raises(ValueError, match="expert_tokens must be"):
        switch.combine(routing, rows[:3])


@on_ranks(SIZE)
@pytest.mark.skipif(not HAS_SWITCH, reason="torch is older than 2.15")
def test_flat_rows_of_a_token_switch(rank: int) -> None:
    problem, x, ids, scores, w = flat_problem(rank)
    xs, numbers, weights = (
        torch.cat([t.flatten(0, 1) for t in each]) for each in (problem.xs, problem.ids, problem.scores)
    )
    here = numbers // 3 == rank
    order = numbers.where(here, 6).argsort(dim=1, stable=True)  # choices of other ranks are last
    want = [t.gather(1, order) for t in (numbers.sub(3 * rank).where(here, -1), weights.where(here, 0))]
    wants = [t[here.any(1)] for t in (xs, *want)]
    switch = fusedcomm.moe.TokenSwitch(None, 6, 14, 28)
    with empty_is_nan():
        counts = torch.full((4,), -1, dtype=torch.int32)
        routing = switch.create_routing(ids, counts, layout="flat")
        assert counts.tolist() == [*problem.counts[rank * 3 : rank * 3 + 3], -1]
        rows, weights, numbers = switch.dispatch(routing, x, scores.detach(), 28)
        for got, each, rest in zip((rows, numbers, weights), wants, (0, -1, 0), strict=True):
            assert got[: len(each)].equal(each.to(got.dtype)) and (got[len(each) :] == rest).all()
        h = (rows[:, None, None] @ w[numbers.clamp(min=0)] * weights[..., None, None]).sum((1, 2))
        check(problem, rank, switch.combine(routing, h), (x, w), problem.scores)


@on_ranks(SIZE)
def test_plans_and_flops(rank: int) -> None:
    x, w, up = (torch.empty(shape, device="meta") for shape in ((4, H), (2, H, N), (2, N, H)))
    ids, scores = torch.zeros(4, 2, dtype=torch.int64, device="meta"), torch.empty(4, 2, device="meta")
    calls: dict[str, tuple[Any, ...]] = {"moe_dispatch": (x, ids, 4, 64), "dispatch_grouped_matmul": (x, ids, w, 4, 64)}
    h, _, routing = fusedcomm.dispatch_grouped_matmul(*calls["dispatch_grouped_matmul"])
    calls |= {"moe_combine": (h, routing, scores), "grouped_matmul_combine": (h, up, routing, scores)}
    columns = [H, H, N, H]
    for (op, args), num in zip(calls.items(), columns, strict=True):
        plan = fusedcomm.explain(op, *args)
        num_bytes = bytes_of_rows(64, num, 4) if "dispatch" in op else 64 * num * 4
        assert (plan.algorithm, plan.slot_bytes) == ("chunked", num_bytes) and plan.op in plan.__repr__()
        with fresh_group(WORKSPACE_BYTES="2048") as group:
            small = fusedcomm.explain(op, *args, group=group)
            assert small.algorithm == "unfused" and "FUSEDCOMM_WORKSPACE_BYTES=2048" in small.reason
            with fusedcomm.force_algorithm("chunked", strict=True), pytest.raises(RuntimeError, match="cannot run as"):
                fusedcomm.explain(op, *args, group=group)
            for experts, size, want in ((2, 32 << 20, "pipelined"), (1, 32 << 20, "unfused"), (2, 1 << 20, "unfused")):
                where = torch.device("cuda"), size, experts, member_of(group)  # as GPUs without a workspace
                assert routed._algorithm(op, x.dtype, *where, proves=False)[0] == want
        for forced in ("unfused", "pipelined")[: 1 + (op != "moe_dispatch")]:
            with fusedcomm.force_algorithm(forced, strict=True):
                plan = fusedcomm.explain(op, *args)
                assert (plan.algorithm, plan.reason) == (forced, "forced")
        with pytest.raises((TypeError, ValueError), match="must be"):
            fusedcomm.explain(op, x.to(torch.int32), *args[1:])
    x, w, up, scores = (torch.ones_like(t, device="cpu").requires_grad_() for t in (x, w, up, scores))
    with FlopCounterMode(display=False) as counter:
        h, _, routing = fusedcomm.dispatch_grouped_matmul(x, torch.zeros_like(ids, device="cpu"), w, 4, 64)
        fusedcomm.grouped_matmul_combine(h, up, routing, scores).sum().backward()
    assert counter.get_total_flops() == 3 * (2 * 64 * H * N) * 2
