"""Pieces that ranks exchange in steps of any kind, even or not, and for any order of the group's ranks.

A piece is a box of the tensor. Pieces are sent flat, one after the other. Parts of a reduction are added up on arrival.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedcomm.redistribution.sharding import Box, Coordinate, intersection, numel
from fusedcomm.redistribution.steps import ALL_GATHER, Step, tails

Shape = tuple[int, ...]
Part = tuple[tuple[int, int, int], ...]  # (dim, start, length) for the dims that are cut
_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class Pieces:
    """One rank's pieces from and to each rank of the group. Lengths are in elements; an empty piece is None."""

    sent: tuple[Part | None, ...]  # parts of this rank's box; a single one, for all, in an all_gather
    sent_lengths: list[int]
    received: tuple[Shape | None, ...]
    received_lengths: list[int]  # with padding
    ranks: list[Any]  # senders: [part of the reduction][piece along tensor dim 0][along dim 1]..., no empty pieces
    shape: Shape  # the result's shape
    start: int | None  # offset of the result in the receive buffer, if it is contiguous there


@lru_cache(maxsize=128)
def pieces(step: Step, coordinate: Coordinate, order: tuple[int, ...]) -> Pieces:
    """This rank's pieces in any step with a group except all_reduce."""
    in_rows = step.members(coordinate)
    members = [in_rows[index] for index in order]
    held, needed = step.before.box(coordinate), step.after.box(coordinate)
    if step.kind == ALL_GATHER:
        sent = [intersection(held, step.given(coordinate))]
        received = [intersection(step.given(member), needed) for member in members]
    else:
        sent = [intersection(held, step.after.box(member)) for member in members]
        received = [intersection(step.before.box(member), needed) for member in members]
    lengths = _lengths(received)
    spaces = [max(lengths)] * len(lengths) if step.kind == ALL_GATHER else lengths
    ranks, shape = _ranks(step, order, np.array(lengths)), _shape(needed)
    return Pieces(
        sent=tuple(None if box is None else part_of(held, box) for box in sent),
        sent_lengths=_lengths(sent),
        received=tuple(None if box is None else _shape(box) for box in received),
        received_lengths=spaces,
        ranks=ranks.tolist(),
        shape=shape,
        start=_start(ranks, shape, lengths, spaces),
    )


def part_of(held: Box, box: Box) -> Part:
    ranges = enumerate(zip(held, box, strict=True))
    return tuple((dim, b[0] - a[0], b[1] - b[0]) for dim, (a, b) in ranges if a != b)


def _lengths(boxes: list[Box | None]) -> list[int]:
    return [0 if box is None else numel(box) for box in boxes]


def _shape(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def _ranks(step: Step, order: tuple[int, ...], lengths: np.ndarray) -> np.ndarray:
    """The senders: [parts, pieces along tensor dim 0, along dim 1, ...]; parts in row-major order of the members."""
    by_member = np.empty(step.group_size, dtype=int)
    by_member[list(order)] = np.arange(step.group_size)
    cuts = [tail for tail, _ in tails(step)]
    axes = [step.mesh_dims.index(i) for i in (*step.reduced, *(i for tail in cuts for i in tail))]
    num_pieces = [math.prod(step.before.mesh_shape[i] for i in tail) for tail in cuts]
    num_parts = math.prod(step.before.mesh_shape[i] for i in step.reduced)
    ranks = by_member.reshape(step.group_shape).transpose(axes).reshape(num_parts, *num_pieces)
    filled = lengths[ranks] > 0
    for dim in range(ranks.ndim):  # a piece is empty if its range along any dim is
        others = tuple(k for k in range(ranks.ndim) if k != dim)
        ranks = ranks.compress(filled.any(axis=others), axis=dim)
    return ranks


def _start(ranks: np.ndarray, shape: Shape, lengths: list[int], spaces: list[int]) -> int | None:
    """Where the result begins, if its pieces follow each other along the outermost dim without padding in between."""
    last = max((dim for dim, num in enumerate(ranks.shape[1:]) if num > 1), default=0)
    if ranks.size == 0 or len(ranks) > 1 or math.prod(shape[:last]) > 1:
        return None
    starts = [0, *accumulate(spaces)]
    following = ranks.ravel().tolist()
    for rank, other in pairwise(following):
        if starts[rank] + lengths[rank] != starts[other]:
            return None
    return starts[following[0]]


def taken(tensor: Tensor, part: Part) -> Tensor:
    """A view of that part of the tensor."""
    for dim, start, length in part:
        tensor = tensor.narrow(dim, start, length)
    return tensor


def send(tensor: Tensor, layout: Pieces, padded_to: int = 0) -> Tensor:
    parts = [taken(tensor, part).reshape(-1) for part in layout.sent if part is not None]
    missing = padded_to - sum(layout.sent_lengths)
    if missing > 0 or not parts:
        parts.append(tensor.new_zeros((max(missing, 0),)))
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def send_padded(tensor: Tensor, layout: Pieces) -> Tensor:
    """Every piece is padded to the length of the largest."""
    space = max(layout.sent_lengths)
    found = tensor.new_zeros((len(layout.sent), space))
    for row, part, length in zip(found, layout.sent, layout.sent_lengths, strict=True):
        if part is not None:
            piece = taken(tensor, part)
            row[:length].view(piece.shape).copy_(piece)
    return found.view(-1)


def receive(received: Tensor, layout: Pieces, step: Step) -> Tensor:
    """``received`` may be in flight if ``layout.start`` is not None: then the result is a view of it."""
    if layout.start is not None:
        return window(received, layout.start, layout.shape)
    if not layout.ranks or 0 in layout.shape:
        return received.new_empty(layout.shape)
    spaces = received.split(layout.received_lengths)
    parts = [_joined(spaces, layout, ranks, 0) for ranks in layout.ranks]
    if step.reduce_op is None:
        return parts[0]
    return reduced(parts, step.reduce_op, step.divisor)


def _joined(spaces: tuple[Tensor, ...], layout: Pieces, ranks: Any, dim: int) -> Tensor:
    if isinstance(ranks, int):
        shape = layout.received[ranks]
        assert shape is not None
        return window(spaces[ranks], 0, shape)
    found = [_joined(spaces, layout, inner, dim + 1) for inner in ranks]
    return torch.cat(found, dim) if len(found) > 1 else found[0]


def window(flat: Tensor, start: int, shape: Shape) -> Tensor:
    length = math.prod(shape)
    return (flat if length == flat.shape[0] else flat.narrow(0, start, length)).view(shape)


def reduced(parts: list[Tensor], op: str, divisor: int) -> Tensor:
    """The parts reduced one after the other, in their order; float16 and bfloat16 are rounded once, at the end.

    Parts are divided before they are added, as their sum might overflow where the average does not.
    """
    dtype = wide = parts[0].dtype
    if op in ("sum", "product") and dtype in (torch.float16, torch.bfloat16):
        wide = torch.float32
    total = averaged(parts[0].to(wide), divisor)
    for part in parts[1:]:
        total = _OPS[op](total, averaged(part.to(wide), divisor))
    return total.to(dtype)


def averaged(total: Tensor, divisor: int) -> Tensor:
    """``total / divisor``, where whole numbers are rounded towards 0."""
    if divisor == 1:
        return total
    if total.is_floating_point() or total.is_complex():
        return total / divisor
    return torch.div(total, divisor, rounding_mode="trunc")
