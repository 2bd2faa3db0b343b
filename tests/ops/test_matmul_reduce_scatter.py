"""matmul_reduce_scatter: averages, its bias, bad input. The rest is in the tests of all ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusedcomm
from tests.helpers.groups import bad_ids, check_bad_input, check_values
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.tiers import ALL_ALGORITHMS

OP = "matmul_reduce_scatter"


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
def test_each_rank_adds_its_own_bias_to_the_average(rank: int, algorithm: str) -> None:
    """Each rank adds its own bias, once, after the average.

    Where N is scattered the bias is a part as long as the result's.
    """
    x, w = torch.full((4, 2), 3.0 * (rank + 1)), torch.ones(2, 6)
    own = torch.arange(6) + 100.0 * rank
    with fusedcomm.force_algorithm(algorithm, strict=True):
        rows = fusedcomm.matmul_reduce_scatter(x, w, 0, bias=own, reduce_op="avg")
        columns = fusedcomm.matmul_reduce_scatter(x, w, 1, bias=own[:3], reduce_op="avg")
    torch.testing.assert_close(rows, 9 + own.expand(2, 6))
    torch.testing.assert_close(columns, 9 + own[:3].expand(4, 3))


GOOD: dict[str, Any] = {"x": (4, 8), "w": (8, 6), "scatter_dim": 0, "bias": None, "reduce_op": "sum"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": (8,)}, "x must have at least 2 dims"),
    ({"w": (8,)}, "w must be 2-D .* x's batch dims, got 1 dims beside 2"),
    ({"w": (2, 8, 6)}, "w must be 2-D .* x's batch dims, got 3 dims beside 2"),
    ({"w": (9, 6)}, "x and w must agree on K, got 8 and 9"),
    ({"x": (3, 4, 8), "w": (2, 8, 6)}, r"batch dims of w must equal those of x, got \(2,\) and \(3,\)"),
    ({"scatter_dim": 2}, r"scatter_dim must be in \[-2, 1\], got 2"),
    ({"scatter_dim": -3}, r"scatter_dim must be in \[-2, 1\], got -3"),
    ({"reduce_op": "max"}, "reduce_op must be one of sum, avg, got 'max'"),
    ({"bias": (3,)}, r"bias must have shape \[N\] = \[6\], got \[3\]"),
    ({"bias": (1, 6)}, r"bias must have shape \[N\] = \[6\], got \[1, 6\]"),
    ({"bias": (6,), "scatter_dim": 1}, r"bias must have shape \[N / R\] = \[3\], got \[6\]"),
]


@pytest.mark.parametrize("change, message", BAD, ids=bad_ids(BAD))
def test_bad_input_is_a_value_error_on_every_device(ranks: Any, change: dict[str, Any], message: str) -> None:
    ranks(2).run(check_bad_input, OP, GOOD | change, message)
    ranks(2).run(check_values, NAMED[f"{OP}-ragged"], torch.float32, "chunked", 1)  # nothing is lost
