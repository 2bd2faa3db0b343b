"""An all_reduce by blocks where the group divides neither rows nor columns of the result: x gets a few more rows."""

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from fusedcomm.plan.builder import Builder
from fusedcomm.plan.chunk_matmul import Operand
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.scaling import Scaled
from fusedcomm.plan.terms import Reduce, Terms


def padded(program: Reduce, s: Builder, exchange: Exchange, terms: Terms) -> Tensor:
    """``program(s, exchange, terms)``, which takes x with the exchange's rows, and the bias of this rank's columns."""
    x, bias, out, residual = terms.x, terms.bias, terms.out, terms.residual
    shape = x.shape
    if exchange.is_plain:
        assert isinstance(x, Tensor)
        x = s.reshape(x, math.prod(shape[:-1]), shape[-1])
    batches, num_rows, k = x.shape[: exchange.num_batch_dims], exchange.shape[-2], x.shape[-1]
    padding = num_rows - math.prod(x.shape[exchange.num_batch_dims : -1])
    if bias is not None and exchange.split_dim == len(exchange.shape) - 1:  # also where all dims count as rows
        bias = bias.chunk(s.group_size)[s.rank]
    if not padding:
        made: Tensor = program(s, exchange, terms._replace(x=x, bias=bias))
        return made

    def with_more_rows(t: Operand, n: int) -> Any:
        if isinstance(t, Scaled):
            scale = t.scale if t.scale.numel() == 1 else with_more_rows(t.scale, t.scale.shape[-1])
            return replace(t, values=with_more_rows(t.values, n), scale=scale)
        rows = s.temporary((*batches, num_rows, n), t.dtype)
        given, more = rows.split([num_rows - padding, padding], -2)
        s.copy(given.view(t.shape), t)
        s.copy(more, given.narrow(-2, 0, 1).expand(more.shape))
        return rows

    more = None if residual is None else with_more_rows(residual, exchange.shape[-1])
    terms = terms._replace(x=with_more_rows(x, k), bias=bias, out=None, residual=more)
    found: Tensor = program(s, exchange, terms)
    found = found.narrow(-2, 0, num_rows - padding)
    if out is None and not found.is_contiguous():
        out = s.result((*x.shape[:-1], exchange.shape[-1]), x.dtype)
    if out is None:
        return found.view(*shape[:-1], exchange.shape[-1])
    s.copy(out.view(found.shape), found)
    return out
