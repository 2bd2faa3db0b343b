"""Sharding of a tensor on a mesh: the mesh dims that cut each tensor dim, in order, and the ones with partial sums.

A coordinate, one index per mesh dim, identifies a rank. A rank holds a box: a range per tensor dim. Mesh dims cut a
tensor dim one inside the other, outermost first, each as torch.chunk does: the first ranks get ceil(size / n), the last
ones get less, perhaps nothing. Ranks that differ only in mesh dims that cut nothing hold the same box, with equal
values or with parts of a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

Range = tuple[int, int]  # the first index, and the one after the last
Box = tuple[Range, ...]  # per tensor dim
Coordinate = tuple[int, ...]  # per mesh dim

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


@dataclass(frozen=True)
class Sharding:
    """Sharding of one tensor on one mesh. Mesh dims of one rank cut and reduce nothing, so no field names them."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]  # per tensor dim: the mesh dims that cut it, outermost first
    partial: tuple[str | None, ...]  # per mesh dim: the reduce op still to be done over it

    @staticmethod
    def of(
        shape: Sequence[int],
        mesh_shape: Sequence[int],
        cuts: Sequence[Sequence[int]],
        partial: Sequence[str | None],
    ) -> Sharding:
        """The Sharding with these cuts and reductions, without mesh dims of one rank."""
        return Sharding(
            tuple(shape),
            tuple(mesh_shape),
            tuple(tuple(i for i in dims if mesh_shape[i] > 1) for dims in cuts),
            tuple(op if mesh_shape[i] > 1 else None for i, op in enumerate(partial)),
        )

    def __hash__(self) -> int:  # looked up often
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.mesh_shape, self.cuts, self.partial))

    @cached_property
    def tensor_dims(self) -> tuple[int | None, ...]:
        """Per mesh dim: the tensor dim that it cuts, or None."""
        cut = {i: dim for dim, dims in enumerate(self.cuts) for i in dims}
        return tuple(cut.get(i) for i in range(len(self.mesh_shape)))

    @cached_property
    def is_even(self) -> bool:
        """Whether all ranks hold boxes of one size."""
        return all(
            size % math.prod(self.mesh_shape[i] for i in dims) == 0
            for size, dims in zip(self.shape, self.cuts, strict=True)
        )

    def box(self, coordinate: Sequence[int]) -> Box:
        return tuple(
            nested_chunk(size, [(self.mesh_shape[i], coordinate[i]) for i in dims])
            for size, dims in zip(self.shape, self.cuts, strict=True)
        )

    def local_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box(coordinate))

    def __str__(self) -> str:
        return ", ".join(self.placement(i) for i in range(len(self.mesh_shape)))

    def placement(self, mesh_dim: int) -> str:
        """R, S(tensor dim) or P(reduce op); S with its place in the order of cuts, if that is not the mesh's own."""
        op, dim = self.partial[mesh_dim], self.tensor_dims[mesh_dim]
        if op is not None:
            return f"P({op})"
        if dim is None:
            return "R"
        dims = self.cuts[dim]
        return f"S({dim})" if list(dims) == sorted(dims) else f"S({dim})[{dims.index(mesh_dim)}]"


def nested_chunk(size: int, chunks: Sequence[tuple[int, int]]) -> Range:
    """Chunk ``index`` of ``num`` of range(size), then the next such chunk of that; (num, index), outermost first."""
    start, stop = 0, size
    for num, index in chunks:
        chunk = -((start - stop) // num)  # ceil
        start, stop = min(start + index * chunk, stop), min(start + (index + 1) * chunk, stop)
    return start, stop


def intersection(a: Box, b: Box) -> Box | None:
    """The box that both share, or None where they share no element."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in both) else both


def numel(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
