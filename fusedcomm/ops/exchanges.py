"""From each op's arguments to its Exchange. Shapes and dims are checked."""

import math
from typing import Any

from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.plan import scaling
from fusedcomm.plan.geometry import norm, packed_gathers, payloads, shapes
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.scaling import Payload, Recipe


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


def scaled_matmul_all_to_all(args: Arguments) -> Exchange:
    return _in_whole_blocks(args, matmul_all_to_all(args))


def scaled_matmul_reduce_scatter(args: Arguments) -> Exchange:
    return _in_whole_blocks(args, matmul_reduce_scatter(args))


def scaled_matmul_all_reduce(args: Arguments) -> Exchange:
    exchange = matmul_all_reduce(args)
    scale_x, scale_w = args.scales
    scaling.recipe_of(scale_x.shape, scale_w.shape, args.x.shape[:-1], args.x.shape[-1], args.w.shape)
    return exchange


def scaled_all_to_all_matmul(args: Arguments) -> Exchange:
    where, plain = (args.gather_dim, args.scatter_dim, args.group_size, args.splits), all_to_all_matmul(args)
    block = recipe(args, plain).x.k
    if not args.sends_scales:
        return plain
    return shapes.of(packed_gathers.all_to_all_matmul, args.x.shape, args.w.shape, *where, block, _name(args))


def scaled_all_gather_matmul(args: Arguments) -> Exchange:
    where, plain = (args.gather_dim, args.group_size, args.splits), all_gather_matmul(args)
    block = recipe(args, plain).x.k
    if not args.sends_scales:
        return plain
    return shapes.of(
        packed_gathers.all_gather_matmul, args.x.shape, tuple(w.shape for w in args.ws), *where, block, _name(args)
    )


def _name(args: Arguments) -> str:
    return str(args.x.dtype).removeprefix("torch.")


def payload_facts(args: Arguments, plain: Exchange) -> dict[str, Any]:
    """The payload of a scaled gather, and K of the pieces that this rank's x is cut into; none of x alone."""
    if not args.sends_scales:
        return {"payload": None, "sent": ()}
    block = recipe(args, plain).x.k
    return {
        "payload": Payload(args.x.dtype, packed_gathers.ks_received(plain), block),
        "sent": packed_gathers.ks_sent(plain),
    }


def recipe(args: Arguments, plain: Exchange) -> Recipe:
    """The one recipe of a scaled call. ``plain``: the Exchange without scales."""
    x = args.x.shape if args.sends_scales or not plain.gathers else plain.shape
    rows, columns = x[: plain.num_lead], x[plain.num_lead :]
    scale_x, *scale_ws = args.scales
    if len(scale_ws) != len(args.ws):
        raise ValueError(f"scale_w must have one entry per w, {len(args.ws)}, got {len(scale_ws)}")
    found = {
        scaling.recipe_of(scale_x.shape, scale.shape, rows, math.prod(columns), w.shape)
        for w, scale in zip(args.ws, scale_ws, strict=True)
    }
    if len(found) > 1:
        raise ValueError(
            f"all scales of w must be of one recipe, got {', '.join(sorted(each.w.name for each in found))}"
        )
    return found.pop()


def _in_whole_blocks(args: Arguments, exchange: Exchange) -> Exchange:
    """Raises ValueError where N is cut inside a block of columns with one scale."""
    block = recipe(args, exchange).w.rows
    if block and exchange.splits_columns and exchange.group_size > 1:
        inner = math.prod(exchange.shape[exchange.split_dim + 1 :])
        sizes = exchange.block[exchange.split_dim : exchange.split_dim + 1]
        if exchange.cut is not None and exchange.cut.scattered is not None:
            sizes = [*exchange.cut.scattered.starts]
        for size in sizes:
            if size * inner % block:
                raise ValueError(f"N must be cut at multiples of {block} beside block-wise scales, got {size * inner}")
    return exchange


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
