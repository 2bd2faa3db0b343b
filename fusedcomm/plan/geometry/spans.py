"""The elements of a chunk as Spans, sets of indices of each rank that five integers describe, for hosts and kernels."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fusedcomm.kernels.triton.bundles import Span


@dataclass(frozen=True)
class ChunkSpans:
    """One round of an Exchange. p is the other rank: dst_rank of a push, src_rank of a gather.

    push     chunk[b, i, j] = x[batches(b, p) * M + rows(i, p)] @ w[batches(b, p)][:, columns(j, p)]
    gather   y[batches(b, p) * M + rows(i, p)] += chunk[b, i, k] * w[batches(b, p)][columns(k, p)]   summed over k
    pack     chunk[i] = packed.flatten()[pack(i, dst_rank)]         where a tensor is sent as it is
    unpack   unpacked.flatten()[unpack(i, src_rank)] = chunk[i]     where the chunk ends up
    """

    batches: Span
    rows: Span
    columns: Span
    pack: Span
    unpack: Span


@dataclass(frozen=True)
class RoundSpans(ChunkSpans):
    """Spans of all peers. ``by_peer``: where chunks differ in size; the others are then Spans of the largest."""

    by_peer: tuple[ChunkSpans, ...] = ()

    @property
    def chunk_numel(self) -> int:
        """The number of elements of a chunk, or of the largest: chunks lie that far apart in a slot."""
        return self.unpack.size

    def at(self, peer: int) -> ChunkSpans:
        """The Spans that hold for a peer."""
        return self.by_peer[peer] if self.by_peer else self


@dataclass(frozen=True)
class Range:
    """A part of one dim of a chunk."""

    start: int
    size: int


def span(sizes: Sequence[int], split_dim: int | None, step: int, box: Sequence[Range]) -> Span:
    """Flat indices of ``box`` in a contiguous tensor of ``sizes``, with a block every ``step`` of ``split_dim``.

    ``box`` has one Range per dim, relative to the peer's block. A dim before the first Range of more than one index has
    a single index, and a dim after it is whole: that is why five integers are enough.
    """
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    start = sum(r.start * stride for r, stride in zip(box, strides, strict=True))
    lengths = [r.size for r in box]
    size = math.prod(lengths)
    if split_dim is None:
        return Span(size, start, max(size, 1), 0, 0)
    peer_stride = step * strides[split_dim]
    inner = math.prod(lengths[split_dim:])
    if size in (0, inner):
        return Span(size, start, max(size, 1), 0, peer_stride)
    return Span(size, start, inner, sizes[split_dim] * strides[split_dim], peer_stride)


def moved(box: Sequence[Range], dim: int | None, start: int) -> list[Range]:
    """``box`` in a tensor that has the block from ``start`` of ``dim`` on."""
    return [Range(r.start + start, r.size) if i == dim else r for i, r in enumerate(box)]


def clip(box: Sequence[Range], block: Sequence[int]) -> list[Range]:
    """Intersect ``box`` with a block, which may be smaller than the block that it was cut from."""
    starts = [min(r.start, size) for r, size in zip(box, block, strict=True)]
    return [Range(start, min(r.size, size - start)) for start, r, size in zip(starts, box, block, strict=True)]


def bias_of(bias: Tensor | None, run: Span) -> Tensor | None:
    """The bias of a run of whole rows, or of the run's columns where it is within a row."""
    if bias is None or run.size >= bias.numel():
        return bias
    return bias.narrow(0, run.start % bias.numel(), run.size)


def block_shape(shape: Sequence[int], split_dim: int, group_size: int) -> list[int]:
    """``shape`` with ``split_dim`` cut into ``group_size`` blocks: the shape of one block."""
    block = list(shape)
    block[split_dim] = block[split_dim] // group_size
    return block


def boxes(lead: list[int], row_numel: int, max_numel: int) -> Iterator[list[Range]]:
    """Cut ``lead`` into as few boxes as possible of at most ``max_numel`` elements.

    A box has single indices in the first dims, a part of one dim, and all of the rest.
    """
    whole = [Range(0, size) for size in lead]
    if math.prod(lead) * row_numel <= max_numel:
        yield whole
        return
    cut_dim = next(d for d in range(len(lead)) if math.prod(lead[d + 1 :]) * row_numel <= max_numel)
    step = max_numel // (math.prod(lead[cut_dim + 1 :]) * row_numel)
    for outer in range(math.prod(lead[:cut_dim])):
        singles = [Range(i, 1) for i in _unravel(outer, lead[:cut_dim])]
        for start in range(0, lead[cut_dim], step):
            yield [*singles, Range(start, min(step, lead[cut_dim] - start)), *whole[cut_dim + 1 :]]


def _unravel(index: int, sizes: list[int]) -> list[int]:
    coords = []
    for size in reversed(sizes):
        index, i = divmod(index, size)
        coords.append(i)
    return coords[::-1]
