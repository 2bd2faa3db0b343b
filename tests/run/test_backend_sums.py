"""FUSEDCOMM_BACKEND_SUMS: `pipelined` leaves sums to the reduce_scatter of the group's backend."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

import fusedcomm
from fusedcomm.memory import topology
from fusedcomm.plan.cost import in_pieces as cost
from tests.helpers.group_collectives import AS_IT_IS, EARLY, LATE, in_pieces, moved
from tests.helpers.groups import call, check, empty_is_nan, fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import Problem
from tests.ops.test_uneven import MANY_ROUNDS, check_call
from tests.plan.test_model import CALLS, CPU
from tests.run.test_pipelined import TOKENS

SUMS = {str(problem): problem for problem in TOKENS if problem.op in ("matmul_reduce_scatter", "matmul_all_reduce")}
SUMS["average"] = Problem("average", (2, 30, 16), 12, bias=True, reduce_op="avg", op="matmul_all_reduce")
UNEVEN = {name: case for name, case in MANY_ROUNDS.items() if case.op == "matmul_reduce_scatter"}


@on_ranks(3)
@pytest.mark.parametrize("name", SUMS)
def test_values_in_any_number_of_pieces(rank: int, name: str) -> None:
    problem = SUMS[name]
    num_collectives = 2 if problem.op == "matmul_all_reduce" else 1
    with fresh_group(BACKEND_SUMS="1") as group, fusedcomm.force_algorithm("pipelined", strict=True), empty_is_nan():
        for num_pieces, when in ((1, EARLY), (3, EARLY), (5, LATE)):
            with in_pieces(num_pieces), moved(when) as begun:
                check(group, problem, call(group, problem, num_pieces), num_pieces)
            assert begun.sums * num_collectives == len(begun.bytes_to_a_peer) > 0


@on_ranks(3)
@pytest.mark.parametrize("name", UNEVEN)
def test_parts_of_different_sizes(rank: int, name: str) -> None:
    with fresh_group(BACKEND_SUMS="1") as group, fusedcomm.force_algorithm("pipelined", strict=True):
        for num_pieces in (1, 4):
            with in_pieces(num_pieces), moved(LATE) as begun:
                check_call(UNEVEN[name], rank, 3, num_pieces, group)
            assert begun.sums > 0


@on_ranks(2)
def test_averages_whose_sum_would_overflow(rank: int) -> None:
    x, w = torch.full((32, 4), 100.0, dtype=torch.float16), torch.full((4, 8), 100.0, dtype=torch.float16)
    with fresh_group(BACKEND_SUMS="1") as group, fusedcomm.force_algorithm("pipelined", strict=True):
        out = fusedcomm.matmul_all_reduce(x, w, reduce_op="avg", group=group)
        total = fusedcomm.matmul_all_reduce(x, w, group=group)
    assert (out == 40000).all() and total.isinf().all()


@on_ranks(2)
def test_it_counts_where_all_ranks_have_it(rank: int) -> None:
    problem = SUMS["average"]
    with fresh_group(BACKEND_SUMS=str(rank)) as group, fusedcomm.force_algorithm("pipelined", strict=True):
        with in_pieces(2), moved(AS_IT_IS) as begun, mock.patch.object(topology.log, "warning") as warned:
            check(group, problem, call(group, problem))
        assert begun.sums == 0 and begun.bytes_to_a_peer
    (told,) = [args[0][0] % args[0][1:] for args in warned.call_args_list] if rank == 0 else [""]
    assert told == "FUSEDCOMM_BACKEND_SUMS=1 is not used: it must be set on all ranks, got ranks [1]" * (rank == 0)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_the_model_takes_the_link_of_what_moves_the_sums(op: str) -> None:
    slow_sums = replace(CPU, backend_bandwidth=CPU.backend_bandwidth | {"reduce_scatter": 1e3})
    slow_moves = replace(CPU, backend_bandwidth=CPU.backend_bandwidth | {"all_to_all": 1e3})
    for constants, backend_sums in ((slow_sums, True), (slow_moves, False)):
        here = cost.seconds(op, CALLS[op], "float32", constants, 2, backend_sums)
        assert here > 10 * cost.seconds(op, CALLS[op], "float32", constants, 2, not backend_sums)
