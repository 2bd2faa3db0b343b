"""fusedcomm::all_to_all_matmul: an exchange that multiplies chunks as they arrive."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import exchanges, gradients, splits
from fusedcomm.ops.arguments import check_types
from fusedcomm.ops.call_arguments import Arguments, PerTensor


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
    """Exchange x between the ranks and multiply it by w while it arrives. It equals, for R ranks::

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
        gather_size: their sum, in place of gather_splits, where ranks have torch.chunk's sizes.
        scatter_splits: the size at scatter_dim that each rank gets, R ints that add up to it, the same on all ranks.
        scatter_ranges: in place of scatter_splits each rank's (start, length). They may overlap: derivatives by one
            element are then added in rank order. See `replica_ranges`.

    Returns:
        A contiguous tensor of the exchanged x's shape, with [N] in place of the dims that make up K.

    Every rank of the group calls it with the same shapes, but for gather_dim where splits say so, dtype and dims, in
    the same order of calls. Autocast casts the tensors as torch.matmul's. Matmuls accumulate in float32.

    Reverse-mode autograd equals that of the program above: grad x is `matmul_all_to_all` of the result's gradient; grad
    w and grad bias are this rank's own.

    Errors are those of `matmul_all_to_all`.

    Example, on each of 2 ranks::

        x, w = torch.ones(2, 8, 1, 3), torch.ones(6, 5)  # [batch, tokens, heads / R, head_dim], [heads * head_dim, N]
        y = fusedcomm.all_to_all_matmul(x, w, gather_dim=-2, scatter_dim=1)
        assert y.shape == (2, 4, 5)  # [batch, tokens / R, N]
    """
    given = (gather_splits, gather_size, scatter_splits, scatter_ranges)
    check_types(x, w, bias, "all_to_all_matmul", group, gather_dim, scatter_dim, given)
    group_size, group_name = resolve(group)
    keep = bool(save_exchanged) and torch.is_grad_enabled() and w.requires_grad
    divisible = splits.divides(group_size, x.shape, scatter_dim)
    parts = splits.splits_of(*given, divisible, group_name)
    call = torch.ops.fusedcomm.all_to_all_matmul
    return call(x, w, bias, gather_dim, scatter_dim, keep, *parts, group_size, group_name)[0]


def save(ctx: Any, args: Arguments, needs: PerTensor, results: Sequence[Tensor]) -> None:
    x, w = args.x, args.w
    ctx.set_materialize_grads(False)
    saved_x = None
    if needs.ws[0]:
        saved_x = results[1] if args.return_gathered else x
    ctx.save_for_backward(saved_x, w if needs.x else None)
    ctx.saved_exchanged, ctx.splits, ctx.scattered = args.return_gathered, args.splits, x.shape[args.scatter_dim]
    exchange = exchanges.all_to_all_matmul(args)
    ctx.columns, ctx.w_layout = exchange.shape[exchange.num_lead :], gradients.layout_of(w)
    ctx.tells_k = exchange.tells_k
    ctx.dims, ctx.group = (args.gather_dim % x.ndim, args.scatter_dim % x.ndim), args.group


def backward(ctx: Any, needs: PerTensor, grad: Tensor | None, grad_exchanged: Tensor | None) -> PerTensor:
    x, w = ctx.saved_tensors
    gather_dim, scatter_dim = ctx.dims
    num_columns = len(ctx.columns)
    back = splits.reversed_splits(ctx.splits, ctx.scattered, ctx.group[0])
    joined = grad_w = grad_bias = None  # joined: the gradients by the ranks' received parts, one after the other
    if grad is not None:
        if needs.x and ctx.tells_k:
            joined = torch.ops.fusedcomm.matmul_all_to_all(
                grad, w.mT, None, ctx.columns, scatter_dim, gather_dim, *back, *ctx.group
            )
        elif needs.x:  # rows and columns may be other dims on each rank
            part = torch.matmul(grad, w.mT).unflatten(-1, ctx.columns)
            joined = splits.exchange(part, scatter_dim, gather_dim, back, *ctx.group)
        if needs.ws[0]:
            if not ctx.saved_exchanged:
                x = splits.exchange(x, gather_dim, scatter_dim, ctx.splits, *ctx.group)
            grad_w = gradients.of_w(x.flatten(-num_columns), grad, ctx.w_layout)
        if needs.biases[0]:
            grad_bias = gradients.of_bias(grad)
    if grad_exchanged is not None and ctx.saved_exchanged and needs.x:  # or it is empty, and constant
        part = splits.exchange(grad_exchanged, scatter_dim, gather_dim, back, *ctx.group)
        joined = part if joined is None else joined + part
    grad_x = None if joined is None else splits.add_back(joined, scatter_dim, ctx.splits, ctx.scattered)
    return PerTensor(grad_x, [grad_w], [grad_bias])
