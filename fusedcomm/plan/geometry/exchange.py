"""Geometry of a call: which elements of a matmul's tensor go between which ranks, and where they lie on either side.

A matmul is next to a collective on one of its tensors: the result that it pushes, or the input that it gathers. That
tensor is cut into one block per rank along ``split_dim``. A block, or its part in one round, is a chunk:

    push     y = x @ w     chunk p of y goes to rank p, which puts it where ``unpack`` says
    gather   y = x @ w     chunk p of x comes from rank p, which takes it from where ``pack`` says

Both directions use the same Spans: in a push the sender reads them, in a gather the receiver. `geometry.shapes` makes
the Exchange of each op. Where parts differ in size, each peer has Spans of its own, and common decisions are made by an
Exchange with all parts as large as the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fusedcomm.kernels.triton.bundles import Span
from fusedcomm.plan.geometry.cut import Cut
from fusedcomm.plan.geometry.spans import ChunkSpans, Range, RoundSpans, block_shape, boxes, clip, moved, span

FEW_ROWS = 128  # a matmul of fewer rows takes longer to read w than to compute, on CPUs and GPUs alike
_TILE_ROWS = 64  # of the kernels of `fused`
FEW_COLUMNS = 32  # likewise x, on CPUs: with 8 columns a rank chunks took twice the time of one matmul
_MOST_PIECES, _LEAST_PIECE = 16, 8 << 20  # bytes; chosen, not measured
MIN_RUN = 128  # interleaved runs this long or longer are multiplied in place, shorter ones are gathered first
ALIGNED = 16  # bytes that NCCL moves at once
_MOST_KEPT = 256  # rounds that are kept for the next call: their Spans take kilobytes each
LEAST_COPIED = 1 << 20  # bytes of a run that copy engines send for `fused`: they take microseconds to begin; chosen


def num_pieces(chunk_bytes: int) -> int:
    """Rounds of a GPU's call whose other half comes behind all chunks: that of one is hidden by the next one's."""
    return max(1, min(_MOST_PIECES, chunk_bytes // _LEAST_PIECE))


def aligned_numel(numel: int, itemsize: int) -> int:
    """``numel`` rounded up to ALIGNED bytes."""
    at_once = ALIGNED // itemsize
    return -(-numel // at_once) * at_once


@dataclass(eq=False)
class Exchange:
    """A call that has been checked and cut into chunks and rounds. Sizes may be symbolic until ``rounds`` is called."""

    shape: list[int]  # the matmul's tensor next to the collective: [batches, rows, columns], each may be many dims
    num_lead: int  # dims before the columns
    num_batch_dims: int  # batch dims of w
    split_dim: int  # the dim of ``shape`` that is cut into one block per rank
    packed: tuple[list[int], int | None]  # sent shape, and its dim cut into one block per dst_rank
    unpacked: tuple[list[int], int | None]  # received shape, and its dim cut into one block per src_rank
    group_size: int
    out_shapes: list[list[int]]  # shapes of the results
    k: int
    gathers: bool = False  # the matmul takes the tensor of ``shape``; otherwise it makes it
    reduce_op: str | None = None
    cut: Cut | None = None  # where parts are not blocks of one size; then all other fields are of this rank
    largest: Exchange | None = None  # with a cut: every part is as large as the largest. The same on all ranks
    scaled: tuple[int, str] | None = None  # K with one scale, 0 for all, and dtype, where rows have scales behind them
    arguments: dict[str, Any] = field(default_factory=dict)  # the op's, for people to read
    _rounds: dict[int, list[RoundSpans]] = field(default_factory=dict)

    @property
    def out_shape(self) -> list[int]:
        return self.out_shapes[0]

    @property
    def for_all(self) -> Exchange:
        """The Exchange for common decisions, equal on all ranks."""
        return self.largest or self

    @cached_property
    def block(self) -> list[int]:
        """The shape of one rank's part, or of the largest."""
        return self.largest.block if self.largest else block_shape(self.shape, self.split_dim, self.group_size)

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
        """Elements that one row of the matmul adds to a chunk."""
        return math.prod(self.block[self.num_lead :])

    @cached_property
    def chunk_numel(self) -> int:
        return math.prod(self.block)

    @property
    def outer_numel(self) -> int:
        """Elements for one index of the gathered and the scattered dim."""
        return math.prod(
            size for dim, size in enumerate(self.shape) if dim not in (self._gather_dim, self._scatter_dim)
        )

    @cached_property
    def sent_run(self) -> int:
        """Consecutive elements for one rank where a tensor is sent as it is, in blocks."""
        sizes, split_dim = self.packed if self.gathers else (self.shape, self.split_dim)
        return self.chunk_numel if split_dim is None else math.prod(sizes[split_dim:]) // self.group_size

    @property
    def is_plain(self) -> bool:
        """Whether there is no matmul."""
        return self.num_lead == len(self.shape)

    @property
    def tells_k(self) -> bool:
        """Whether each rank finds the same dims of the exchanged x to make up K, by their product.

        A part of one does not show whether K begins with it, and an empty part hides the dims before it.
        """
        if self.is_plain or not self.gathers or self.cut is None:
            return True
        if self.cut.scattered is None or self._scatter_dim is None:
            return True
        sizes, dim = self.cut.scattered.sizes, self._scatter_dim
        if min(sizes) > 1 or dim == 0 or (min(sizes) == 1 and dim == len(self.shape) - 1):  # K never has the first dim
            return True
        return dim < self.num_lead and (1 not in sizes or math.prod(self.shape[dim + 1 : self.num_lead]) > 1)

    @property
    def splits_columns(self) -> bool:
        return self.split_dim >= self.num_lead

    @property
    def splits_rows(self) -> bool:
        """Whether every chunk needs all of w. (Parts of a batched w do not.)"""
        return self.num_batch_dims <= self.split_dim < self.num_lead

    @property
    def column_run(self) -> int:
        """Consecutive columns of one rank, where columns are split."""
        return math.prod(self.block[self.split_dim :])

    def adds_up(self, itemsize: int) -> bool:
        """Whether a gather along K can add one source after the other: the result must hold the sums, in float32, and a
        source's part of K should be long runs.
        """
        return itemsize == 4 and self.for_all.column_run >= MIN_RUN

    def takes_all(self, itemsize: int) -> bool:
        """Whether the matmul of a gather must wait for all sources, as its result cannot hold their sums."""
        return self.gathers and self.splits_columns and not self.adds_up(itemsize)

    def comes_in_pieces(self, itemsize: int) -> bool:
        """Whether a GPU has `num_pieces` rounds, by whatever algorithm: an all_reduce, whose sums are sent again, and a
        gather whose matmul needs all sources; there parts of one size have one, as no other call would meet theirs.
        """
        if self.gathers:
            return self.cut is not None and self.takes_all(itemsize)
        return self._gather_dim == self._scatter_dim

    @property
    def few_rows(self) -> bool:
        """Whether one chunk's matmul would take as long as all chunks' in one, as it reads w only once."""
        return self.splits_rows and self.num_rows < FEW_ROWS * self.group_size

    @property
    def multiplies_once(self) -> bool:
        """Whether a push computes all chunks in one matmul, as one for each would read w, or x, again and again."""
        return self.few_rows or (self.splits_columns and self.row_numel < FEW_COLUMNS)

    @property
    def by_cublas(self) -> bool:
        """Whether `fused` leaves the matmul to cuBLAS, before the sends of a push or behind the arrivals of a gather:
        tiles of its own kernels end with a peer's rows, and read w for every peer.
        """
        return self.few_rows and self.num_batches == 1 and self.num_rows <= _TILE_ROWS * self.group_size

    @cached_property
    def payload(self) -> tuple[Any, ...]:
        """The collective's facts: shape of the tensor that is sent, its gathered and its scattered dim, reduce_op."""
        if self.cut is not None:
            return *self.for_all.payload, self.cut.gathered, self.cut.scattered, self.gathers, *self._meaning
        sent = self.packed[0] if self.gathers else self.shape
        return tuple(sent), self._gather_dim, self._scatter_dim, self.reduce_op, *self._meaning

    def chunk_facts(self, with_dims: bool) -> tuple[Any, ...]:
        """The facts of the chunks alone: calls whose payloads differ in shape, and not in their chunks, share them.

        The blocks of an all_reduce are cut by its op, and rounds along the dims of a block.
        """
        runs = math.prod(self.shape[: self.split_dim]) if self._gather_dim == self._scatter_dim else 1
        dims = [size for size in self.block if size != 1] if with_dims else []
        return self.chunk_numel, runs, *dims, self.reduce_op, *self._meaning

    @property
    def _meaning(self) -> tuple[int | str, ...]:
        """Bytes of equal shapes may be values of several dtypes, with scales of several kinds."""
        return self.scaled or ()

    def rounds(self, max_chunk_numel: int) -> list[RoundSpans]:
        """Cut every chunk alike, along its leading dims, into parts of at most ``max_chunk_numel`` elements."""
        found = self._rounds.get(max_chunk_numel)
        if found is None:
            found = [self._round(box) for box in boxes(self.block[: self.num_lead], self.row_numel, max_chunk_numel)]
            if len(found) <= _MOST_KEPT:
                self._rounds[max_chunk_numel] = found
        return found

    def rounds_of(self, device_type: str, itemsize: int, max_chunk_numel: int) -> list[RoundSpans]:
        """The rounds of a call with a workspace."""
        if device_type == "cuda" and self.comes_in_pieces(itemsize):
            return self.pieces(num_pieces(self.chunk_numel * itemsize), max_chunk_numel)
        return self.rounds(max_chunk_numel)

    def pieces(self, num_pieces: int, max_chunk_numel: int | None = None) -> list[RoundSpans]:
        """``num_pieces`` rounds, or fewer where rows, which may be of several dims, do not divide, or more where chunks
        must be smaller.

        Asked for as many as it has found, it finds the same.
        """
        num_lead = max(1, min(self.num_lead, len(self.block) - 1))  # the last dim is a matmul's columns in other calls
        outer, rows = 1, 1
        for dim, size in enumerate(self.block[:num_lead]):
            if outer * size >= num_pieces:
                step = -(-size // max(1, num_pieces // outer))
                rows = step * math.prod(self.block[dim + 1 : num_lead])
                break
            outer *= size
        numel = rows * math.prod(self.block[num_lead:])
        return self.rounds(numel if max_chunk_numel is None else min(numel, max_chunk_numel))

    def _round(self, box: list[Range]) -> RoundSpans:
        box = box + [Range(0, size) for size in self.block[self.num_lead :]]
        if self.largest is not None:
            by_peer = tuple(self._peer_spans(box, peer) for peer in range(self.group_size))
            return replace(self.largest._round(box[: self.num_lead]), by_peer=by_peer)

        def side(sizes: Sequence[int], dim: int | None) -> Span:
            return span(sizes, dim, 0 if dim is None else sizes[dim] // self.group_size, box)

        matmul = self._matmul_spans(self.shape[self.split_dim] // self.group_size, box)
        return RoundSpans(*matmul, side(*self.packed), side(*self.unpacked))

    def _matmul_spans(self, step: int, box: Sequence[Range]) -> tuple[Span, Span, Span]:
        """The batches, rows and columns of ``box``, for blocks of peers every ``step`` of split_dim."""
        nb, nl = self.num_batch_dims, self.num_lead

        def part(lo: int, hi: int) -> Span:
            split_dim = self.split_dim - lo if lo <= self.split_dim < hi else None
            return span(self.shape[lo:hi], split_dim, step, box[lo:hi])

        return part(0, nb), part(nb, nl), part(nl, len(self.shape))

    @property
    def _gather_dim(self) -> int | None:
        return self.split_dim if self.gathers else self.unpacked[1]

    @property
    def _scatter_dim(self) -> int | None:
        return self.packed[1] if self.gathers else self.split_dim

    def _chunk_shape(self, src_rank: int | None, dst_rank: int | None) -> list[int]:
        """``shape`` with src_rank's part of the gathered dim, and dst_rank's of the scattered one."""
        sizes = list(self.shape)
        gathered, scattered = (None, None) if self.cut is None else self.cut[1:]
        for dim, parts, rank in (
            (self._gather_dim, gathered, src_rank),
            (self._scatter_dim, scattered, dst_rank),
        ):
            if dim is not None and parts is not None and rank is not None:
                sizes[dim] = parts.sizes[rank]
        return sizes

    def _peer_spans(self, box: list[Range], peer: int) -> ChunkSpans:
        """The Spans of the chunks to and from a peer, clipped to ``box``, a round's part of the largest chunk."""
        assert self.cut is not None
        rank, gathered, scattered = self.cut
        sent_shape = self._chunk_shape(rank, peer)
        sent, received = clip(box, sent_shape), clip(box, self._chunk_shape(peer, rank))
        first_from = gathered.starts[peer] if gathered else 0
        first_to = scattered.starts[peer] if scattered else 0
        block, first = (received, first_from) if self.gathers else (sent, first_to)
        (packed, pack_dim), (unpacked, dim) = self.packed if self.gathers else (sent_shape, None), self.unpacked
        block = moved(block, self.split_dim, first)
        return ChunkSpans(
            *self._matmul_spans(0, block),
            pack=span(packed, pack_dim, 0, moved(sent, pack_dim, first_to)),
            unpack=span(unpacked, dim, 0, moved(received, dim, first_from)),
        )
