"""fusedcomm::matmul_all_to_all: a matmul that sends its result to the other ranks chunk by chunk as it is computed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import gradients, splits
from fusedcomm.ops.arguments import check_types
from fusedcomm.ops.call_arguments import Arguments, PerTensor
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.cut import EVEN


def matmul_all_to_all(
    x: Tensor,
    w: Tensor,
    gather_dim: int,
    scatter_dim: int,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    out_shape: Sequence[int] | None = None,
    gather_splits: Sequence[int] | None = None,
    gather_size: int | None = None,
    scatter_splits: Sequence[int] | None = None,
    scatter_ranges: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Multiply x by w and exchange the result between the ranks, overlapped. It equals, for R ranks::

        y = (x @ w + bias).view(*x.shape[:-1], *out_shape)
        blocks = y.chunk(R, scatter_dim)               # block p goes to rank p
        return torch.cat(received_blocks, gather_dim)  # in rank order: DTensor Shard(gather_dim) -> Shard(scatter_dim)

    Args:
        x: [..., K], at least 2-D; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA.
        w: [K, N], or [..., K, N] with exactly x's batch dims (x.shape[:-2]); of x's dtype and device.
        gather_dim: a dim of y, along which the received blocks are concatenated; negative ones count from the end.
        scatter_dim: another dim of y, along which it is cut as torch.chunk does; ranks behind its last chunk get
            nothing.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], of x's dtype and device, added before the one rounding from float32.
        out_shape: sizes that view y's last dim, with product N, e.g. [heads, head_dim] or [3, heads, head_dim].
        gather_splits: each rank's size at gather_dim, where they differ; R ints, the same on all ranks.
        gather_size: their sum, in place of gather_splits, where ranks have torch.chunk's sizes.
        scatter_splits: the size at scatter_dim that each rank gets, R ints that add up to it, the same on all ranks.
        scatter_ranges: in place of scatter_splits each rank's (start, length). They may overlap, as heads of keys that
            several ranks read: see `replica_ranges`. Derivatives by one element are then added in rank order.

    Returns:
        A contiguous tensor of y's shape, with all ranks' sizes at gather_dim together and this rank's part at
        scatter_dim: R times and 1 / R of y's own, if all parts are of one size.

    Every rank of the group calls it with the same shapes, but for gather_dim where splits say so, dtype and dims, in
    the same order of calls. Autocast casts the tensors as torch.matmul's. Matmuls accumulate in float32.

    Reverse-mode autograd equals that of the program above: grad x is `all_to_all_matmul` of the result's gradient, and
    the exchanged gradient, its by-product, makes grad w and grad bias, this rank's own.

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

        x, w = torch.ones(2, 4, 8), torch.ones(8, 6)  # [batch, tokens / R, K], [K, N]
        y = fusedcomm.matmul_all_to_all(x, w, gather_dim=1, scatter_dim=-2, out_shape=[2, 3])
        assert y.shape == (2, 8, 1, 3)  # [batch, tokens, heads / R, head_dim]
    """
    given = (gather_splits, gather_size, scatter_splits, scatter_ranges)
    check_types(x, w, bias, "matmul_all_to_all", group, gather_dim, scatter_dim, given, out_shape=out_shape)
    group_size, group_name = resolve(group)
    shape = None if out_shape is None else list(out_shape)
    divisible = splits.divides_product(group_size, x, w, scatter_dim, shape)
    parts = splits.splits_of(*given, divisible, group_name)
    dims = (gather_dim, scatter_dim)
    return torch.ops.fusedcomm.matmul_all_to_all(x, w, bias, shape, *dims, *parts, group_size, group_name)


def save(ctx: Any, args: Arguments, needs: PerTensor, results: Sequence[Tensor]) -> None:
    x, w = args.x, args.w
    ctx.save_for_backward(x if needs.ws[0] else None, w if needs.x else None)
    columns = [w.shape[-1]] if args.out_shape is None else args.out_shape
    y_shape = [*x.shape[:-1], *columns]
    ctx.num_columns = len(columns)
    ctx.x_shape, ctx.w_layout = x.shape, gradients.layout_of(w)
    ctx.splits, ctx.scattered = args.splits, y_shape[args.scatter_dim]
    back = splits.reversed_splits(args.splits, ctx.scattered, args.group_size)
    dims = args.scatter_dim % len(y_shape), args.gather_dim % len(y_shape)
    ctx.exchange = (*dims, back, *args.group)
    ctx.tells_k = w.shape[-1] > 0 and not splits.adds_back(args.splits, ctx.scattered)
    if ctx.tells_k and args.splits is not EVEN:
        # a rank with one part of K, or none, would find other dims than the others to make up K in the exchange back
        ctx.tells_k = dims[1] < x.ndim - 1 or splits.all_have_several(args.splits, args.group_size)
        where = results[0].shape, w.mT.shape, *dims, args.group_size, back
        ctx.tells_k = ctx.tells_k and shapes.of(shapes.all_to_all_matmul, *where).tells_k


def backward(ctx: Any, needs: PerTensor, grad: Tensor) -> PerTensor:
    x, w = ctx.saved_tensors
    [needs_w], [needs_bias] = needs.ws, needs.biases
    gather_dim, scatter_dim, back, *group = ctx.exchange
    if needs.x and ctx.tells_k:
        flat_x, grad_y = torch.ops.fusedcomm.all_to_all_matmul(
            grad, w.mT, None, gather_dim, scatter_dim, needs_w or needs_bias, *back, *group
        )
        grad_x = flat_x.view(ctx.x_shape)
    else:
        grad_y = splits.exchange(grad, *ctx.exchange)
        grad_y = splits.add_back(grad_y, gather_dim, ctx.splits, ctx.scattered)
        grad_x = torch.matmul(grad_y.flatten(-ctx.num_columns), w.mT) if needs.x else None
    grad_w = gradients.of_w(x, grad_y.flatten(-ctx.num_columns), ctx.w_layout) if needs_w else None
    grad_bias = gradients.of_bias(grad_y.flatten(-ctx.num_columns)) if needs_bias else None
    return PerTensor(grad_x, [grad_w], [grad_bias])
