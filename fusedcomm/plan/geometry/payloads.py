"""The Exchange of each collective without a matmul. All dims of its tensor are rows, so that rounds cut it anywhere."""

import math
from typing import Any

from fusedcomm.plan.geometry.cut import EVEN, Splits, cut_of
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.geometry.shapes import (
    Shape,
    check_dim,
    check_dims,
    check_group_size,
    check_reduce_op,
    cuts_columns,
    gather,
    gathered_shape,
    is_symbolic,
    of,
    push,
    with_sizes,
)
from fusedcomm.plan.geometry.spans import block_shape


def all_to_all(x: Shape, gather_dim: int, scatter_dim: int, group_size: int, splits: Splits = EVEN) -> Exchange:
    """``exchange(x, gather_dim, scatter_dim)``."""
    _check(x, group_size)
    gather_dim, scatter_dim = check_dims(gather_dim, scatter_dim, len(x))
    cut = cut_of(splits, x[gather_dim], x[scatter_dim], group_size)
    if cut is None:
        exchanged = gathered_shape(block_shape(x, scatter_dim, group_size), gather_dim, group_size)
        return _gather(x, exchanged, gather_dim, scatter_dim, group_size)
    (gathered, scattered), largest = cut.both, None
    if not is_symbolic((*x, *cut)):
        sizes = with_sizes(x, {gather_dim: gathered.largest, scatter_dim: group_size * scattered.largest})
        largest = of(all_to_all, tuple(sizes), gather_dim, scatter_dim, group_size)
    exchanged = with_sizes(x, {gather_dim: gathered.total, scatter_dim: scattered.sizes[cut.rank]})
    return _gather(x, exchanged, gather_dim, scatter_dim, group_size, cut, largest)


def all_gather(x: Shape, gather_dim: int, group_size: int, splits: Splits = EVEN) -> Exchange:
    """Every rank's x, concatenated along gather_dim."""
    _check(x, group_size)
    gather_dim = check_dim("gather_dim", gather_dim, len(x))
    cut, largest = cut_of(splits, x[gather_dim], None, group_size), None
    if cut is None or cut.gathered is None:
        return _gather(x, gathered_shape(x, gather_dim, group_size), gather_dim, None, group_size)
    if not is_symbolic((*x, *cut)):
        largest = of(all_gather, tuple(with_sizes(x, {gather_dim: cut.gathered.largest})), gather_dim, group_size)
    return _gather(x, with_sizes(x, {gather_dim: cut.gathered.total}), gather_dim, None, group_size, cut, largest)


def reduce_scatter(x: Shape, reduce_op: str, scatter_dim: int, group_size: int, splits: Splits = EVEN) -> Exchange:
    """This rank's part along scatter_dim of the ranks' sum or average."""
    _check(x, group_size)
    check_reduce_op(reduce_op)
    scatter_dim = check_dim("scatter_dim", scatter_dim, len(x))
    cut, largest = cut_of(splits, None, x[scatter_dim], group_size), None
    if cut is None or cut.scattered is None:
        block = block_shape(x, scatter_dim, group_size)
        return _reduce(x, scatter_dim, (block, None), group_size, reduce_op)
    if not is_symbolic((*x, *cut)):
        sizes = tuple(with_sizes(x, {scatter_dim: group_size * cut.scattered.largest}))
        largest = of(reduce_scatter, sizes, reduce_op, scatter_dim, group_size)
    block = with_sizes(x, {scatter_dim: cut.scattered.sizes[cut.rank]})
    return _reduce(x, scatter_dim, (block, None), group_size, reduce_op, cut, largest)


def all_reduce(x: Shape, reduce_op: str, group_size: int, *, whole_rows: bool = False) -> Exchange:
    """The ranks' sum or average: each rank reduces one block of x as [rows, n] and gathers the others.

    Where R divides neither rows nor columns, the Exchange is that of a few more rows.
    """
    check_all_reduce(x, reduce_op, group_size)
    rows, n = math.prod(x[:-1]), x[-1]
    by_columns = cuts_columns(rows, n, group_size, whole_rows)
    padding = 0 if by_columns else -rows % group_size
    blocks = [rows + padding, n]
    exchange = _reduce(blocks, int(by_columns), (blocks, int(by_columns)), group_size, reduce_op)
    exchange.out_shapes = [blocks if padding else [*x]]
    return exchange


def check_all_reduce(x: Shape, reduce_op: str, group_size: int) -> None:
    _check(x, group_size)
    check_reduce_op(reduce_op)


def _check(x: Shape, group_size: int) -> None:
    check_group_size(group_size)
    if len(x) == 0:
        raise ValueError(f"x must have at least 1 dim, got shape {tuple(x)}")


def _gather(
    x: Shape, gathered: list[int], gather_dim: int, scatter_dim: int | None, group_size: int, *cut: Any
) -> Exchange:
    more = dict(zip(("cut", "largest"), cut, strict=False))
    packed = ([*x], scatter_dim)
    return gather(gathered, len(gathered), (0, 0), gather_dim, packed, group_size, [gathered], **more)


def _reduce(x: Shape, split_dim: int, unpacked: Any, group_size: int, reduce_op: str, *cut: Any) -> Exchange:
    more = dict(zip(("cut", "largest"), cut, strict=False))
    return push((*x, 0), (0, 0), [*x], split_dim, unpacked, group_size, reduce_op=reduce_op, **more)
