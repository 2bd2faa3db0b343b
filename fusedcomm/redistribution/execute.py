"""Executes steps: pack, send, unpack.

The ranks of a process group are sorted, while the members of a step's group are in row-major order of the mesh.
``order`` has, for each rank of the process group, its row-major index as a member.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import _maybe_wrap_tensor

from fusedcomm.redistribution import even, uneven
from fusedcomm.redistribution.sharding import Coordinate, Sharding
from fusedcomm.redistribution.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SLICE, Step
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
        return Sent(even.stack(local, even.sending(step, coordinate)))
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
        return even.viewed(received, _local_shape(step.after, coordinate))
    if step.is_padded:
        return uneven.window(received, 0, _local_shape(step.after, coordinate))
    if _is_stacked(step, order):
        return even.join(received, even.arriving(step, coordinate))
    return uneven.receive(received, uneven.pieces(step, coordinate, order), step)


def _only_views(step: Step, coordinate: Coordinate, order: Order) -> bool:
    """Whether unpack makes only views."""
    if step.sends_as in (ALL_REDUCE, REDUCE_SCATTER):
        return True
    if _is_stacked(step, order):
        return even.arriving(step, coordinate).permuted is None
    return uneven.pieces(step, coordinate, order).start is not None


def _is_stacked(step: Step, order: Order) -> bool:
    """Whether equal blocks travel in row-major order, as `even` needs."""
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
