"""Random redistributions of DTensors, and what each rank must hold afterwards: torch.chunk cuts it from the whole
tensor.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Case:
    seed: int
    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    before: Placements
    after: Placements
    dtype: torch.dtype = torch.float32

    def held(self, coordinate: Sequence[int]) -> Tensor:
        """What the rank at a coordinate holds before: the shards of its part of the reduction."""
        parts = self._parts()
        for i in self._partial_dims():
            parts = parts[coordinate[i]]
        return shards(parts, self.mesh_shape, coordinate, self.before)

    def wanted(self, coordinate: Sequence[int]) -> Tensor:
        kept = [i for i in self._partial_dims() if self.after[i].is_partial()]
        parts = self._parts()
        for position, i in reversed(list(enumerate(self._partial_dims()))):
            if i in kept:
                parts = parts.select(position, coordinate[i])
            else:
                parts = reduced(parts, position, str(getattr(self.before[i], "reduce_op")))  # noqa: B009
        return shards(parts, self.mesh_shape, coordinate, self.after)

    def _partial_dims(self) -> list[int]:
        return [i for i, placement in enumerate(self.before) if placement.is_partial()]

    def _parts(self) -> Tensor:
        """Small integers, [size of each partial mesh dim, *shape]. Averages are such that no division rounds."""
        sizes = [self.mesh_shape[i] for i in self._partial_dims()]
        generator = torch.Generator().manual_seed(self.seed)
        parts = torch.randint(-2, 3, (*sizes, *self.shape), generator=generator)
        averaged = [self.mesh_shape[i] for i in self._partial_dims() if self.before[i] == Partial("avg")]
        return (parts * math.prod(averaged)).to(self.dtype)


def reduced(parts: Tensor, dim: int, op: str) -> Tensor:
    if op in ("sum", "avg"):
        total = parts.sum(dim, dtype=torch.float64 if parts.is_floating_point() else None)
        return (total / parts.shape[dim] if op == "avg" else total).to(parts.dtype)
    return {"max": parts.amax, "min": parts.amin, "product": parts.prod}[op](dim)


def shards(whole: Tensor, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Placements) -> Tensor:
    for size, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            chunks = torch.chunk(whole, size, placement.dim) if whole.shape[placement.dim] else ()
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole.contiguous()


def random_case(seed: int, mesh_shapes: Sequence[tuple[int, ...]]) -> Case:
    rng = random.Random(seed)
    mesh_shape = rng.choice(mesh_shapes)
    ndim = rng.choice((0, 1, 2, 2, 3, 3, 4))
    shape = tuple(rng.choice((0, 1, 2, 3, 4, 5, 8, 9, 12)) for _ in range(ndim))
    ops = rng.choice((["sum"], ["avg"], ["sum", "avg"], ["max"], ["min"], ["product"]))
    cut: list[Placement] = [Shard(dim) for dim in range(ndim)]
    before, after = [], []
    for _ in mesh_shape:
        before.append(rng.choice([Replicate(), *cut, *cut, Partial(rng.choice(ops))]))
        choices = [Replicate(), *cut, *cut]
        if before[-1].is_partial():
            choices.append(before[-1])
        after.append(rng.choice(choices))
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float64)
    dtype = rng.choice(dtypes if "avg" in ops else (*dtypes, torch.int64))
    return Case(seed, mesh_shape, shape, tuple(before), tuple(after), dtype)
