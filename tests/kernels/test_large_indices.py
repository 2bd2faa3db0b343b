"""Indices beyond 32 bits in the Triton interpreter, whose integers wrap as a GPU's do: strides near 2^31 and 2^32, and
results of more elements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.testing import launch_now
from tests.helpers.virtual_ranks import FINGERPRINT, VirtualRank, sparse, virtual_ranks

pytestmark = pytest.mark.usefixtures("overflow")

K, N, ROWS = 5, 7, 6
REACH = [2**31 - 64, 2**31 + 64, 2**32 + 64]  # index of w's last row or column


def far_apart(values: Tensor, reach: int, transposed: bool) -> Tensor:
    """``values`` [K, N] with its rows, or transposed its columns, so far apart that the last begins at ``reach``."""
    long, short = values.shape if not transposed else values.shape[::-1]
    step = -(-reach // (long - 1))
    strides = (1, step) if transposed else (step, 1)
    w = sparse((long - 1) * step + short).as_strided(values.shape, strides)
    return w.copy_(values)


def batches_apart(values: Tensor, reach: int) -> Tensor:
    """``values`` [3, K, N] with its matrices so far apart that the last begins at ``reach``."""
    w = sparse(reach + 2 * K * N).as_strided(values.shape, (reach // 2, N, 1))
    return w.copy_(values)


def integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def one_rank(exchange: Exchange) -> VirtualRank:
    (rank,) = virtual_ranks(1, exchange.chunk_numel * 4)
    return rank


LAYOUTS: dict[str, tuple[Callable[[Tensor, int], Tensor], tuple[int, ...]]] = {  # of w, and its batches
    "rows apart": (partial(far_apart, transposed=False), ()),
    "columns apart": (partial(far_apart, transposed=True), ()),
    "batches apart": (batches_apart, (3,)),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
reaches = pytest.mark.parametrize("reach", REACH)


@layouts
@reaches
def test_a_push_reads_w_where_it_lies(reach: int, layout: str) -> None:
    place, batches = LAYOUTS[layout]
    x, values = integers(*batches, ROWS, K), integers(*batches, K, N)
    exchange = shapes.matmul_all_to_all(x.shape, values.shape, None, 0, 1, 1)
    rank, out = one_rank(exchange), torch.full((*batches, ROWS, N), torch.nan)
    (spans,) = exchange.rounds(1 << 62)
    launch_now.push(x, place(values, reach), None, spans, rank, FINGERPRINT)
    launch_now.unpack(out, spans, rank, FINGERPRINT)
    torch.testing.assert_close(out, x @ values, rtol=0, atol=0)


@layouts
@reaches
def test_a_gather_reads_w_where_it_lies(reach: int, layout: str) -> None:
    place, batches = LAYOUTS[layout]
    x, values = integers(*batches, ROWS, K), integers(*batches, K, N)
    exchange = shapes.all_gather_matmul(x.shape, (values.shape,), len(batches), 1)
    rank, out = one_rank(exchange), torch.full((*batches, ROWS, N), torch.nan)
    (spans,) = exchange.rounds(1 << 62)
    launch_now.pack(x, spans, rank, FINGERPRINT)
    launch_now.gather_matmul(out, place(values, reach), None, spans, rank, FINGERPRINT, end_round=True)
    torch.testing.assert_close(out, x @ values, rtol=0, atol=0)
