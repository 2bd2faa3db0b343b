"""What goes wrong between ranks, for every op: absent, in another call; and calls larger than the workspace's cap."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.algorithms import planner
from fusedcomm.runtime.segment import NUM_SLOTS, HeaderLayout
from tests.helpers.groups import WITH_FEW_FUSED, call, check, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.problems import OPS, Problem, flat, integers, unflat
from tests.helpers.tiers import ALGORITHMS_WITH_SEGMENTS

ONE_EACH = {
    "matmul_all_to_all": NAMED["bias"],
    "all_to_all_matmul": NAMED["all_to_all_matmul-heads-gathered"],
    "all_gather_matmul": NAMED["all_gather_matmul-list-k-gathered"],
    "matmul_reduce_scatter": NAMED["matmul_reduce_scatter-batch-rows-scattered"],
    "matmul_all_reduce": NAMED["matmul_all_reduce-nothing-divides"],
}


@on_ranks(2)
@pytest.mark.parametrize(("op", "algorithm"), WITH_FEW_FUSED)
def test_a_peer_that_never_calls(rank: int, op: str, algorithm: str) -> None:
    """One rank never calls. The others say so in time, name it, and are right again after a reset."""
    problem = ONE_EACH[op]
    with fresh_group(TIMEOUT_S="1") as group, fusedcomm.force_algorithm(algorithm, strict=True):
        check(group, problem, call(group, problem))
        dist.barrier(group)
        if rank != 1:
            start = time.monotonic()
            with pytest.raises(fusedcomm.PeerTimeoutError, match=r"\[1\].* did not signal") as caught:
                call(group, problem, 1)
            assert time.monotonic() - start < 10
            assert (caught.value.peers, caught.value.op) == ([1], problem.op)
        dist.barrier(group)
        with pytest.raises(fusedcomm.PeerError, match=r"fusedcomm\.reset"):
            call(group, problem, 1)
        dist.barrier(group)
        fusedcomm.reset(group)
        for seed in range(3):
            check(group, problem, call(group, problem, seed), seed)


@on_ranks(2)
def test_ranks_that_cut_a_call_into_other_rounds_do_not_believe_each_other(rank: int) -> None:
    """As where one runs `chunked` on a GPU, which may cut a gather of K into pieces, and one runs `fused`."""
    problem = NAMED["bias"]
    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, problem, call(group, problem))
        rounds = planner._rounds
        cut = mock.patch.object(planner, "_rounds", lambda *args: (rounds(*args)[0], 1 + rank))
        with cut, pytest.raises(fusedcomm.PeerMismatchError):
            call(group, problem)
        dist.barrier(group)


def check_mismatch(rank: int, problem: Problem, other: Problem, algorithm: str) -> None:
    with fresh_group() as group, fusedcomm.force_algorithm(algorithm, strict=True):
        check(group, problem, call(group, problem))
        check(group, other, call(group, other))
        with pytest.raises(fusedcomm.PeerMismatchError, match="another op, or this one with other shapes") as caught:
            call(group, other if rank == 1 else problem)
        assert caught.value.op == (other if rank == 1 else problem).op
        assert caught.value.peers == [1 - rank]
        dist.barrier(group)
        fusedcomm.reset(group)
        for seed in range(3):
            check(group, problem, call(group, problem, seed), seed)


@pytest.mark.parametrize("algorithm", ALGORITHMS_WITH_SEGMENTS)
@pytest.mark.parametrize("i, op", list(enumerate(OPS)), ids=str)
def test_a_peer_in_another_op(ranks: Any, i: int, op: str, algorithm: str) -> None:
    ranks(2).run(check_mismatch, ONE_EACH[op], ONE_EACH[OPS[(i + 1) % len(OPS)]], algorithm)


OTHERS = [
    (NAMED["all_to_all_matmul-heads-gathered"], NAMED["all_to_all_matmul-head-dim-gathered"]),
    (NAMED["all_gather_matmul-rows-gathered"], NAMED["all_gather_matmul-ragged"]),
    (NAMED["all_gather_matmul-batch-gathered"], NAMED["all_gather_matmul-batch-rows-gathered"]),
    (NAMED["matmul_reduce_scatter-batch-scattered"], NAMED["matmul_reduce_scatter-batched-w"]),
    (
        NAMED["matmul_reduce_scatter-rows-scattered"],
        Problem("avg", (3, 5), 7, scatter_dim=0, reduce_op="avg", op="matmul_reduce_scatter"),
    ),
    (NAMED["matmul_all_reduce-ragged"], NAMED["matmul_all_reduce-one-row"]),
]


@pytest.mark.parametrize("problem, other", OTHERS, ids=str)
def test_a_peer_with_other_shapes_or_dims(ranks: Any, problem: Problem, other: Problem) -> None:
    ranks(2).run(check_mismatch, problem, other, "chunked")


ROUNDS = [
    Problem("rounds", (2, 9, 6), 8, 1, 2, bias=True),
    Problem("rounds", (2, 9, 2, 4), 8, 2, 1, k_dims=2, bias=True, op="all_to_all_matmul"),
    Problem("rounds-batched", (3, 9, 6), 8, 2, 0, batched=True, op="all_to_all_matmul"),
    Problem("rounds", (2, 9, 6), (8, 5), 1, bias=(True, False), op="all_gather_matmul"),
    Problem("rounds-k-gathered", (2, 9, 6), 8, 2, bias=True, op="all_gather_matmul"),
    Problem("rounds", (2, 9, 6), 8, scatter_dim=1, bias=True, op="matmul_reduce_scatter"),
    Problem("rounds-columns", (2, 9, 6), 8, scatter_dim=2, bias=True, reduce_op="avg", op="matmul_reduce_scatter"),
    Problem("rounds", (2, 9, 6), 8, bias=True, op="matmul_all_reduce"),
    Problem("rounds-padded", (5, 7, 6), 9, bias=True, reduce_op="avg", op="matmul_all_reduce"),
]


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS_WITH_SEGMENTS)
@pytest.mark.parametrize("problem", ROUNDS, ids=str)
def test_a_call_larger_than_the_cap_runs_in_rounds(rank: int, problem: Problem, algorithm: str) -> None:
    """The call stays within the memory that was allowed, forward and backward."""
    size = dist.get_world_size()
    inputs = integers(problem, rank, size)
    exchange = problem.exchange(*inputs[:2], size)
    slot_bytes = -(-max(exchange.row_numel, exchange.chunk_numel // 4) * 4 * size // 128) * 128
    cap = HeaderLayout(size).header_bytes + NUM_SLOTS * slot_bytes
    with fresh_group(WORKSPACE_BYTES=str(cap)) as group, fusedcomm.force_algorithm(algorithm, strict=True):
        plan = problem.plan(inputs, group)
        assert plan.num_rounds >= 3
        for seed in range(3 if algorithm == "chunked" else 1):
            check(group, problem, call(group, problem, seed), seed)
            held = member_of(group).workspace
            assert held.buffers[rank].numel() <= cap
            num_epochs = (2 if problem.op == "matmul_all_reduce" else 1) * plan.num_rounds
            assert held.epoch == (seed + 1) * num_epochs


@on_ranks(3)
@pytest.mark.parametrize("problem", ROUNDS, ids=str)
def test_a_backward_larger_than_the_cap_runs_in_rounds(rank: int, problem: Problem) -> None:
    """The gradients are those without a cap."""
    size = dist.get_world_size()
    grads = []
    for cap in (4096, 1 << 20):
        with fresh_group(WORKSPACE_BYTES=str(cap)) as group, fusedcomm.force_algorithm("chunked", strict=True):
            tensors = [None if t is None else t.requires_grad_() for t in flat(integers(problem, rank, size))]
            outs = problem.call(unflat(problem, tensors), group)
            loss = torch.stack([(out**2).sum() for out in (outs if isinstance(outs, list) else [outs])]).sum()
            loss.backward()
            grads.append([t.grad for t in tensors if t is not None])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
