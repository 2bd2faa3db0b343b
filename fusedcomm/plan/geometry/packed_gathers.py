"""The Exchange of a gather whose payload are packed rows: values and scales as bytes (`fusedcomm.plan.scaling`).

All columns of x are one dim there, and where they are cut, each part is a piece with scales of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.cut import EVEN, Parts, Splits
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.geometry.shapes import Shape
from fusedcomm.plan.scaling import BLOCK, width


def all_to_all_matmul(
    x: Shape,
    w: Shape,
    gather_dim: int,
    scatter_dim: int,
    group_size: int,
    splits: Splits = EVEN,
    block: int = 0,
    dtype: str = "float8_e4m3fn",
) -> Exchange:
    """``block``: elements of K with one scale, 0 for all; ``dtype``: of the values."""
    plain: Exchange = shapes.of(shapes.all_to_all_matmul, x, w, gather_dim, scatter_dim, group_size, splits)
    lead, gather, scatter = plain.num_lead, gather_dim % len(x), scatter_dim % len(x)
    if gather >= lead and scatter >= lead:
        raise ValueError(f"gather_dim and scatter_dim must not both be dims of K, got {gather_dim} and {scatter_dim}")
    k = sum(ks_received(plain))
    if gather < lead and scatter < lead:
        packed, splits_now = [*x[:lead], width(k, block)], splits
    elif scatter >= lead:
        _check_one_run(x[lead:scatter], "scatter_dim")
        sent = ks_sent(plain)
        _check_blocks(sent[:-1], block)
        widths = [width(each, block) for each in sent]
        packed, scatter = [*x[:lead], sum(widths)], lead
        splits_now = splits._replace(scatter_starts=None, scatter_lengths=widths) if plain.cut else splits
    else:
        _check_one_run(x[lead:gather], "gather_dim")
        received = ks_received(plain)
        _check_blocks(received[:-1], block)
        widths = [width(each, block) for each in received]
        own = math.prod(x[lead:])
        packed, gather = [*x[:lead], width(own, block)], lead
        splits_now = splits._replace(gather_splits=widths, gather_size=None) if plain.cut else splits
    whole_k = sum(width(each, block) for each in ks_received(plain))
    found = shapes.all_to_all_matmul(packed, (*w[:-2], whole_k, w[-1]), gather, scatter, group_size, splits_now)
    return replace(found, scaled=(block, dtype))


def all_gather_matmul(
    x: Shape,
    ws: Sequence[Shape],
    gather_dim: int,
    group_size: int,
    splits: Splits = EVEN,
    block: int = 0,
    dtype: str = "float8_e4m3fn",
) -> Exchange:
    plain: Exchange = shapes.of(shapes.all_gather_matmul, x, tuple(ws), gather_dim, group_size, splits)
    received = ks_received(plain)
    _check_blocks(received[:-1], block)
    packed = [*x[:-1], width(x[-1], block)]
    if plain.splits_columns and plain.cut is not None:
        splits = splits._replace(gather_splits=[width(k, block) for k in received], gather_size=None)
    whole_k = sum(width(k, block) for k in received)
    whole_ws = [(*w[:-2], whole_k, w[-1]) for w in ws]
    found = shapes.all_gather_matmul(packed, whole_ws, gather_dim, group_size, splits)
    return replace(found, scaled=(block, dtype))


def ks_received(plain: Exchange) -> tuple[int, ...]:
    """K of each piece of a gathered row: of every source where K is gathered, else one piece."""
    if not plain.splits_columns:
        return (plain.k,)
    return _ks(plain, None if plain.cut is None else plain.cut.gathered)


def ks_sent(plain: Exchange) -> tuple[int, ...]:
    """K of each piece of a row of this rank's x: to every rank where K is cut, else one piece."""
    sizes, dim = plain.packed
    if dim is None or dim < plain.num_lead:
        return (math.prod(sizes[plain.num_lead :]),)
    inner = math.prod(sizes[plain.num_lead :]) // sizes[dim] if sizes[dim] else 0
    scattered = None if plain.cut is None else plain.cut.scattered
    if scattered is None:
        return (sizes[dim] // plain.group_size * inner,) * plain.group_size
    if not scattered.tiles:
        raise ValueError("scatter_ranges must be consecutive where K is cut")
    return tuple(size * inner for size in scattered.sizes)


def _ks(plain: Exchange, parts: Parts | None) -> tuple[int, ...]:
    if parts is None:
        return (plain.k // plain.group_size,) * plain.group_size
    inner = plain.k // parts.total if parts.total else 0
    return tuple(size * inner for size in parts.sizes)


def _check_one_run(sizes: Shape, name: str) -> None:
    if math.prod(sizes) != 1:
        raise ValueError(f"{name} must be the first dim of K that is larger than 1, got sizes {[*sizes]} before it")


def _check_blocks(ks: Sequence[int], block: int) -> None:
    """Raises ValueError where a cut of K is inside a block: of the part before each cut."""
    for k in ks if block else ():
        if k % block:
            raise ValueError(f"K must be cut at multiples of {BLOCK} beside block-wise scales, got a part of {k}")
