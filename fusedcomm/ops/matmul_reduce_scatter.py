"""fusedcomm::matmul_reduce_scatter: partial sums go to their owner chunk by chunk while the next are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from fusedcomm import reference
from fusedcomm.algorithms import chunked, fused, pipelined
from fusedcomm.geometry import shapes
from fusedcomm.geometry.cut import Splits
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.geometry.shapes import check_bias, check_tensors
from fusedcomm.ops import gradients, splits
from fusedcomm.ops.arguments import check_types, reduce_op_name
from fusedcomm.ops.dispatch import Algorithms, run
from fusedcomm.ops.library import (
    define_out,
    lib,
    new_or_given,
    register_autograd,
    register_fake,
    register_kernel,
    register_modes,
)
from fusedcomm.runtime.group import Group, resolve

OP = "matmul_reduce_scatter"
ALGORITHMS: Algorithms = {
    "chunked": chunked.push_reduce,
    "fused": fused.push_reduce,
    "pipelined": pipelined.push_reduce,
}

lib.define(
    f"matmul_reduce_scatter(Tensor x, Tensor w, Tensor? bias, str reduce_op, int scatter_dim, {splits.SCATTER}, "
    f"{splits.RANK}, int group_size, str group_name, Tensor? partial_bias=None) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    scatter_dim: int,
    group: Group = None,
    *,
    reduce_op: str | ReduceOp = "sum",
    bias: Tensor | None = None,
    partial_bias: Tensor | None = None,
    scatter_splits: Sequence[int] | None = None,
    scatter_ranges: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Multiply x by w and reduce the result over the ranks to a block for each, overlapped. It equals, for R ranks::

        y = sum(every_ranks_x @ every_ranks_w + every_ranks_partial_bias)  # in rank order; "avg": divided by R
        return y.chunk(R, scatter_dim)[rank] + bias

    Args:
        x: [..., K], at least 2-D; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA.
        w: [K, N], or [..., K, N] with exactly x's batch dims (x.shape[:-2]); of x's dtype and device.
        scatter_dim: a dim of y, along which it is cut as torch.chunk does; negative ones count from the end. Ranks
            behind its last chunk get nothing.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        reduce_op: "sum" or "avg", or torch.distributed.ReduceOp.SUM or AVG.
        bias: [N], or the size of this rank's part where N is scattered; added to what this rank gets.
        partial_bias: [N], also where N is scattered, or None: this rank's own, added to its product. Ranks may differ
            in it.
        scatter_splits: the size at scatter_dim that each rank gets, R ints that add up to it, the same on all ranks.
        scatter_ranges: in place of scatter_splits (start, length) of what each rank gets. They may overlap: see
            `replica_ranges`. Derivatives by one element are then added in rank order.

    Returns:
        A contiguous tensor of y's shape, with this rank's part at scatter_dim: 1 / R of it if all are of one size.

    Partial sums are rounded to x's dtype, added in float32 in rank order, and rounded once more, so that the
    results of `chunked`, `fused` and `pipelined` are bit-equal from run to run. `unfused`, and `pipelined` with
    FUSEDCOMM_BACKEND_SUMS=1, leave the sums to the backend.

    Every rank of the group calls it with the same shapes, dtype and dims, in the same order of calls. Autocast casts
    the tensors as it does those of torch.matmul. Matmuls accumulate in float32.

    Reverse-mode autograd gives what it gives for the program above: grad x is `all_gather_matmul` of the result's
    gradient, and the gathered gradient, its by-product, makes grad w and grad partial_bias. Grad bias is that of this
    rank's block alone.

    Raises:
        ValueError: an argument is not as described here; raised before anything is sent.
        TypeError: likewise, where it is of another type, or a DTensor: pass its ``.to_local()``.
        PeerTimeoutError: a peer did not come within ``FUSEDCOMM_TIMEOUT_S``. On CUDA the next call, or `synchronize`,
            raises it.
        PeerMismatchError: a peer called another op, or this one with other shapes, dtype or dims; on CUDA as above.
        RuntimeError: the call cannot be made here: inside a torch.func transform, with forward-mode tangents, in a
            process that was forked from a rank, or in the capture of a CUDA graph without a call in
            `before_capture` before it.

    A call that runs ``unfused`` or ``pipelined`` (see `explain`) exchanges by the process group's own collectives, and
    raises their errors.

    Example, on each of 2 ranks::

        x, w = torch.ones(2, 8, 3), torch.ones(3, 5)  # [batch, tokens, K / R], [K / R, N]
        y = fusedcomm.matmul_reduce_scatter(x, w, scatter_dim=1)
        assert y.shape == (2, 4, 5) and (y == 6).all()  # [batch, tokens / R, N], summed over K
    """
    check_types(x, w, bias, scatter_dim=scatter_dim, partial_bias=partial_bias)
    reduce_op = reduce_op_name(reduce_op)
    group_size, group_name = resolve(group)
    divisible = splits.divides(group_size, [*x.shape[:-1], *w.shape[-1:]], scatter_dim)
    parts = splits.splits_of(None, None, scatter_splits, scatter_ranges, divisible, group_name).to_scatter
    where = (scatter_dim, *parts, group_size, group_name)
    return torch.ops.fusedcomm.matmul_reduce_scatter(x, w, bias, reduce_op, *where, partial_bias)


def exchange_of(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    scatter_starts: Sequence[int] | None,
    scatter_lengths: Sequence[int] | None,
    rank: int | None,
    group_size: int,
    partial_bias: Tensor | None,
) -> Exchange:
    """Check a call and work out its geometry. Raises ValueError."""
    check_tensors(x, [w], [bias], partial_bias)
    parts = splits.hashable(Splits(None, None, scatter_starts, scatter_lengths, rank))
    where = (scatter_dim, group_size, parts)
    exchange: Exchange = shapes.of(shapes.matmul_reduce_scatter, x.shape, w.shape, reduce_op, *where)
    check_bias(bias, exchange.out_shape[-1], "N / R" if exchange.splits_columns else "N")
    check_bias(partial_bias, w.shape[-1], argument="partial_bias")
    return exchange


def _kernel(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    scatter_starts: list[int] | None,
    scatter_lengths: list[int] | None,
    rank: int | None,
    group_size: int,
    group_name: str,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    where = (scatter_dim, scatter_starts, scatter_lengths, rank, group_size)
    exchange = exchange_of(x, w, bias, reduce_op, *where, partial_bias)

    def unfused() -> Tensor:
        parts = exchange.cut, splits.pads(OP, exchange, x), partial_bias
        return reference.matmul_reduce_scatter(x, w, bias, reduce_op, scatter_dim, group_size, group_name, *parts)

    options: dict[str, Any] = {"scale": 1 / group_size if reduce_op == "avg" else 1.0, "partial_bias": partial_bias}
    return run(OP, ALGORITHMS, exchange, group_name, x, w, bias, unfused=unfused, out=out, **options)


register_kernel(OP, _kernel)


@register_fake(OP)
def _fake(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    reduce_op: str,
    scatter_dim: int,
    scatter_starts: list[int] | None,
    scatter_lengths: list[int] | None,
    rank: int | None,
    group_size: int,
    group_name: str,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    where = (scatter_dim, scatter_starts, scatter_lengths, rank, group_size)
    exchange = exchange_of(x, w, bias, reduce_op, *where, partial_bias)
    return new_or_given(x, exchange.out_shape, out)


define_out(OP, _kernel, _fake)
register_modes(OP)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _bias, reduce_op, scatter_dim, starts, lengths, rank, group_size, group_name, _partial_bias = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None)
    ctx.w_layout, ctx.reduce_op = gradients.layout_of(w), reduce_op
    ctx.scatter_dim, ctx.group = scatter_dim % x.ndim, (group_size, group_name)
    ctx.splits = Splits(None, None, starts, lengths, rank)
    ctx.scattered = (*x.shape[:-1], w.shape[-1])[scatter_dim]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_bias, *_, needs_partial = ctx.needs_input_grad
    grad_x = grad_w = grad_partial = None
    part = reference.averaged(grad, ctx.reduce_op, ctx.group[0])
    back = splits.reversed_splits(ctx.splits, ctx.scattered, ctx.group[0])
    adds = splits.adds_back(ctx.splits, ctx.scattered)
    if needs_x and not adds:
        (grad_x,), gathered = torch.ops.fusedcomm.all_gather_matmul(
            part, [w.mT], [None], ctx.scatter_dim, needs_w or needs_partial, *back.to_gather, *ctx.group
        )
    elif needs_x or needs_w or needs_partial:
        gathered = splits.all_gather(part, ctx.scatter_dim, back, *ctx.group)
        if adds:
            gathered = splits.add_back(gathered, ctx.scatter_dim, ctx.splits, ctx.scattered)
        grad_x = torch.matmul(gathered, w.mT) if needs_x else None
    if needs_w:
        grad_w = gradients.of_w(x, gathered, ctx.w_layout)
    if needs_partial:
        grad_partial = gradients.of_bias(gathered)
    grad_bias = gradients.of_bias(grad) if needs_bias else None
    return grad_x, grad_w, grad_bias, *[None] * 7, grad_partial


register_autograd(OP, _backward, _setup_context)
