"""An all_reduce, a residual and an RMSNorm: ``residual_out = sum + bias + residual``, in float32, rounded once.

    one_shot    every rank sends its whole terms to all; each adds them, in rank order
    two_shot    a reduce_scatter whose owner adds the residual too, and a gather of the sums, on GPUs normed as they
                come, where parts are whole rows
    scattered   a reduce_scatter, on its wire, whose rank adds and norms its rows, on GPUs in the kernel that waits

The norm reads the rounded ``residual_out``, so that all ranks have the same bits. On GPUs, one_shot is three launches:
cuBLAS's, one that sends, and one that waits, adds and norms.
"""

import math

from torch import Tensor

from fusedcomm.plan import launches
from fusedcomm.plan.builder import Builder, Given, RmsNorm
from fusedcomm.plan.fused import copy_engines_send
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.moves import Moves
from fusedcomm.plan.padded_rows import padded
from fusedcomm.plan.scaling import Scaled
from fusedcomm.plan.schedule import EndRound
from fusedcomm.plan.terms import Reduce, Terms


def with_norm(
    program: Reduce,
    s: Builder,
    exchange: Exchange,
    x: Tensor,
    w: Given,
    bias: Given,
    residual: Tensor,
    norm_weight: Given,
    normed: Given = None,
    out: Given = None,
    *,
    eps: float,
) -> list[Tensor]:
    """``[rms_norm(residual_out) * norm_weight, residual_out]``."""
    normed = s.result(residual.shape, residual.dtype) if normed is None else normed
    norm = RmsNorm(normed, None if norm_weight is None else s.contiguous(norm_weight), eps)
    return [normed, program(s, exchange, Terms(x, w, bias, None, out, 1.0, residual, norm))]


def push_reduce_norm(
    push_reduce_gather: Reduce, s: Builder, exchange: Exchange, terms: Terms, *, algorithm: str
) -> Tensor:
    """``residual_out`` of an all_reduce."""
    fused = algorithm == "fused"
    if exchange.gathers:
        return _one_shot(s, exchange, terms, fused)
    norm, residual = terms.norm, terms.residual
    by_kernel = fused or (s.device.is_gpu and algorithm == "chunked")
    assert norm is not None and residual is not None
    as_they_come = by_kernel and _sends_rows(s, exchange, residual)
    terms = terms if as_they_come else terms._replace(norm=None)
    out = padded(push_reduce_gather, s, exchange, terms).view(residual.shape)
    with s.lane("copy"):
        if not by_kernel:
            s.norm(norm.normed, out, norm.weight, norm.eps)
        elif not as_they_come:
            launches.norm(s, norm.normed, out, norm.weight, norm.eps)
    return out


def _sends_rows(s: Builder, exchange: Exchange, like: Tensor) -> bool:
    """Whether the parts of all ranks, in all rounds, are whole rows of a result ``like`` this, which has no others."""
    in_rows = exchange.split_dim < len(exchange.shape) - 1 and like.shape[-1] <= s.max_chunk_numel(like.dtype)
    return in_rows and math.prod(exchange.shape) == like.numel()


def push_reduce_scatter_norm(push_reduce: Reduce, s: Builder, exchange: Exchange, terms: Terms) -> Tensor:
    """The same of this rank's rows, on the wire of the reduce_scatter."""
    out, residual = _tail(s, terms)
    push_reduce(s, exchange, terms._replace(out=out, residual=residual))
    return out


def _tail(s: Builder, terms: Terms) -> tuple[Tensor, Tensor]:
    """(out, residual)."""
    residual = terms.residual
    assert residual is not None
    out = s.result(residual.shape, residual.dtype) if terms.out is None else terms.out
    return out, s.contiguous(residual)


def _one_shot(s: Builder, exchange: Exchange, terms: Terms, fused: bool) -> Tensor:
    (out, residual), norm, x, w = _tail(s, terms), terms.norm, terms.x, terms.w
    assert isinstance(x, Tensor) and not isinstance(w, Scaled)
    product = s.contiguous(x) if w is None else _product(s, x, w, residual)
    rounds, by_copy = exchange.rounds(s.max_chunk_numel(x.dtype)), copy_engines_send(exchange, s.device, x.itemsize)
    moves = Moves(s, x.dtype, len(rounds)) if by_copy or not fused else None
    for spans in rounds:
        if moves is None:
            with s.lane("push"):
                launches.pack(s, product, spans)
            with s.lane("copy"):
                launches.reduce(s, out, spans, terms.bias, 1.0, residual=residual, norm=norm, beside=True)
            s.add(EndRound(by_kernel=True))
            continue
        moves.begin()
        moves.pack(spans, product, own=s.device.is_gpu)
        if not s.device.is_gpu:
            moves.own = spans.at(s.rank).pack.view(product.view(-1), 0, s.rank).view(-1)
        moves.reduce(spans, out, terms.bias, 1.0, residual=residual, norm=norm, beside=True)
    if moves is not None:
        moves.end()
    return out


def _product(s: Builder, x: Tensor, w: Tensor, like: Tensor) -> Tensor:
    made, (k, n) = s.temporary(like.shape, x.dtype), w.shape[-2:]
    batch = math.prod(w.shape[:-2])
    rows = math.prod(x.shape[w.ndim - 2 : -1])
    with s.lane("matmul"):
        s.multiply(s.reshape(x, batch, rows, k), s.reshape(w, batch, k, n), None, made.view(batch, rows, n))
    return made
