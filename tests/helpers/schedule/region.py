"""The bytes of a memory that an access touches, as strided runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MOST_RUNS = 1 << 22


@dataclass(frozen=True)
class Region:
    """Runs of ``run`` bytes from byte ``start`` on, one for each index of ``dims``, (count, stride in bytes) each."""

    memory: str  # equal for the same bytes on all ranks
    start: int
    run: int
    dims: tuple[tuple[int, int], ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.run * math.prod(count for count, _ in self.dims)

    @property
    def end(self) -> int:
        return self.start + self.run + sum((count - 1) * stride for count, stride in self.dims)

    def moved(self, memory: str, by: int) -> Region:
        return Region(memory, self.start + by, self.run, self.dims)

    def overlaps(self, other: Region) -> bool:
        if self.memory != other.memory or min(self.end, other.end) <= max(self.start, other.start):
            return False
        if not self.dims and not other.dims:
            return True
        first, second = self._starts(), other._starts()
        before = np.searchsorted(second, first + self.run) - 1  # the last run of other that begins before a run ends
        return bool(np.any((before >= 0) & (second[before] + other.run > first)))

    def _starts(self) -> np.ndarray:
        assert math.prod(count for count, _ in self.dims) <= _MOST_RUNS, f"too many runs: {self}"
        starts = np.array([self.start], dtype=np.int64)
        for count, stride in self.dims:
            starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
        return np.sort(starts)


def region(memory: str, start: int, sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> Region | None:
    """The Region of a tensor: ``start`` in bytes, sizes and strides in elements; None if it has no elements."""
    if math.prod(sizes) == 0:
        return None
    run = itemsize
    dims: list[tuple[int, int]] = []
    for stride, size in sorted((stride * itemsize, size) for size, stride in zip(sizes, strides, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride == run and not dims:
            run *= size
        elif dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        else:
            dims.append((size, stride))
    return Region(memory, start, run, tuple(reversed(dims)))
