"""Bad input to every op: a ValueError with the same text on CPU and meta tensors, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.groups import check_bad_input, check_values
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.problems import OPS

GOOD: dict[str, dict[str, Any]] = {
    "matmul_all_to_all": {"x": (4, 8), "w": (8, 6), "gather_dim": 0, "scatter_dim": 1, "bias": None, "out_shape": None},
    "all_to_all_matmul": {"x": (4, 8), "w": (16, 6), "gather_dim": 1, "scatter_dim": 0, "bias": None},
    "all_gather_matmul": {"x": (4, 8), "w": (8, 6), "gather_dim": 0, "bias": None},
    "matmul_reduce_scatter": {"x": (4, 8), "w": (8, 6), "scatter_dim": 0, "bias": None, "reduce_op": "sum"},
    "matmul_all_reduce": {"x": (4, 8), "w": (8, 6), "bias": None, "reduce_op": "sum"},
}
OF_ALL = [  # what is changed, and the message
    ({"x": (8,)}, "x must have at least 2 dims"),
    ({"w": (8,)}, "w must be 2-D .* batch dims, got 1 dims beside 2"),
    ({"w": (2, 8, 6)}, "w must be 2-D .* batch dims, got 3 dims beside 2"),
    ({"w": (9, 6)}, r"x and w must agree on K, got \d+ and 9"),
    ({"bias": (1, 6)}, r"bias must have shape \[N\] = \[6\], got \[1, 6\]"),
]
BAD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "matmul_all_to_all": [
        ({"x": (3, 4, 8), "w": (2, 8, 6)}, "batch dims of w must equal those of x"),
        ({"gather_dim": 2}, r"gather_dim must be in \[-2, 1\], got 2"),
        ({"scatter_dim": -3}, r"scatter_dim must be in \[-2, 1\], got -3"),
        ({"scatter_dim": -2}, "gather_dim and scatter_dim must differ, got 0 and -2"),
        ({"out_shape": [4]}, "out_shape must be sizes whose product is N=6"),
        ({"out_shape": [-1, -6]}, "out_shape must be sizes whose product is N=6"),
        ({"bias": (8,)}, r"bias must have shape \[N\] = \[6\]"),
    ],
    "all_to_all_matmul": [
        ({"w": (32, 6)}, "the exchanged x and w must agree on K, got 16 and 32"),
        (
            {"x": (4, 6, 8), "w": (3, 16, 6), "gather_dim": 2, "scatter_dim": 1},
            r"batch dims of w must equal those of the exchanged x, got \(3,\) and \(4,\)",
        ),
        ({"gather_dim": 2}, r"gather_dim must be in \[-2, 1\], got 2"),
        ({"scatter_dim": -3}, r"scatter_dim must be in \[-2, 1\], got -3"),
        ({"scatter_dim": -1}, "gather_dim and scatter_dim must differ, got 1 and -1"),
        ({"bias": (16,)}, r"bias must have shape \[N\] = \[6\], got \[16\]"),
    ],
    "all_gather_matmul": [
        ({"gather_dim": 1}, "the gathered x and w must agree on K, got 16 and 8"),
        (
            {"x": (2, 4, 8), "w": (2, 8, 6)},
            r"batch dims of w must equal those of the gathered x, got \(2,\) and \(4,\)",
        ),
        ({"gather_dim": 2}, r"gather_dim must be in \[-2, 1\], got 2"),
        ({"gather_dim": -3}, r"gather_dim must be in \[-2, 1\], got -3"),
        ({"w": []}, "w must be a tensor or a list of at least one, got an empty list"),
        ({"w": [(8, 6), (9, 6)]}, "the gathered x and w must agree on K, got 8 and 9"),
        (
            {"x": (1, 4, 8), "gather_dim": 1, "w": [(8, 6), (1, 8, 6)]},
            "either every w or none must have batch dims, got 2 and 3 dims",
        ),
        ({"w": [(8, 6), (8, 3)], "bias": [(6,)]}, "bias must have one entry per w, 2, got 1"),
        ({"w": [(8, 6), (8, 3)], "bias": (6,)}, "bias must be a list or None beside a list of w, got a tensor"),
        ({"bias": [(6,)]}, "bias must be a tensor or None beside one w, got a list"),
        ({"w": [(8, 6), (8, 3)], "bias": [None, (6,)]}, r"bias must have shape \[N\] = \[3\], got \[6\]"),
    ],
    "matmul_reduce_scatter": [
        ({"x": (3, 4, 8), "w": (2, 8, 6)}, r"batch dims of w must equal those of x, got \(2,\) and \(3,\)"),
        ({"scatter_dim": 2}, r"scatter_dim must be in \[-2, 1\], got 2"),
        ({"scatter_dim": -3}, r"scatter_dim must be in \[-2, 1\], got -3"),
        ({"reduce_op": "max"}, "reduce_op must be one of sum, avg, got 'max'"),
        ({"bias": (3,)}, r"bias must have shape \[N\] = \[6\], got \[3\]"),
        ({"bias": (6,), "scatter_dim": 1}, r"bias must have shape \[N / R\] = \[3\], got \[6\]"),
        ({"partial_bias": (3,), "scatter_dim": 1}, r"partial_bias must have shape \[N\] = \[6\], got \[3\]"),
    ],
    "matmul_all_reduce": [
        ({"x": (3, 4, 8), "w": (2, 8, 6)}, r"batch dims of w must equal those of x, got \(2,\) and \(3,\)"),
        ({"reduce_op": "mean"}, "reduce_op must be one of sum, avg, got 'mean'"),
        ({"bias": (3,)}, r"bias must have shape \[N\] = \[6\], got \[3\]"),
        ({"partial_bias": (3,)}, r"partial_bias must have shape \[N\] = \[6\], got \[3\]"),
    ],
}


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_it_is_a_value_error_on_every_device(rank: int, op: str) -> None:
    for change, message in [*OF_ALL, *BAD[op]]:
        check_bad_input(rank, op, GOOD[op] | change, message)
    ragged = "ragged" if op == "matmul_all_to_all" else f"{op}-ragged"
    check_values(rank, NAMED[ragged], torch.float32, "chunked", 1)  # nothing is lost
