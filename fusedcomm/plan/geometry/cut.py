"""Each rank's part of a dim: equal, by torch.chunk's rule, of given sizes, or given intervals.

An op gathers along one dim: the whole has part src_rank from src_rank. It scatters along another: dst_rank gets part
dst_rank. Scattered parts may overlap, as heads of keys that several ranks read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Parts(NamedTuple):
    """Intervals of a dim of ``total`` elements, one for each rank."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    total: int

    @property
    def largest(self) -> int:
        return max(self.sizes)

    @property
    def is_even(self) -> bool:
        """Whether the dim is cut into blocks of one size."""
        return all(size * len(self.sizes) == self.total for size in self.sizes) and self.tiles

    @property
    def tiles(self) -> bool:
        """Whether each element is in exactly one part, in rank order."""
        return self.starts == _starts(self.sizes) and self.starts[-1] + self.sizes[-1] == self.total

    @property
    def receivers(self) -> dict[tuple[int, int], list[int]]:
        """The ranks that have each distinct part (start, size) which is not empty."""
        found: dict[tuple[int, int], list[int]] = {}
        for rank, part in enumerate(zip(self.starts, self.sizes, strict=True)):
            if part[1]:
                found.setdefault(part, []).append(rank)
        return found

    @property
    def overlaps(self) -> bool:
        """Whether two distinct parts have elements in common."""
        return any(start + size > after for (start, size), (after, _) in itertools.pairwise(sorted(self.receivers)))


class Cut(NamedTuple):
    """The parts of an op's two dims, where they are not blocks of one size, for the tensors of ``rank``."""

    rank: int
    gathered: Parts | None  # by src_rank; None where the op does not gather
    scattered: Parts | None  # by dst_rank; None where the op does not scatter

    @property
    def both(self) -> tuple[Parts, Parts]:
        """The parts of an op that gathers and scatters."""
        assert self.gathered is not None and self.scattered is not None
        return self.gathered, self.scattered

    @property
    def group_size(self) -> int:
        return max(len(parts.sizes) for parts in (self.gathered, self.scattered) if parts is not None)

    @property
    def is_symbolic(self) -> bool:
        given = [parts for parts in (self.gathered, self.scattered) if parts is not None]
        return any(isinstance(n, torch.SymInt) for parts in given for n in (*parts.starts, *parts.sizes, parts.total))

    def __str__(self) -> str:
        return ", ".join(f"{name}={list(value)}" for name, value in self.arguments.items())

    @property
    def arguments(self) -> dict[str, tuple[Any, ...]]:
        """The parts under the names of the ops' arguments."""
        found: dict[str, tuple[Any, ...]] = {}
        if self.gathered is not None:
            found["gather_splits"] = self.gathered.sizes
        if self.scattered is not None:
            found["scatter_ranges"] = tuple(zip(self.scattered.starts, self.scattered.sizes, strict=True))
        return found


class Splits(NamedTuple):
    """A call's arguments about its parts, as in the ops' schemas.

    With parts of different sizes each rank's result has its own shape, and caches of graphs tell ranks apart by these
    arguments alone. Calls of even parts are the same on all ranks, and say no rank.
    """

    gather_splits: Sequence[int] | None = None  # each rank's size at gather_dim
    gather_size: int | None = None  # the sum of these, which are by torch.chunk's rule
    scatter_starts: Sequence[int] | None = None
    scatter_lengths: Sequence[int] | None = None
    rank: int | None = None  # this process' rank in the group

    @property
    def hashable(self) -> Splits:
        return Splits._make(tuple(each) if isinstance(each, list) else each for each in self)

    @property
    def to_gather(self) -> tuple[Any, ...]:
        """The arguments of an op that only gathers."""
        return self.gather_splits, self.gather_size, self.rank

    @property
    def to_scatter(self) -> tuple[Any, ...]:
        """The arguments of an op that only scatters."""
        return self.scatter_starts, self.scatter_lengths, self.rank


EVEN = Splits()


def parts_of_sizes(sizes: Sequence[int]) -> Parts:
    return Parts(_starts(sizes), tuple(sizes), sum(sizes))


def chunk_parts(total: int, group_size: int) -> Parts:
    """torch.chunk's parts, the shards of a DTensor; empty ones where it gives fewer."""
    step = -(-total // group_size)
    starts = tuple(_least(rank * step, total) for rank in range(group_size))
    return Parts(starts, tuple(_least(step, total - start) for start in starts), total)


def cut_of(splits: Splits, gathered: int | None, scattered: int | None, group_size: int) -> Cut | None:
    """The Cut of a call, or None where all parts are blocks of one size. Raises ValueError.

    ``gathered``: this rank's size at gather_dim; ``scattered``: all of the size at scatter_dim.
    """
    to = None if scattered is None else _scattered(splits, scattered, group_size)
    given = splits.gather_splits is not None or splits.gather_size is not None
    if (to is None or _is_even(to)) and not given:
        return None
    if splits.rank is None or not 0 <= splits.rank < group_size:
        raise ValueError(f"rank must be in [0, {group_size - 1}] where parts may differ in size, got {splits.rank}")
    source = None if gathered is None else _gathered(splits, gathered, group_size, splits.rank)
    if (to is None or _is_even(to)) and (source is None or _is_even(source)):
        return None
    return Cut(splits.rank, source, to)


def _gathered(splits: Splits, size: int, group_size: int, rank: int) -> Parts:
    if splits.gather_splits is not None:
        if splits.gather_size is not None:
            raise ValueError("at most one of gather_splits and gather_size may be given, got both")
        parts = parts_of_sizes(_checked("gather_splits", splits.gather_splits, group_size))
    elif splits.gather_size is not None:
        if splits.gather_size < 0:
            raise ValueError(f"gather_size must be at least 0, got {splits.gather_size}")
        parts = chunk_parts(splits.gather_size, group_size)
    else:
        parts = parts_of_sizes([size] * group_size)
    if size != parts.sizes[rank]:
        name = "gather_splits" if splits.gather_splits is not None else f"gather_size={splits.gather_size}"
        raise ValueError(f"gather_dim size must be what {name} gives rank {rank}, {parts.sizes[rank]}, got {size}")
    return parts


def _scattered(splits: Splits, total: int, group_size: int) -> Parts:
    if splits.scatter_lengths is None:
        if splits.scatter_starts is not None:
            raise ValueError("scatter_starts must come with scatter_lengths, got None")
        says_nothing = splits.rank is None and splits.gather_splits is None and splits.gather_size is None
        if is_divisible(total, group_size) or (says_nothing and total % group_size == 0):  # which a graph guards
            return parts_of_sizes([total // group_size] * group_size)
        return chunk_parts(total, group_size)
    name = "scatter_splits" if splits.scatter_starts is None else "scatter_ranges"  # as users say them
    sizes = _checked(name, splits.scatter_lengths, group_size)
    if splits.scatter_starts is None:
        if sum(sizes) != total:
            raise ValueError(f"scatter_splits must add up to scatter_dim size {total}, got {list(sizes)}")
        return parts_of_sizes(sizes)
    starts = _checked(name, splits.scatter_starts, group_size)
    for start, size in zip(starts, sizes, strict=True):
        if start + size > total:
            raise ValueError(f"scatter_ranges must end within scatter_dim size {total}, got {start} + {size}")
    return Parts(starts, sizes, total)


def _checked(name: str, sizes: Sequence[int], group_size: int) -> tuple[int, ...]:
    if len(sizes) != group_size:
        raise ValueError(f"{name} must have one entry per rank, {group_size}, got {len(sizes)}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"{name} must be at least 0, got {list(sizes)}")
    return tuple(sizes)


def _is_even(parts: Parts) -> bool:
    if any(isinstance(size, torch.SymInt) for size in (*parts.starts, *parts.sizes, parts.total)):
        blocks = all(_statically(size * len(parts.sizes) == parts.total) for size in parts.sizes)
        return blocks and all(_statically(a == b) for a, b in zip(parts.starts, _starts(parts.sizes), strict=True))
    return parts.is_even


def is_divisible(size: int, group_size: int) -> bool:
    """Whether blocks of one size are known to make up a dim. A symbol may not tell: one graph then is for all sizes."""
    return _statically(size % group_size == 0)


def _statically(fact: Any) -> bool:
    """Whether a fact is true for all sizes that its symbols stand for. No guard is added."""
    if isinstance(fact, bool):
        return fact
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # half a second

    return statically_known_true(fact)


def _least(a: int, b: int) -> int:
    return torch.sym_min(a, b) if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt) else min(a, b)


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(sizes[:-1], initial=0))
