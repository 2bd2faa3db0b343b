"""Changes of a sharding by one collective over several mesh dims at once, and their traffic.

Drop, per tensor dim, the mesh dims that both shardings share as a prefix: the tails remain. Ranks that differ only in
the tails of `before` together hold every box that one of them needs afterwards, as pieces of their own boxes. Exactly
one rank holds a piece, or, if the piece is to be reduced over some mesh dims, one rank per index in these. So one
exchange over that group does every change that reduces nothing, and needs no other mesh dim:

    slice           no mesh dim: a rank holds its box already
    all_gather      all ranks of the group need the union of their boxes
    all_to_all      any other change: each rank sends each other the intersection of its box with the other's
    all_reduce      the mesh dims that are reduced cut nothing after
    reduce_scatter  all mesh dims of the group cut something after: each element is reduced by one rank of the group

A change that would reduce the same element several times within the group takes two steps.

A step is `regular` if all pieces have one shape, and torch's collectives of equal parts do it. In other steps, an
all_gather pads the boxes to the largest, an all_to_all sends pieces of their own sizes, and a reduce_scatter is an
all_to_all with a reduction by the receiver, in the order of the ranks. There are other `ways`: an all_gather can be an
exchange without padding, and a reduce_scatter can pad the pieces to the largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from fusedcomm.redistribution.sharding import Box, Coordinate, Sharding, numel

SLICE, ALL_GATHER, ALL_TO_ALL = "slice", "all_gather", "all_to_all"
ALL_REDUCE, REDUCE_SCATTER = "all_reduce", "reduce_scatter"
_ONE = np.ones((), np.int64)


@dataclass(frozen=True)
class Step:
    """From ``before`` to ``after`` by at most one collective over the flattened group of ``mesh_dims``, in order."""

    kind: str
    before: Sharding
    after: Sharding
    mesh_dims: tuple[int, ...]
    reduce_op: str | None = None  # "sum" for avg too
    divisor: int = 1  # the number of ranks over which an average goes
    is_padded: bool = False  # pieces of a reduce_scatter that is not regular are padded to one size

    @cached_property
    def group_shape(self) -> tuple[int, ...]:
        return tuple(self.before.mesh_shape[i] for i in self.mesh_dims)

    @cached_property
    def group_size(self) -> int:
        return math.prod(self.group_shape)

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """Mesh dims that are partial before and not after."""
        pairs = zip(self.before.partial, self.after.partial, strict=True)
        return tuple(i for i, (op, after) in enumerate(pairs) if op is not None and after is None)

    @cached_property
    def is_regular(self) -> bool:
        """Whether all pieces have one shape."""
        if self.kind == ALL_REDUCE:
            return True
        if self.kind == REDUCE_SCATTER and self.mesh_dims != self.reduced:
            return False
        return self.before.is_even and self.after.is_even and all(not a or not b for a, b in tails(self))

    @cached_property
    def sends_as(self) -> str:
        """The collective that is called."""
        exchanges = self.kind == REDUCE_SCATTER and not self.is_regular and not self.is_padded
        return ALL_TO_ALL if exchanges else self.kind

    @cached_property
    def ways(self) -> tuple[Step, ...]:
        """The collectives that can make the same change, this step first."""
        if self.is_regular:
            return (self,)
        if self.kind == ALL_GATHER:
            return self, replace(self, kind=ALL_TO_ALL)
        if self.kind == REDUCE_SCATTER and self.mesh_dims == self.reduced:  # all ranks hold the same box
            return self, replace(self, is_padded=True)
        return (self,)

    def members(self, coordinate: Coordinate) -> list[Coordinate]:
        """The coordinates of the ranks in that rank's group, in row-major order."""
        places = [range(self.before.mesh_shape[i]) if i in self.mesh_dims else [c] for i, c in enumerate(coordinate)]
        return list(product(*places))

    def given(self, coordinate: Coordinate) -> Box:
        """The part of this rank's box that its group needs, if all need the same (gather, reduce)."""
        inside = [
            before + tuple(i for i in tail if i not in self.mesh_dims)
            for before, (_, tail) in zip(self.before.cuts, tails(self), strict=True)
        ]
        return Sharding(self.before.shape, self.before.mesh_shape, tuple(inside), self.before.partial).box(coordinate)

    @cached_property
    def traffic(self) -> tuple[float, float]:
        """Element counts: (sent per rank on average, max(sent, received) of the busiest rank).

        Counted in the group with other coordinates 0, since no group has larger boxes. An all_gather and a
        reduce_scatter, as rings or exchanges, send (R - 1) of R parts each, and an all_reduce twice that.
        """
        if self.kind == SLICE:
            return 0.0, 0.0
        zeros = (0,) * len(self.before.mesh_shape)
        others = self.group_size - 1
        if self.kind == ALL_GATHER:
            sent = float(others * numel(self.given(zeros)))  # the largest: boxes are padded to it
            return sent, sent
        if self.kind == ALL_REDUCE:
            sent = 2 * others / self.group_size * numel(self.given(zeros))
            return sent, sent
        if self.is_regular:
            pieces = math.prod(self.before.mesh_shape[i] for _, tail in tails(self) for i in tail)
            sent = float(others * (numel(self.before.box(zeros)) // pieces))
            return sent, sent
        if self.is_padded:
            sent = float(others * numel(self.after.box(zeros)))
            return sent, sent
        return exchanged(self)


@lru_cache(maxsize=8192)
def step(before: Sharding, after: Sharding) -> Step | None:
    """The step between two shardings of one tensor on one mesh, or None where one collective does not do it."""
    reduced = []
    for i, (op, op_after) in enumerate(zip(before.partial, after.partial, strict=True)):
        if op != op_after:
            if op is None or op_after is not None:
                return None  # no step makes partial sums, or reduces in another way
            reduced.append(i)
    both = [_tails(a, b) for a, b in zip(before.cuts, after.cuts, strict=True)]
    mesh_dims = tuple(sorted({*reduced, *(i for tail, _ in both for i in tail)}))
    if not mesh_dims:
        return Step(SLICE, before, after, ())
    cut_after = [after.tensor_dims[i] is not None for i in mesh_dims]
    if not reduced:
        gathers = not any(cut_after) and all(not a or not b for a, b in both)
        return Step(ALL_GATHER if gathers else ALL_TO_ALL, before, after, mesh_dims)
    merged = merged_op([str(before.partial[i]) for i in reduced])
    if merged is None:
        return None
    divisor = math.prod(before.mesh_shape[i] for i in reduced if before.partial[i] == "avg")
    if list(mesh_dims) == reduced and not any(cut_after):
        return Step(ALL_REDUCE, before, after, mesh_dims, merged, divisor)
    if all(cut_after):
        return Step(REDUCE_SCATTER, before, after, mesh_dims, merged, divisor)
    return None


def merged_op(ops: list[str]) -> str | None:
    """The one reduction that does all of ``ops`` at once, or None. An avg is a divided sum."""
    names = {"sum" if op == "avg" else op for op in ops}
    return names.pop() if len(names) == 1 else None


def tails(of: Step) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Per tensor dim: the cuts of before and of after beyond their common prefix."""
    return [_tails(a, b) for a, b in zip(of.before.cuts, of.after.cuts, strict=True)]


def _tails(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    common = 0
    for a, b in zip(before, after, strict=False):
        if a != b:
            break
        common += 1
    return before[common:], after[common:]


def exchanged(step: Step) -> tuple[float, float]:
    """Element counts of an exchange: (sent per rank on average, max(sent, received) of the busiest rank).

    Counted in the group with other coordinates 0. A rank sends each other the intersection of its box with the other's.
    A mesh dim cuts at most one tensor dim, so the sum over the others is a product over tensor dims.
    """
    before, after, group = step.before, step.after, step.mesh_dims
    sizes = [before.mesh_shape[i] if i in group else 1 for i in range(len(before.mesh_shape))]
    sent = received = shared = _ONE
    for size, dims, dims_after in zip(before.shape, before.cuts, after.cuts, strict=True):
        of_dim = _exchanged(size, before.mesh_shape, dims, dims_after, group)
        sent, received, shared = sent * of_dim[0], received * of_dim[1], shared * of_dim[2]
    copies = math.prod(size for size, dim in zip(sizes, after.tensor_dims, strict=True) if dim is None)
    parts = math.prod(size for size, dim in zip(sizes, before.tensor_dims, strict=True) if dim is None)
    sent, received = copies * sent - shared, parts * received - shared  # constant along dims of size 1
    return float(sent.sum()) / sent.size, float(max(sent.max(), received.max()))


@lru_cache(maxsize=4096)
def _exchanged(
    size: int, mesh_shape: tuple[int, ...], dims: tuple[int, ...], dims_after: tuple[int, ...], group: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Element counts (send, recv, keep) along one tensor dim, by coordinate. Peers: one per coordinate of the group's
    mesh dims that cut this dim."""
    num = len(mesh_shape)
    start, stop = (_of_group(each, group) for each in _ranges(size, mesh_shape, dims))
    start_after, stop_after = (_of_group(each, group) for each in _ranges(size, mesh_shape, dims_after))
    apart = (...,) + (None,) * num  # the others' coordinates are axes of their own
    pairs = _overlap(start[apart], stop[apart], start_after, stop_after)
    sent, received = pairs.sum(tuple(range(num, 2 * num))), pairs.sum(tuple(range(num)))
    return sent, received, _overlap(start, stop, start_after, stop_after)


def _of_group(each: np.ndarray, group: tuple[int, ...]) -> np.ndarray:
    return each[tuple(slice(None) if i in group else slice(1) for i in range(each.ndim))]


def _overlap(start: np.ndarray, stop: np.ndarray, other_start: np.ndarray, other_stop: np.ndarray) -> np.ndarray:
    return np.maximum(np.minimum(stop, other_stop) - np.maximum(start, other_start), 0)


@lru_cache(maxsize=4096)
def _ranges(size: int, mesh_shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Where boxes start and stop in a tensor dim, by coordinate, as in `nested_chunk`; size 1 where nothing cuts."""
    start, stop = np.zeros((1,) * len(mesh_shape), np.int64), np.full((1,) * len(mesh_shape), size)
    for i in dims:
        index = np.arange(mesh_shape[i]).reshape([-1 if axis == i else 1 for axis in range(len(mesh_shape))])
        chunk = -((start - stop) // mesh_shape[i])  # ceil
        start, stop = np.minimum(start + index * chunk, stop), np.minimum(start + (index + 1) * chunk, stop)
    return start, stop
