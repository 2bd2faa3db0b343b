"""Geometry of a call: which elements of a matmul's tensor go between which ranks, and where they lie on either side.

A matmul is next to a collective on one of its tensors: the result that it pushes, or the input that it gathers. That
tensor is cut into one block per rank along ``split_dim``. A block, or what one round takes of it, is a chunk:

    push     y = x @ w     chunk p of y goes to rank p, which puts it where ``unpack`` says
    gather   y = x @ w     chunk p of x comes from rank p, which takes it from where ``pack`` says

Both directions use the same Spans: in a push the sender reads them, in a gather the receiver. `geometry.shapes` makes
the Exchange of each op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fusedcomm.geometry.spans import Range, Span, block_shape, boxes, span

FEW_ROWS = 128  # a matmul of fewer rows takes longer to read w than to compute, on CPUs and GPUs alike
_MOST_PIECES, _LEAST_PIECE = 16, 8 << 20  # bytes; chosen, not measured
LEAST_COPIED = 1 << 20  # bytes of a run that copy engines send for `fused`: they take microseconds to begin; chosen


def num_pieces(chunk_bytes: int) -> int:
    """In how many rounds a GPU gathers chunks whose matmul needs all sources: the first one alone is not hidden."""
    return max(1, min(_MOST_PIECES, chunk_bytes // _LEAST_PIECE))


@dataclass(frozen=True)
class RoundSpans:
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

    @property
    def chunk_numel(self) -> int:
        return self.unpack.size


@dataclass(eq=False)
class Exchange:
    """A call that has been checked and cut into chunks and rounds. Sizes may be symbolic until ``rounds`` is called."""

    shape: list[int]  # the matmul's tensor next to the collective: [batches, rows, columns], each may be many dims
    num_lead: int  # dims before the columns
    num_batch_dims: int  # batch dims of w
    split_dim: int  # the dim of ``shape`` that is cut into one block per rank
    packed: tuple[list[int], int | None]  # shape of what is sent, and the dim cut into one block per dst_rank
    unpacked: tuple[list[int], int | None]  # shape of what arrives, and the dim cut into one block per src_rank
    group_size: int
    out_shapes: list[list[int]]  # shapes of the results
    k: int
    gathers: bool = False  # the matmul takes the tensor of ``shape``; otherwise it makes it
    facts: tuple[Any, ...] = ()  # what else all ranks must agree on: part of the fingerprint
    arguments: dict[str, Any] = field(default_factory=dict)  # what the Exchange was made from, for people to read
    _rounds: dict[int, list[RoundSpans]] = field(default_factory=dict)

    @property
    def out_shape(self) -> list[int]:
        return self.out_shapes[0]

    @cached_property
    def block(self) -> list[int]:
        """The shape of one rank's part."""
        return block_shape(self.shape, self.split_dim, self.group_size)

    @cached_property
    def num_batches(self) -> int:
        """The number of matrices in a batched w; 1 for [K, N]."""
        return math.prod(self.shape[: self.num_batch_dims])

    @cached_property
    def num_rows(self) -> int:
        """The number of rows per matrix of w."""
        return math.prod(self.shape[self.num_batch_dims : self.num_lead])

    @cached_property
    def row_numel(self) -> int:
        """The number of elements that one row of the matmul adds to one chunk."""
        return math.prod(self.block[self.num_lead :])

    @cached_property
    def chunk_numel(self) -> int:
        return math.prod(self.block)

    @cached_property
    def sent_run(self) -> int:
        """The number of consecutive elements that go to one rank, where a tensor is sent as it is."""
        sizes, split_dim = self.packed
        return self.chunk_numel if split_dim is None else math.prod(sizes[split_dim:]) // self.group_size

    @property
    def splits_columns(self) -> bool:
        return self.split_dim >= self.num_lead

    @property
    def splits_rows(self) -> bool:
        """Whether every chunk needs all of w. (Parts of a batched w do not.)"""
        return self.num_batch_dims <= self.split_dim < self.num_lead

    @property
    def column_run(self) -> int:
        """The number of consecutive columns of one rank, where columns are split."""
        return math.prod(self.block[self.split_dim :])

    @property
    def few_rows(self) -> bool:
        """Whether the matmul of one chunk would take as long as that of all chunks, which reads w only once."""
        return self.splits_rows and self.num_rows < FEW_ROWS * self.group_size

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What must be equal for two calls of one op to be the same on the wire."""
        tensors = (tuple(self.shape), tuple(self.packed[0]), tuple(self.unpacked[0]))
        dims = (self.num_lead, self.num_batch_dims, self.split_dim, self.packed[1], self.unpacked[1])
        return tensors, dims, self.k, self.facts

    def rounds(self, max_chunk_numel: int) -> list[RoundSpans]:
        """Cut every chunk alike, along its leading dims, into parts of at most ``max_chunk_numel`` elements."""
        if max_chunk_numel not in self._rounds:
            cut = boxes(self.block[: self.num_lead], self.row_numel, max_chunk_numel)
            self._rounds[max_chunk_numel] = [self._round(box) for box in cut]
        return self._rounds[max_chunk_numel]

    def piece_numel(self, itemsize: int, max_chunk_numel: int) -> int:
        """The size of a chunk with which the rounds are the pieces of `num_pieces`, or as many more as must be."""
        return min(max_chunk_numel, -(-self.chunk_numel // num_pieces(self.chunk_numel * itemsize)))

    def _round(self, box: list[Range]) -> RoundSpans:
        box = box + [Range(0, size) for size in self.block[self.num_lead :]]
        nb, nl = self.num_batch_dims, self.num_lead

        def part(lo: int, hi: int) -> Span:
            split_dim = self.split_dim - lo if lo <= self.split_dim < hi else None
            return span(self.shape[lo:hi], split_dim, self.group_size, box[lo:hi])

        return RoundSpans(
            batches=part(0, nb),
            rows=part(nb, nl),
            columns=part(nl, len(self.shape)),
            pack=self._side(self.packed, box),
            unpack=self._side(self.unpacked, box),
        )

    def _side(self, side: tuple[Sequence[int], int | None], box: list[Range]) -> Span:
        sizes, split_dim = side
        return span(sizes, split_dim, self.group_size, box)
