"""fusedcomm::all_to_all_matmul: an exchange whose chunks are multiplied as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm import reference
from fusedcomm.algorithms import chunked, fused, pipelined
from fusedcomm.geometry import shapes
from fusedcomm.geometry.cut import Splits
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.geometry.shapes import check_bias, check_tensors
from fusedcomm.ops import gradients, splits
from fusedcomm.ops.arguments import check_types
from fusedcomm.ops.dispatch import Algorithms, by_product, run
from fusedcomm.ops.library import lib, register_autograd, register_fake, register_kernel, register_modes
from fusedcomm.runtime.group import Group, resolve

OP = "all_to_all_matmul"
ALGORITHMS: Algorithms = {
    "chunked": chunked.gather_matmul,
    "fused": fused.gather_matmul,
    "pipelined": pipelined.gather_matmul,
}

lib.define(
    "all_to_all_matmul(Tensor x, Tensor w, Tensor? bias, int gather_dim, int scatter_dim, bool return_exchanged, "
    f"{splits.GATHER}, {splits.SCATTER}, {splits.RANK}, int group_size, str group_name) -> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)


def all_to_all_matmul(
    x: Tensor,
    w: Tensor,
    gather_dim: int,
    scatter_dim: int,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    save_exchanged: bool = True,
    gather_splits: Sequence[int] | None = None,
    gather_size: int | None = None,
    scatter_splits: Sequence[int] | None = None,
    scatter_ranges: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Exchange x between the ranks and multiply what arrives by w, overlapped. It equals, for R ranks::

        blocks = x.chunk(R, scatter_dim)                    # block p goes to rank p
        exchanged = torch.cat(received_blocks, gather_dim)  # in rank order
        return exchanged.flatten(-c) @ w + bias             # its last c dims, as few as make up K

    Args:
        x: at least 2-D, e.g. [batch, tokens, heads / R, head_dim]; float32, float16, bfloat16 or, unfused, float64, on
            CPU or CUDA.
        w: [K, N], or [..., K, N] with exactly the batch dims of the exchanged x, which then has one dim of rows; of x's
            dtype and device.
        gather_dim: a dim of x, along which the received blocks are concatenated; negative ones count from the end.
            Where it is part of K, `chunked` and `fused` keep sums in float32 across sources, own data first.
        scatter_dim: another dim of x, along which it is cut as torch.chunk does; ranks behind its last chunk get
            nothing.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], of x's dtype and device, added before the one rounding from float32.
        save_exchanged: whether the exchanged x, as large as x, is kept for grad w; otherwise the backward exchanges x
            again, by a plain collective.
        gather_splits: each rank's size at gather_dim, where they differ; R ints, the same on all ranks.
        gather_size: their sum, in place of gather_splits, where each rank has what torch.chunk gives it.
        scatter_splits: the size at scatter_dim that each rank gets, R ints that add up to it, the same on all ranks.
        scatter_ranges: in place of scatter_splits (start, length) of what each rank gets. They may overlap: derivatives
            by one element are then added in rank order. See `replica_ranges`.

    Returns:
        A contiguous tensor of the exchanged x's shape, with [N] in place of the dims that make up K.

    Every rank of the group calls it with the same shapes, but for gather_dim where splits say so, dtype and dims, in
    the same order of calls. Autocast casts the tensors as it does those of torch.matmul. Matmuls accumulate in float32.

    Reverse-mode autograd gives what it gives for the program above: grad x is `matmul_all_to_all` of the result's
    gradient; grad w and grad bias are this rank's own.

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

        x, w = torch.ones(2, 8, 1, 3), torch.ones(6, 5)  # [batch, tokens, heads / R, head_dim], [heads * head_dim, N]
        y = fusedcomm.all_to_all_matmul(x, w, gather_dim=-2, scatter_dim=1)
        assert y.shape == (2, 4, 5)  # [batch, tokens / R, N]
    """
    check_types(x, w, bias, gather_dim=gather_dim, scatter_dim=scatter_dim)
    group_size, group_name = resolve(group)
    keep = bool(save_exchanged) and torch.is_grad_enabled() and w.requires_grad
    divisible = splits.divides(group_size, x.shape, scatter_dim)
    parts = splits.splits_of(gather_splits, gather_size, scatter_splits, scatter_ranges, divisible, group_name)
    call = torch.ops.fusedcomm.all_to_all_matmul
    return call(x, w, bias, gather_dim, scatter_dim, keep, *parts, group_size, group_name)[0]


def exchange_of(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    gather_dim: int,
    scatter_dim: int,
    gather_splits: Sequence[int] | None,
    gather_size: int | None,
    scatter_starts: Sequence[int] | None,
    scatter_lengths: Sequence[int] | None,
    rank: int | None,
    group_size: int,
) -> Exchange:
    """Check a call and work out its geometry. Raises ValueError."""
    check_tensors(x, [w], [bias])
    parts = splits.hashable(Splits(gather_splits, gather_size, scatter_starts, scatter_lengths, rank))
    dims = (gather_dim, scatter_dim)
    exchange = shapes.of(shapes.all_to_all_matmul, x.shape, w.shape, *dims, group_size, parts)
    check_bias(bias, w.shape[-1])
    return exchange


def _kernel(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    gather_dim: int,
    scatter_dim: int,
    return_exchanged: bool,
    gather_splits: list[int] | None,
    gather_size: int | None,
    scatter_starts: list[int] | None,
    scatter_lengths: list[int] | None,
    rank: int | None,
    group_size: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    given = Splits(gather_splits, gather_size, scatter_starts, scatter_lengths, rank)
    exchange = exchange_of(x, w, bias, gather_dim, scatter_dim, *given, group_size)

    def unfused() -> tuple[list[Tensor], Tensor | None]:
        dims, parts = (gather_dim, scatter_dim, exchange.num_lead), (exchange.cut, splits.pads(OP, exchange, x))
        out, exchanged = reference.all_to_all_matmul(x, w, bias, *dims, group_size, group_name, *parts)
        return [out], exchanged if return_exchanged else None

    call = (OP, ALGORITHMS, exchange, group_name, x, [w], [bias])
    (out,), exchanged = run(*call, unfused=unfused, return_gathered=return_exchanged)
    return out, by_product(exchanged, x)


register_kernel(OP, _kernel)


@register_fake(OP)
def _fake(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    gather_dim: int,
    scatter_dim: int,
    return_exchanged: bool,
    gather_splits: list[int] | None,
    gather_size: int | None,
    scatter_starts: list[int] | None,
    scatter_lengths: list[int] | None,
    rank: int | None,
    group_size: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    parts = Splits(gather_splits, gather_size, scatter_starts, scatter_lengths, rank)
    exchange = exchange_of(x, w, bias, gather_dim, scatter_dim, *parts, group_size)
    return x.new_empty(exchange.out_shape), x.new_empty(exchange.shape if return_exchanged else 0)


register_modes(OP)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, bias, gather_dim, scatter_dim, return_exchanged, *given, group_size, group_name = inputs
    ctx.set_materialize_grads(False)
    saved_x = None
    if ctx.needs_input_grad[1]:
        saved_x = output[1] if return_exchanged else x
    ctx.save_for_backward(saved_x, w if ctx.needs_input_grad[0] else None)
    ctx.saved_exchanged, ctx.splits, ctx.scattered = return_exchanged, Splits(*given), x.shape[scatter_dim]
    parts: Splits = ctx.splits
    exchange = exchange_of(x, w, bias, gather_dim, scatter_dim, *parts, group_size)
    ctx.columns, ctx.w_layout = exchange.shape[exchange.num_lead :], gradients.layout_of(w)
    ctx.tells_k = exchange.tells_k
    ctx.dims, ctx.group = (gather_dim % x.ndim, scatter_dim % x.ndim), (group_size, group_name)


def _backward(ctx: Any, grad: Tensor | None, grad_exchanged: Tensor | None) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    gather_dim, scatter_dim = ctx.dims
    num_columns = len(ctx.columns)
    back = splits.reversed_splits(ctx.splits, ctx.scattered, ctx.group[0])
    joined = grad_w = grad_bias = None  # joined: the gradients of what ranks have got, one after the other
    if grad is not None:
        if ctx.needs_input_grad[0] and ctx.tells_k:
            joined = torch.ops.fusedcomm.matmul_all_to_all(
                grad, w.mT, None, ctx.columns, scatter_dim, gather_dim, *back, *ctx.group
            )
        elif ctx.needs_input_grad[0]:  # rows and columns may be other dims on each rank
            part = torch.matmul(grad, w.mT).unflatten(-1, ctx.columns)
            joined = splits.exchange(part, scatter_dim, gather_dim, back, *ctx.group)
        if ctx.needs_input_grad[1]:
            if not ctx.saved_exchanged:
                x = splits.exchange(x, gather_dim, scatter_dim, ctx.splits, *ctx.group)
            grad_w = gradients.of_w(x.flatten(-num_columns), grad, ctx.w_layout)
        if ctx.needs_input_grad[2]:
            grad_bias = gradients.of_bias(grad)
    if grad_exchanged is not None and ctx.saved_exchanged and ctx.needs_input_grad[0]:  # or it is empty, and constant
        part = splits.exchange(grad_exchanged, scatter_dim, gather_dim, back, *ctx.group)
        joined = part if joined is None else joined + part
    grad_x = joined
    if joined is not None and splits.adds_back(ctx.splits, ctx.scattered):
        grad_x = splits.add_back(joined, scatter_dim, ctx.splits, ctx.scattered)
    return grad_x, grad_w, grad_bias, *[None] * 10


register_autograd(OP, _backward, _setup_context)
