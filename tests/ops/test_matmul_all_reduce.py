"""matmul_all_reduce: what is cut where nothing divides. The rest is in the tests of all ops."""

from __future__ import annotations

import math

import pytest
import torch

import fusedcomm
from fusedcomm.plan.geometry import shapes
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import pushed


@pytest.mark.parametrize(
    "x, w, shape, split_dim",
    [
        ((12, 5), (5, 8), [12, 8], 0),
        ((4, 5), (5, 8), [4, 8], 0),
        ((128, 5), (5, 136), [128, 136], 1),  # wide: each rank reads all of x, and a part of w
        ((124, 5), (5, 136), [124, 136], 0),  # few rows
        ((7, 5), (5, 8), [7, 8], 1),
        ((7, 5), (5, 9), [8, 9], 0),  # nothing divides: a row more
        ((2, 7, 5), (5, 9), [16, 9], 0),
        ((4, 7, 5), (5, 9), [28, 9], 0),
        ((4, 7, 5), (4, 5, 9), [4, 7, 9], 0),
        ((3, 7, 5), (3, 5, 9), [3, 8, 9], 1),
        ((0, 5), (5, 9), [0, 9], 0),
    ],
)
def test_the_dim_that_is_cut(x: tuple[int, ...], w: tuple[int, ...], shape: list[int], split_dim: int) -> None:
    exchange = shapes.matmul_all_reduce(x, w, "sum", 4)
    assert (exchange.shape, exchange.split_dim) == (shape, split_dim)
    assert math.prod(exchange.block) * 4 == math.prod(shape)


@on_ranks(4)
def test_padding_is_sent_and_not_seen(rank: int) -> None:
    """At most R - 1 rows more, per matrix, are computed and sent, and none is seen."""
    x, w = torch.randn(2, 7, 5), torch.randn(5, 9)
    with fusedcomm.force_algorithm("chunked", strict=True), pushed() as sent:
        out = fusedcomm.matmul_all_reduce(x, w)
    assert out.shape == (2, 7, 9) and out.is_contiguous()
    assert sent.num_bytes == 2 * 3 / 4 * (16 * 9 * 4)
