"""Ranks in different calls, for every op. Ranks that do not come: tests/memory/test_faults.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import fusedcomm
from fusedcomm.plan import planner
from tests.helpers.groups import call, check, fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.problems import Problem
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
