"""The ops of a mixture of experts behind torch's and torchtitan's interfaces."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fusedcomm
from tests.helpers.groups import empty_is_nan
from tests.helpers.on_ranks import on_ranks
from tests.ops.test_moe import Case, H, Problem, integers

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
    for wrong in ("flat", None):
        with pytest.raises(ValueError, match="layout must be 'expert_major'"):
            switch.create_routing(ids, layout=wrong)
    with pytest.raises(ValueError, match="out_tokens must be"):
        switch.dispatch(routing, x, scores, 3)
    with pytest.raises(ValueError, match="expert_tokens must be"):
        switch.combine(routing, rows[:3])
