"""An all_reduce by blocks where the group divides no dim of the result: x gets a few more rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fusedcomm.plan.builder import Builder
from fusedcomm.plan.geometry.exchange import Exchange


def padded(program: Callable[..., Tensor], s: Builder, exchange: Exchange, *operands: Any, scale: float) -> Tensor:
    """``program(s, exchange, ...)``, which takes x with the exchange's rows, and the bias of this rank's columns."""
    x, w, bias, partial_bias, out = operands
    num_rows = x.shape[-2]
    padding = exchange.shape[x.ndim - 2] - num_rows
    if bias is not None and exchange.splits_columns:
        bias = bias.chunk(s.group_size)[s.rank]
    if not padding:
        return program(s, exchange, x, w, bias, partial_bias, out, scale=scale)
    rows = s.temporary((*x.shape[:-2], num_rows + padding, x.shape[-1]), x.dtype)
    given, more = rows.split([num_rows, padding], -2)
    s.copy(given, x)
    s.copy(more, x.narrow(-2, 0, 1).expand(more.shape))
    found = program(s, exchange, rows, w, bias, partial_bias, None, scale=scale).narrow(-2, 0, num_rows)
    if out is None and not found.is_contiguous():
        out = s.result(found.shape, x.dtype)
    if out is None:
        return found
    s.copy(out, found)
    return out
