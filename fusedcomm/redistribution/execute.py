"""Executes steps: pack, send, unpack. Pieces that are not equal blocks in rank order are packed by `uneven`.

The ranks of a process group are sorted, while the members of a step's group are in row-major order of the mesh.
``order`` has, for each rank of the process group, its row-major index as a member.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import _maybe_wrap_tensor

from fusedcomm.redistribution import uneven
from fusedcomm.redistribution.sharding import Coordinate, Sharding
from fusedcomm.redistribution.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SLICE, Step, tails
from fusedcomm.run.reference import MOVED, all_gather_into_tensor, bytes_of

_c10d = torch.ops._c10d_functional
Order = tuple[int, ...]


class Sent(NamedTuple):
    """The collective's input. The splits of dim 0 are None where parts are equal."""

    tensor: Tensor
    input_splits: list[int] | None = None
    output_splits: list[int] | None = None


def run(
    step: Step, coordinate: Coordinate, order: Order, group_name: str, local: Tensor, *, wait: bool = True
) -> Tensor:
    """This rank's part of ``step.after``, made from ``local``, its part of ``step.before``: contiguous, and no alias.

    All ranks of the group call it. Without ``wait`` the result may be in flight, as an AsyncCollectiveTensor.
    """
    sent = pack(step, coordinate, order, local)
    if step.kind == SLICE:
        return sent.tensor
    as_bytes = step.sends_as in (ALL_GATHER, ALL_TO_ALL) and local.dtype not in MOVED
    started = _start(step, group_name, sent._replace(tensor=bytes_of(sent.tensor)) if as_bytes else sent)
    if wait or not _only_views(step, coordinate, order):
        received = _c10d.wait_tensor.default(started)
    else:
        received = _maybe_wrap_tensor(started)  # it waits at its first use, or at once while it is traced
    if as_bytes:
        received = received.view(local.dtype).squeeze(-1)
    return unpack(step, coordinate, order, received)


def pack(step: Step, coordinate: Coordinate, order: Order, local: Tensor) -> Sent:
    """Make the collective's input: blocks along dim 0, except for an all_reduce. A slice is its own result."""
    assert local.shape == _local_shape(step.before, coordinate), f"{local.shape} is not {step.before} at {coordinate}"
    if step.kind == SLICE:
        return Sent(uneven.taken(local, _given_part(step, coordinate)).clone(memory_format=torch.contiguous_format))
    if step.sends_as in (ALL_REDUCE, REDUCE_SCATTER):
        local = uneven.averaged(local, step.divisor)  # before the sum, which might overflow where the averages do not
    if step.kind == ALL_REDUCE or (step.kind == ALL_GATHER and _is_stacked(step, order)):
        return Sent(uneven.taken(local, _given_part(step, coordinate)).contiguous())
    if _is_stacked(step, order):
        return Sent(_stack(local, _sending(step, coordinate)))
    layout = uneven.pieces(step, coordinate, order)
    if step.kind == ALL_GATHER:
        return Sent(uneven.send(local, layout, padded_to=layout.received_lengths[0]))
    if step.is_regular:
        return Sent(uneven.send(local, layout))
    if step.is_padded:
        return Sent(uneven.send_padded(local, layout))
    return Sent(uneven.send(local, layout), layout.sent_lengths, layout.received_lengths)


def unpack(step: Step, coordinate: Coordinate, order: Order, received: Tensor) -> Tensor:
    """This rank's part of ``step.after``. ``received``: the result of ``step.sends_as``, or a slice's own tensor."""
    if step.kind == SLICE:
        return received
    if step.kind == ALL_REDUCE or (step.kind == REDUCE_SCATTER and step.is_regular):
        return _viewed(received, _local_shape(step.after, coordinate))
    if step.is_padded:
        return uneven.window(received, 0, _local_shape(step.after, coordinate))
    if _is_stacked(step, order):
        return _join(received, _arriving(step, coordinate))
    return uneven.receive(received, uneven.pieces(step, coordinate, order), step)


def _only_views(step: Step, coordinate: Coordinate, order: Order) -> bool:
    """Whether unpack makes only views."""
    if step.sends_as in (ALL_REDUCE, REDUCE_SCATTER):
        return True
    if _is_stacked(step, order):
        return _arriving(step, coordinate).permuted is None
    return uneven.pieces(step, coordinate, order).start is not None


def _is_stacked(step: Step, order: Order) -> bool:
    """Whether equal blocks travel in row-major order."""
    return step.is_regular and list(order) == sorted(order)


_local_shape = lru_cache(maxsize=4096)(Sharding.local_shape)


@lru_cache(maxsize=4096)
def _given_part(step: Step, coordinate: Coordinate) -> uneven.Part:
    return uneven.part_of(step.before.box(coordinate), step.given(coordinate))


def _start(step: Step, group_name: str, sent: Sent) -> Tensor:
    tensor, size = sent.tensor, step.group_size
    if step.sends_as == ALL_GATHER:
        return all_gather_into_tensor(tensor, size, group_name)
    if step.sends_as == ALL_REDUCE:
        return _c10d.all_reduce.default(tensor, step.reduce_op, group_name)
    if step.sends_as == REDUCE_SCATTER:
        return _c10d.reduce_scatter_tensor.default(tensor, step.reduce_op, size, group_name)
    equal = [tensor.shape[0] // size] * size
    return _c10d.all_to_all_single.default(tensor, sent.output_splits or equal, sent.input_splits or equal, group_name)


# Equal blocks on dim 0, in the order of the group's ranks. Mesh dims become dims of the tensor, which is then permuted:
# one pass over the data, or none.


@dataclass(frozen=True)
class _Sending:
    """Views of a rank's local tensor that yield a block for each member, in row-major order."""

    shape: uneven.Shape
    selected: tuple[tuple[int, int], ...] = ()  # (dim, index), last dim first
    permuted: tuple[int, ...] | None = None  # None where blocks are outermost already
    expanded: uneven.Shape | None = None  # None where each member gets another block
    stacked: uneven.Shape = ()


@dataclass(frozen=True)
class _Arriving:
    """Views that yield a rank's local tensor from the members' blocks, in row-major order."""

    blocks: uneven.Shape = ()
    permuted: tuple[int, ...] | None = None  # None where they lie as in the tensor
    shape: uneven.Shape = ()


@lru_cache(maxsize=4096)
def _sending(step: Step, coordinate: Coordinate) -> _Sending:
    """How this rank packs its payload of a regular all_to_all or reduce_scatter."""
    group, local = step.mesh_dims, step.before.local_shape(coordinate)
    cutting = {i for _, tail in tails(step) for i in tail}
    repeated = [i for i in group if i not in cutting]
    names: list[int | str] = list(repeated)  # mesh dims, and "" for the rest of a tensor dim
    sizes = [1] * len(repeated)
    for size, (_, tail) in zip(local, tails(step), strict=True):
        pieces = [step.before.mesh_shape[i] for i in tail]
        names += [*tail, ""]
        sizes += [*pieces, size // math.prod(pieces)]
    own = [k for k, name in enumerate(names) if name != "" and name not in group]
    left = [k for k in range(len(names)) if k not in own]
    names_left, sizes_left = [names[k] for k in left], [sizes[k] for k in left]
    permuted = [names_left.index(i) for i in group] + [k for k, name in enumerate(names_left) if name == ""]
    block = tuple(size for name, size in zip(names_left, sizes_left, strict=True) if name == "")
    return _Sending(
        shape=tuple(sizes),
        selected=tuple((k, coordinate[int(names[k])]) for k in reversed(own)),
        permuted=None if not repeated and _keeps_order(permuted, sizes_left) else tuple(permuted),
        expanded=(*step.group_shape, *block) if repeated else None,
        stacked=(step.group_size * block[0], *block[1:]),
    )


@lru_cache(maxsize=4096)
def _arriving(step: Step, coordinate: Coordinate) -> _Arriving:
    """How this rank unpacks a regular all_gather or all_to_all."""
    group, shape = step.mesh_dims, step.after.local_shape(coordinate)
    permuted, block = [], []
    for dim, (size, (tail, _)) in enumerate(zip(shape, tails(step), strict=True)):
        permuted += [*(group.index(i) for i in tail), len(group) + dim]
        block.append(size // math.prod(step.before.mesh_shape[i] for i in tail))
    blocks = (*step.group_shape, *block)
    return _Arriving(blocks, None if _keeps_order(permuted, blocks) else tuple(permuted), shape)


def _stack(tensor: Tensor, layout: _Sending) -> Tensor:
    blocks = _viewed(tensor, layout.shape)
    for dim, index in layout.selected:
        blocks = blocks.select(dim, index)
    if layout.permuted is not None:
        blocks = blocks.permute(layout.permuted)
    if layout.expanded is not None:
        blocks = blocks.expand(layout.expanded)
    return _viewed(blocks.contiguous(), layout.stacked)


def _join(received: Tensor, layout: _Arriving) -> Tensor:
    if layout.permuted is None:
        return _viewed(received, layout.shape)
    return received.view(layout.blocks).permute(layout.permuted).contiguous().view(layout.shape)


def _viewed(tensor: Tensor, shape: uneven.Shape) -> Tensor:
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def _keeps_order(permuted: list[int], sizes: list[int] | uneven.Shape) -> bool:
    moved = [k for k in permuted if sizes[k] != 1]
    return moved == sorted(moved)
