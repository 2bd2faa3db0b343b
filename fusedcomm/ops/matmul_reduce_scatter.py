"""fusedcomm::matmul_reduce_scatter: partial sums go to their owner chunk by chunk while the next are computed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import gradients, splits
from fusedcomm.ops.arguments import check_types, reduce_op_name
from fusedcomm.ops.call_arguments import Arguments, PerTensor
from fusedcomm.plan.planner import CALL
from fusedcomm.run import reference


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
        bias: [N], or the size of this rank's part where N is scattered; added to this rank's block.
        partial_bias: [N], also where N is scattered, or None: this rank's own, added to its product. Ranks may differ
            in it.
        scatter_splits: the size at scatter_dim that each rank gets, R ints that add up to it, the same on all ranks.
        scatter_ranges: in place of scatter_splits each rank's (start, length). They may overlap: see `replica_ranges`.
            Derivatives by one element are then added in rank order.

    Returns:
        A contiguous tensor of y's shape, with this rank's part at scatter_dim: 1 / R of it if all are of one size.

    Partial sums are rounded to x's dtype, added in float32 in rank order, and rounded once more, so that the
    results of `chunked`, `fused` and `pipelined` are bit-equal from run to run. `unfused`, and `pipelined` with
    FUSEDCOMM_BACKEND_SUMS=1, leave the sums to the backend.

    Every rank of the group calls it with the same shapes, dtype and dims, in the same order of calls. Autocast casts
    the tensors as torch.matmul's. Matmuls accumulate in float32.

    Reverse-mode autograd equals that of the program above: grad x is `all_gather_matmul` of the result's gradient, and
    the gathered gradient, its by-product, makes grad w and grad partial_bias. Grad bias is that of this rank's block
    alone.

    Errors are those of `matmul_all_to_all`.

    Example, on each of 2 ranks::

        x, w = torch.ones(2, 8, 3), torch.ones(3, 5)  # [batch, tokens, K / R], [K / R, N]
        y = fusedcomm.matmul_reduce_scatter(x, w, scatter_dim=1)
        assert y.shape == (2, 4, 5) and (y == 6).all()  # [batch, tokens / R, N], summed over K
    """
    given = (None, None, scatter_splits, scatter_ranges)
    name = "matmul_reduce_scatter"
    check_types(x, w, bias, name, group, 0, scatter_dim, given, partial_bias=partial_bias, reduce_op=reduce_op)
    reduce_op = reduce_op_name(reduce_op)
    group_size, group_name = resolve(group)
    divisible = splits.divides_product(group_size, x, w, scatter_dim)
    parts = splits.splits_of(*given, divisible, group_name).to_scatter
    where = (scatter_dim, *parts, group_size, group_name)
    return torch.ops.fusedcomm.matmul_reduce_scatter(x, w, bias, reduce_op, *where, CALL, partial_bias)


def save(ctx: Any, args: Arguments, needs: PerTensor, results: Sequence[Tensor]) -> None:
    x, w = args.x, args.w
    ctx.save_for_backward(x if needs.ws[0] else None, w if needs.x else None)
    ctx.w_layout, ctx.reduce_op = gradients.layout_of(w), args.reduce_op
    ctx.scatter_dim, ctx.group, ctx.splits = args.scatter_dim % x.ndim, args.group, args.splits
    ctx.scattered = (*x.shape[:-1], w.shape[-1])[args.scatter_dim]


def backward(ctx: Any, needs: PerTensor, grad: Tensor) -> PerTensor:
    x, w = ctx.saved_tensors
    return of_block(ctx, needs, x, w, grad)


def of_block(ctx: Any, needs: PerTensor, x: Tensor, w: Tensor, grad: Tensor) -> PerTensor:
    """The gradients by that of this rank's block."""
    [needs_w], [needs_bias] = needs.ws, needs.biases
    grad_x: Tensor | None = None
    part = reference.averaged(grad, ctx.reduce_op, ctx.group[0])
    back = splits.reversed_splits(ctx.splits, ctx.scattered, ctx.group[0])
    adds = splits.adds_back(ctx.splits, ctx.scattered)
    if needs.x and not adds:
        (grad_x,), gathered = torch.ops.fusedcomm.all_gather_matmul(
            part, [w.mT], [None], ctx.scatter_dim, needs_w or needs.partial_bias, *back.to_gather, *ctx.group
        )
    elif needs.x or needs_w or needs.partial_bias:
        gathered = splits.all_gather(part, ctx.scatter_dim, back, *ctx.group)
        gathered = splits.add_back(gathered, ctx.scatter_dim, ctx.splits, ctx.scattered)
        grad_x = torch.matmul(gathered, w.mT) if needs.x else None
    grad_w = gradients.of_w(x, gathered, ctx.w_layout) if needs_w else None
    grad_bias = gradients.of_bias(grad) if needs_bias else None
    grad_partial = gradients.of_bias(gathered) if needs.partial_bias else None
    return PerTensor(grad_x, [grad_w], [grad_bias], grad_partial)
