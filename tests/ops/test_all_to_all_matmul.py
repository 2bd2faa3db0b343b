"""all_to_all_matmul: which dims make up K. The rest is in the tests of all ops."""

from __future__ import annotations

import pytest

from fusedcomm.plan.geometry import shapes


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
