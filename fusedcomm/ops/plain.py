"""fusedcomm::all_to_all, all_gather, reduce_scatter and all_reduce: collectives that have no matmul beside them.

On the wire each is the same as the op of its kind with a matmul.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import gradients, splits
from fusedcomm.ops.arguments import check_types, reduce_op_name
from fusedcomm.ops.call_arguments import Arguments, PerTensor
from fusedcomm.plan.geometry.cut import Splits
from fusedcomm.run import reference


def all_to_all(
    x: Tensor,
    gather_dim: int,
    scatter_dim: int,
    group: Group = None,
    *,
    gather_splits: Sequence[int] | None = None,
    gather_size: int | None = None,
    scatter_splits: Sequence[int] | None = None,
    scatter_ranges: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Exchange x between the ranks, from shards of one dim to shards of another. It equals, for R ranks::

        blocks = x.chunk(R, scatter_dim)                  # block p goes to rank p
        return torch.cat(received_blocks, gather_dim)     # in rank order

    Args:
        x: at least 2-D; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA.
        gather_dim: a dim of x, along which the received blocks are concatenated; negative ones count from the end.
        scatter_dim: another dim of x, along which it is cut as torch.chunk does; ranks behind its last chunk get
            nothing.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        gather_splits, gather_size, scatter_splits, scatter_ranges: as in `matmul_all_to_all`.

    Returns:
        A contiguous tensor of the exchanged x's shape.

    Every rank of the group calls it with the same shapes, but for gather_dim where splits say so, dtype and dims, in
    the same order of calls. Autocast leaves x as it is. The gradient of x is `all_to_all` of the result's gradient,
    with the dims swapped. Errors are those of `matmul_all_to_all`.

    Example, on each of 2 ranks::

        x = torch.ones(4, 2, 3)  # [tokens / R, heads, head_dim]
        y = fusedcomm.all_to_all(x, gather_dim=0, scatter_dim=1)
        assert y.shape == (8, 1, 3)  # [tokens, heads / R, head_dim]
    """
    given = (gather_splits, gather_size, scatter_splits, scatter_ranges)
    check_types(x, (), None, "all_to_all", group, gather_dim, scatter_dim, given, lists=True)
    group_size, group_name = resolve(group)
    parts = splits.splits_of(*given, splits.divides(group_size, x.shape, scatter_dim), group_name)
    return torch.ops.fusedcomm.all_to_all(x, gather_dim, scatter_dim, *parts, group_size, group_name)


def all_gather(
    x: Tensor,
    gather_dim: int,
    group: Group = None,
    *,
    gather_splits: Sequence[int] | None = None,
    gather_size: int | None = None,
) -> Tensor:
    """Return every rank's x, concatenated along gather_dim in rank order.

    Args:
        x: at least 1-D; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA.
        gather_dim: a dim of x; negative ones count from the end.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        gather_splits, gather_size: as in `all_gather_matmul`.

    Every rank of the group calls it with the same shapes, but for gather_dim where splits say so, dtype and dim, in the
    same order of calls. Autocast leaves x as it is. The gradient of x is `reduce_scatter` of the result's gradient.
    Errors are those of `all_gather_matmul`.

    Example, on each of 2 ranks::

        assert fusedcomm.all_gather(torch.ones(3, 4), gather_dim=0).shape == (6, 4)
    """
    given = (gather_splits, gather_size)
    check_types(x, (), None, "all_gather", group, gather_dim, 0, given, lists=True)
    group_size, group_name = resolve(group)
    parts = splits.splits_of(*given, None, None, True, group_name).to_gather
    return torch.ops.fusedcomm.all_gather(x, gather_dim, *parts, group_size, group_name)  # type: ignore[no-any-return]


def reduce_scatter(
    x: Tensor,
    scatter_dim: int,
    group: Group = None,
    *,
    reduce_op: str | ReduceOp = "sum",
    scatter_splits: Sequence[int] | None = None,
    scatter_ranges: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Add the ranks' x, and return this rank's block of the sum. It equals, for R ranks::

        return sum(every_ranks_x).chunk(R, scatter_dim)[rank]  # in rank order; "avg": divided by R

    Args:
        x: at least 1-D; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA.
        scatter_dim: a dim of x, along which it is cut as torch.chunk does; negative ones count from the end.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        reduce_op: "sum" or "avg", or torch.distributed.ReduceOp.SUM or AVG.
        scatter_splits, scatter_ranges: as in `matmul_reduce_scatter`.

    Returns:
        A contiguous tensor, equal from run to run as `matmul_reduce_scatter` is: added in float32 and rounded once.

    Every rank of the group calls it with the same shapes, dtype and dim, in the same order of calls. Autocast leaves x
    as it is. The gradient of x is `all_gather` of the result's gradient, for "avg" divided by R. Errors are those of
    `matmul_reduce_scatter`.

    Example, on each of 2 ranks::

        assert (fusedcomm.reduce_scatter(torch.ones(6, 4), scatter_dim=0) == torch.full((3, 4), 2.0)).all()
    """
    given = (None, None, scatter_splits, scatter_ranges)
    check_types(x, (), None, "reduce_scatter", group, 0, scatter_dim, given, lists=True, reduce_op=reduce_op)
    group_size, group_name = resolve(group)
    divisible = splits.divides(group_size, x.shape, scatter_dim)
    parts = splits.splits_of(*given, divisible, group_name).to_scatter
    where = (reduce_op_name(reduce_op), scatter_dim, *parts, group_size, group_name)
    return torch.ops.fusedcomm.reduce_scatter(x, *where)  # type: ignore[no-any-return]


def all_reduce(x: Tensor, group: Group = None, *, reduce_op: str | ReduceOp = "sum") -> Tensor:
    """Return the sum of the ranks' x, in rank order, or for "avg" their average.

    Args:
        x: at least 1-D; float32, float16, bfloat16 or, unfused, float64, on CPU or CUDA. It is not written.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        reduce_op: "sum" or "avg", or torch.distributed.ReduceOp.SUM or AVG.

    Returns:
        A contiguous tensor, the same on every rank, and equal from run to run as `matmul_all_reduce` is.

    Every rank of the group calls it with the same shape and dtype, in the same order of calls. Autocast leaves x as it
    is. The result's gradient is taken to be the same on all ranks, as in tensor parallelism: it is the gradient of x,
    for "avg" divided by R. Errors are those of `matmul_all_reduce`.

    Example, on each of 2 ranks::

        assert (fusedcomm.all_reduce(torch.ones(6, 4)) == 2).all()
    """
    check_types(x, (), None, "all_reduce", group, lists=True, reduce_op=reduce_op)
    return torch.ops.fusedcomm.all_reduce(x, reduce_op_name(reduce_op), *resolve(group))  # type: ignore[no-any-return]


def save(ctx: Any, args: Arguments, needs: PerTensor, results: Sequence[Tensor]) -> None:
    ctx.save_for_backward()
    ctx.gather_dim, ctx.scatter_dim = args.gather_dim % args.x.ndim, args.scatter_dim % args.x.ndim
    ctx.group, ctx.splits, ctx.reduce_op = args.group, args.splits, args.reduce_op
    ctx.scattered = args.x.shape[ctx.scatter_dim]


def all_to_all_backward(ctx: Any, needs: PerTensor, grad: Tensor) -> PerTensor:
    back = splits.reversed_splits(ctx.splits, ctx.scattered, ctx.group[0])
    joined = torch.ops.fusedcomm.all_to_all(grad, ctx.scatter_dim, ctx.gather_dim, *back, *ctx.group)
    return _of_x(splits.add_back(joined, ctx.scatter_dim, ctx.splits, ctx.scattered))


def all_gather_backward(ctx: Any, needs: PerTensor, grad: Tensor) -> PerTensor:
    back = Splits(scatter_lengths=ctx.splits.gather_splits, rank=ctx.splits.rank).to_scatter
    return _of_x(torch.ops.fusedcomm.reduce_scatter(grad, "sum", ctx.gather_dim, *back, *ctx.group))


def reduce_scatter_backward(ctx: Any, needs: PerTensor, grad: Tensor) -> PerTensor:
    back = splits.reversed_splits(ctx.splits, ctx.scattered, ctx.group[0]).to_gather
    part = reference.averaged(grad, ctx.reduce_op, ctx.group[0])
    joined = torch.ops.fusedcomm.all_gather(part, ctx.scatter_dim, *back, *ctx.group)
    return _of_x(splits.add_back(joined, ctx.scatter_dim, ctx.splits, ctx.scattered))


def all_reduce_backward(ctx: Any, needs: PerTensor, grad: Tensor) -> PerTensor:
    return _of_x(reference.averaged(gradients.same_on_all_ranks(grad, ctx.group), ctx.reduce_op, ctx.group[0]))


def _of_x(grad: Tensor) -> PerTensor:
    return PerTensor(grad, [], [])
