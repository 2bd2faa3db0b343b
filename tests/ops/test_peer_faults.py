"""Ranks in different calls, and calls larger than the workspace's cap, for every op.

Ranks that do not come: tests/memory/test_faults.py.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.memory.segment import NUM_SLOTS, HeaderLayout
from fusedcomm.plan import planner
from tests.helpers.groups import call, check, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.problems import Problem, flat, integers, unflat
from tests.helpers.spies import drop_plans


@on_ranks(2)
def test_ranks_that_cut_a_call_into_other_rounds_do_not_believe_each_other(rank: int) -> None:
    """As where one runs `chunked` on a GPU, which may cut a gather of K into pieces, and one runs `fused`."""
    problem = NAMED["bias"]
    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, problem, call(group, problem))
        rounds = planner._rounds
        cut = mock.patch.object(planner, "_rounds", lambda *args: (rounds(*args)[0], 1 + rank))
        with cut, pytest.raises(fusedcomm.PeerMismatchError):
            drop_plans()
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


OTHERS = [
    (NAMED["bias"], NAMED["matmul_all_reduce-nothing-divides"]),
    (NAMED["all_to_all_matmul-heads-gathered"], NAMED["all_to_all_matmul-head-dim-gathered"]),
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
@pytest.mark.parametrize(
    ("problem", "algorithm"),
    [
        *((problem, "chunked") for problem in ROUNDS),
        pytest.param(ROUNDS[1], "fused", marks=pytest.mark.thorough),
        *(pytest.param(problem, "fused", marks=pytest.mark.nightly) for problem in ROUNDS[2:]),
    ],
    ids=str,
)
def test_a_call_larger_than_the_cap_runs_in_rounds(rank: int, problem: Problem, algorithm: str) -> None:
    """The call stays within the memory that was allowed. Gradients are those without a cap."""
    size = dist.get_world_size()
    inputs = integers(problem, rank, size)
    exchange = problem.exchange(*inputs[:2], size)
    slot_bytes = -(-max(exchange.row_numel, exchange.chunk_numel // 4) * 4 * size // 128) * 128
    cap = HeaderLayout(size).header_bytes + NUM_SLOTS * slot_bytes
    grads = []
    for limit in (cap, 1 << 20):
        with fresh_group(WORKSPACE_BYTES=str(limit)) as group, fusedcomm.force_algorithm(algorithm, strict=True):
            plan = problem.plan(inputs, group)
            assert plan.num_rounds >= 3 or limit > cap
            for seed in range(3 if algorithm == "chunked" else 1):  # the third is a prepared call
                check(group, problem, call(group, problem, seed), seed)
                held = member_of(group).workspace
                assert held.buffers[rank].numel() <= limit
                num_epochs = (2 if problem.op == "matmul_all_reduce" else 1) * plan.num_rounds
                assert held.epoch == (seed + 1) * num_epochs
            tensors = [None if t is None else t.requires_grad_() for t in flat(integers(problem, rank, size))]
            outs = problem.call(unflat(problem, tensors), group)
            loss = torch.stack([(out**2).sum() for out in (outs if isinstance(outs, list) else [outs])]).sum()
            loss.backward()
            grads.append([t.grad for t in tensors if t is not None])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
