"""From each op's arguments to its Exchange. Shapes and dims are checked."""

from __future__ import annotations

from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.plan.geometry import norm, payloads, shapes
from fusedcomm.plan.geometry.exchange import Exchange


def matmul_all_to_all(args: Arguments) -> Exchange:
    out_shape = None if args.out_shape is None else tuple(args.out_shape)
    where = (out_shape, args.gather_dim, args.scatter_dim, args.group_size, args.splits)
    return shapes.of(shapes.matmul_all_to_all, args.x.shape, args.w.shape, *where)


def all_to_all_matmul(args: Arguments) -> Exchange:
    where = (args.gather_dim, args.scatter_dim, args.group_size, args.splits)
    return shapes.of(shapes.all_to_all_matmul, args.x.shape, args.w.shape, *where)


def all_gather_matmul(args: Arguments) -> Exchange:
    where = (args.gather_dim, args.group_size, args.splits)
    return shapes.of(shapes.all_gather_matmul, args.x.shape, tuple(w.shape for w in args.ws), *where)


def matmul_reduce_scatter(args: Arguments) -> Exchange:
    where = (args.reduce_op, args.scatter_dim, args.group_size, args.splits)
    return shapes.of(shapes.matmul_reduce_scatter, args.x.shape, args.w.shape, *where)


def matmul_all_reduce(args: Arguments) -> Exchange:
    return shapes.of(shapes.matmul_all_reduce, args.x.shape, args.w.shape, args.reduce_op, args.group_size)


def all_reduced(args: Arguments) -> list[int]:
    """The shape of the result of matmul_all_reduce."""
    shapes.check_all_reduce(args.x.shape, args.w.shape, args.reduce_op, args.group_size)
    return [*args.x.shape[:-1], args.n]


def all_reduce_norm(args: Arguments) -> Exchange:
    """With a matmul or without."""
    shape, w = normed(args), None if args.w is None else args.w.shape
    if norm.goes_at_once(shape, args.group_size):
        return shapes.of(norm.one_shot, tuple(shape), 0 if w is None else w[-2], args.eps, args.group_size)
    return shapes.of(norm.two_shot, args.x.shape, w, args.eps, args.group_size)


def normed(args: Arguments) -> list[int]:
    """The shape of both results of an op that norms."""
    shape = plainly_all_reduced(args) if args.w is None else all_reduced(args)
    norm.check(shape, args.residual, args.norm_weight, args.eps)
    return shape


def matmul_reduce_scatter_norm(args: Arguments) -> Exchange:
    where = (args.eps, args.scatter_dim, args.group_size, args.splits)
    exchange: Exchange = shapes.of(norm.reduce_scatter, args.x.shape, args.w.shape, *where)
    norm.check(exchange.out_shape, args.residual, args.norm_weight, args.eps)
    return exchange


def all_to_all(args: Arguments) -> Exchange:
    where = (args.gather_dim, args.scatter_dim, args.group_size, args.splits)
    return shapes.of(payloads.all_to_all, args.x.shape, *where)


def all_gather(args: Arguments) -> Exchange:
    return shapes.of(payloads.all_gather, args.x.shape, args.gather_dim, args.group_size, args.splits)


def reduce_scatter(args: Arguments) -> Exchange:
    where = (args.reduce_op, args.scatter_dim, args.group_size, args.splits)
    return shapes.of(payloads.reduce_scatter, args.x.shape, *where)


def all_reduce(args: Arguments) -> Exchange:
    return shapes.of(payloads.all_reduce, args.x.shape, args.reduce_op, args.group_size)


def plainly_all_reduced(args: Arguments) -> list[int]:
    """The shape of the result of all_reduce."""
    payloads.check_all_reduce(args.x.shape, args.reduce_op, args.group_size)
    return [*args.x.shape]
