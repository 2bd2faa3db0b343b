"""`pipelined` is proved as algorithms with a workspace are, by the group's own collectives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedcomm.ops.exact_problem import ExactProblem
from fusedcomm.ops.proof import SIZES
from fusedcomm.ops.whole_group import PROGRAMS
from tests.helpers.group_collectives import in_pieces
from tests.helpers.groups import call, check, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import OPS, Problem
from tests.ops.test_proof import plan_of_all, planted_in, proving, raises_everywhere, wrong_on_one_rank

BY_OP = {
    "matmul_all_to_all": Problem("rows", (30, 8), 12, 0, 1),
    "all_to_all_matmul": Problem("rows", (30, 8), 12, 1, 0, op="all_to_all_matmul"),
    "all_gather_matmul": Problem("rows", (200, 8), 12, 0, op="all_gather_matmul"),
    "matmul_reduce_scatter": Problem("rows", (200, 8), 12, scatter_dim=0, op="matmul_reduce_scatter"),
    "matmul_all_reduce": Problem("rows", (30, 8), 12, op="matmul_all_reduce"),
}
NAME = "{kind} pipelined float32"


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_a_right_algorithm_is_used(rank: int, op: str, tmp_path: Path) -> None:
    with in_pieces(3), proving(tmp_path, HOST_ID=f"host {rank}") as (group, made):
        for seed in range(2):
            check(group, BY_OP[op], call(group, BY_OP[op], seed), seed)
        plan = plan_of_all(group, BY_OP[op])
        assert plan.algorithm == "pipelined" and made == [f"{op} pipelined"]
        assert member_of(group).outcomes == {NAME.format(kind=PROGRAMS[op].kind): ""}


@on_ranks(2)
def test_sums_of_the_backend_have_a_proof_of_their_own(rank: int, tmp_path: Path) -> None:
    op = "matmul_reduce_scatter"
    by_ranks = NAME.format(kind="reduce_scatter")
    for sums, name in (("0", by_ranks), ("1", f"{by_ranks} with sums of the backend")):
        with in_pieces(3), proving(tmp_path, HOST_ID=f"host {rank}", BACKEND_SUMS=sums) as (group, made):
            check(group, BY_OP[op], call(group, BY_OP[op]))
            assert made == [f"{op} pipelined"] and member_of(group).outcomes[name] == ""


@on_ranks(2)
@pytest.mark.parametrize("plant", [wrong_on_one_rank, raises_everywhere])
@pytest.mark.parametrize("op", ["matmul_all_to_all", "all_gather_matmul"])
def test_a_wrong_one_is_not(rank: int, op: str, plant: Any, tmp_path: Path) -> None:
    with in_pieces(3), planted_in("pipelined", plant), proving(tmp_path, HOST_ID=f"host {rank}") as (group, made):
        for seed in range(2):
            check(group, BY_OP[op], call(group, BY_OP[op], seed), seed)
        plan = plan_of_all(group, BY_OP[op])
    assert plan.algorithm == "unfused" and made == [f"{op} pipelined"]
    assert "pipelined of float32 failed its proof on" in plan.reason or "raised MemoryError" in plan.reason


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_sums_of_many_ranks_are_exact_in_bfloat16_in_any_order(op: str) -> None:
    """A backend may add in the dtype of x."""
    problem = ExactProblem(PROGRAMS[op], replace(SIZES[1], rows=12), 96, seed=0)
    partial = torch.stack([x @ w for x, w in zip(problem.xs, problem.ws, strict=True)])
    assert (partial.abs().sum(0) <= 256).all() and (partial != 0).any(0).any(-1).all()
    assert all((x != 0).any() for x in problem.xs)
