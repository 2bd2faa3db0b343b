"""The problems of proofs are exact in every dtype and order."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedcomm.ops import proof
from fusedcomm.ops.exact_problem import ExactProblem
from fusedcomm.ops.proof import SIZES
from fusedcomm.ops.whole_group import PROGRAMS
from tests.helpers.problems import OPS
from tests.helpers.tiers import nightly_but


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_ranks", nightly_but([2, 3], [2, 3, 8, 32]))
def test_problems_are_exact_in_every_dtype_and_take_several_rounds(op: str, num_ranks: int, uneven: bool) -> None:
    """Integers up to 256 are exact in bfloat16, and no partial sum is beyond the sum of magnitudes of few ones."""
    if uneven and not PROGRAMS[op].can_be_uneven:
        return
    problems: Any = [proof.problem_of(PROGRAMS[op], size, num_ranks, uneven=uneven) for size in proof.SIZES]
    for problem in problems:
        assert max(float(t.abs().max()) for t in problem.results()) <= 256
        assert sum(float(t.abs().sum()) for t in problem.biases) > 0
    exchanges = [problems[-1].exchange(rank) for rank in range(num_ranks)]
    assert all((each.cut is not None) == uneven for each in exchanges)
    assert [list(result.shape) for result in problems[-1].results()] == [each.out_shape for each in exchanges]
    slot_bytes = max(proof.slot_bytes(problem, torch.float32) for problem in problems)
    assert len(exchanges[0].rounds(slot_bytes // num_ranks // 4)) >= proof.NUM_ROUNDS
    assert op != "matmul_all_reduce" or not exchanges[0].splits_columns  # the proof gives every rank the whole bias
    few = [each.exchange(0).by_cublas for each in problems]
    assert "all_to_all" in op or few == [True, False, False]


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", pytest.param("matmul_all_reduce", marks=pytest.mark.thorough)])
def test_sums_of_many_ranks_are_exact_in_bfloat16_in_any_order(op: str) -> None:
    """A backend may add in the dtype of x."""
    problem = ExactProblem(PROGRAMS[op], replace(SIZES[-1], rows=12), 96, seed=0)
    partial = torch.stack([x @ w for x, w in zip(problem.xs, problem.ws, strict=True)])
    assert (partial.abs().sum(0) <= 256).all() and (partial != 0).any(0).any(-1).all()
    assert all((x != 0).any() for x in problem.xs)
