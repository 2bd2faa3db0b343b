"""all_to_all_matmul: which dims make up K, and bad input. The rest is in the tests of all ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedcomm.geometry import shapes
from tests.helpers.groups import bad_ids, check_bad_input, check_values
from tests.helpers.op_problems import NAMED

OP = "all_to_all_matmul"


@pytest.mark.parametrize(
    "x, w, gather_dim, scatter_dim, out_shape",
    [
        ((2, 6, 4, 8), (64, 5), 2, 1, [2, 3, 5]),  # K = heads * head_dim
        ((2, 6, 4, 8), (16, 5), 3, 1, [2, 3, 4, 5]),  # K = the gathered head_dim alone
        ((2, 6, 1, 8), (8, 5), 1, 0, [1, 12, 1, 5]),  # as few dims as make up K: not 1 * 8
        ((2, 6, 4, 8), (2, 64, 5), 2, 1, [2, 3, 5]),  # a batched w leaves one dim of rows
        ((2, 6, 4, 8), (4, 6, 8, 5), 0, 2, None),  # two batch dims: (4, 6) beside rows 2, columns 8
    ],
)
def test_as_few_dims_as_possible_make_up_k(
    x: tuple[int, ...], w: tuple[int, ...], gather_dim: int, scatter_dim: int, out_shape: list[int] | None
) -> None:
    exchange = shapes.all_to_all_matmul(x, w, gather_dim, scatter_dim, 2)
    assert exchange.out_shape == (out_shape or [*exchange.shape[:3], 5])
    assert exchange.k == w[-2]


GOOD: dict[str, Any] = {"x": (4, 8), "w": (16, 6), "gather_dim": 1, "scatter_dim": 0, "bias": None}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": (8,)}, "x must have at least 2 dims"),
    ({"w": (16,)}, "w must be 2-D .* the exchanged x's batch dims, got 1 dims beside 2"),
    ({"w": (2, 16, 6)}, "w must be 2-D .* the exchanged x's batch dims, got 3 dims beside 2"),
    ({"w": (9, 6)}, "the exchanged x and w must agree on K, got 16 and 9"),
    ({"w": (32, 6)}, "the exchanged x and w must agree on K, got 16 and 32"),
    (
        {"x": (4, 6, 8), "w": (3, 16, 6), "gather_dim": 2, "scatter_dim": 1},
        r"batch dims of w must equal those of the exchanged x, got \(3,\) and \(4,\)",
    ),
    ({"gather_dim": 2}, r"gather_dim must be in \[-2, 1\], got 2"),
    ({"scatter_dim": -3}, r"scatter_dim must be in \[-2, 1\], got -3"),
    ({"scatter_dim": -1}, "gather_dim and scatter_dim must differ, got 1 and -1"),
    ({"bias": (1, 6)}, r"bias must have shape \[N\] = \[6\], got \[1, 6\]"),
    ({"bias": (16,)}, r"bias must have shape \[N\] = \[6\], got \[16\]"),
]


@pytest.mark.parametrize("change, message", BAD, ids=bad_ids(BAD))
def test_bad_input_is_a_value_error_on_every_device(ranks: Any, change: dict[str, Any], message: str) -> None:
    ranks(2).run(check_bad_input, OP, GOOD | change, message)
    ranks(2).run(check_values, NAMED[f"{OP}-ragged"], torch.float32, "chunked", 1)  # nothing is lost
