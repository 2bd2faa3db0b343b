"""Kernel arguments that belong together. The host fills these bundles, and device code reads their fields.

Bundles for parameters in capitals are constexprs: they are compiled in. ``rank`` and ``fingerprint`` stay out of
bundles, because Triton can be told only of whole arguments that it must not specialize on them. The host needs this
file before any launch, so it does not import Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class SegmentLayout(NamedTuple):
    """LAYOUT: where things lie in each rank's segment, in bytes (fusedcomm.memory.segment.HeaderLayout)."""

    group_size: int
    num_slots: int
    counters: int  # [R] words: parts of each dst_rank's chunk that are stored
    flags: int  # [num_slots, R] words
    header_bytes: int


class Span(NamedTuple):
    """Indices of one peer: ``start + peer * peer_stride + (i // inner) * outer_stride + i % inner``, 0 <= i < size.

    If R * size indices are cut as (outer, R, inner), peer p owns [:, p, :]. A Span is that set, or a part of it.
    """

    size: int
    start: int
    inner: int
    outer_stride: int
    peer_stride: int

    @property
    def outer(self) -> int:
        return self.size // self.inner

    def first(self, peer: int) -> int:
        return self.start + peer * self.peer_stride

    def view(self, t: Tensor, dim: int, peer: int) -> Tensor:
        """The peer's indices of ``dim`` as two dims (outer, inner); never a copy."""
        shape, stride = list(t.shape), list(t.stride())
        step = stride[dim]
        shape[dim : dim + 1] = [self.outer, self.inner]
        stride[dim : dim + 1] = [self.outer_stride * step, step]
        return t.as_strided(shape, stride, t.storage_offset() + self.first(peer) * step)


class Spans(NamedTuple):
    """Batches, rows and columns of a peer's chunk (fusedcomm.plan.geometry.exchange.RoundSpans)."""

    batches: Span
    rows: Span
    columns: Span


class Reduced(NamedTuple):
    """The run of a result's elements summed in one round, from a chunk of each source."""

    size: int
    start: int
    chunk_numel: int  # how far apart chunks lie in a slot


class Sizes(NamedTuple):
    """The sizes of a matmul, [num_batches, M, K] @ [num_batches, K, N], and of its slots."""

    M: int
    N: int
    K: int
    w_stride_batch: int
    w_stride_k: int
    w_stride_n: int
    chunk_numel: int
    slot_bytes: int


class TileConfig(NamedTuple):
    """TILE: a CUDA block computes [block_m, block_n] in steps of block_k, num_stages of them in flight.

    ``halves``: the result is stored in two halves, which takes fewer registers and less shared memory.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    halves: bool = False


class CopyConfig(NamedTuple):
    """TILE: one CUDA block copies block_runs runs of block_inner elements at a time."""

    block_runs: int
    block_inner: int
    num_warps: int


class Packed(NamedTuple):
    """TRAITS: static facts about the packed chunks."""

    own: bool  # this rank's chunk too; otherwise it is taken from the tensor, and only signalled
    by_chunk: bool  # each chunk is signalled when it is there; otherwise all are behind the last


class Unpacked(NamedTuple):
    """TRAITS: static facts about the unpacked chunks."""

    end_round: bool  # no kernel of this round follows
    own: bool  # this rank's chunk is in the slot too; otherwise it is in its place


class RoutingRows(NamedTuple):
    """ROWS: where the parts of a routing tensor begin (fusedcomm.plan.routing)."""

    overflow: int
    ends: int
    totals: int
    sizes: int  # 3 rows
    returned: int  # [R], then nothing
    counts: int  # R rows, then R of kept counts, first and filled rows, R of shifts, places, indices


class Piece(NamedTuple):
    """PIECE: some of each rank's experts."""

    experts: int  # of a rank
    begin: int
    end: int


class Scaled(NamedTuple):
    """TRAITS.scaled: which elements of float8 operands share a scale."""

    by_row: bool  # each row of x has its own; otherwise all share one
    packed: bool  # which lie behind the row in a gathered chunk
    by_batch: bool  # each matrix of w has its own
    block_k: int  # of K; 0: all of it
    block_n: int  # columns of w; 0: all of them
    in_slots: str  # dtype of a slot's elements, by its name in triton.language
    fast: bool  # sums have the tensor cores' bits


class Traits(NamedTuple):
    """TRAITS: static facts about a matmul."""

    by_tma: bool  # x and w are descriptors, not pointers
    w_transposed: bool  # K is contiguous, not N
    # Tiles cross the ends of runs of consecutive indices (0), or end there (1), or there is one run (2).
    rows_in_runs: int
    columns_in_runs: int
    even_k: bool  # no block of K ends early
    allow_tf32: bool
    split_k: bool = False  # the ranks' chunks are parts of K, not of the rows
    own: bool = True  # a gather takes this rank's chunk too; otherwise its rows of the result are there
    end_round: bool = False  # no kernel of this round follows
    one_batch: bool = False
    shift: int = 0  # the first tile of a run of columns begins up to so many before it, at a multiple of shift + 1 in w
    # Addresses are multiples of so many elements: Triton cannot infer it from loaded numbers.
    k_unit: int = 1  # K, and the columns of a gathered chunk
    n_unit: int = 1  # N, and the columns of a pushed chunk
    w_unit: int = 1  # w's strides
    scaled: Scaled | None = None  # x and w are float8


class Round(NamedTuple):
    """A round on the device: the ranks' segments [R], this rank's own, and the parts of its flags."""

    segments_ptr: Any
    segment: Any
    rank: Any
    epoch: Any
    fingerprint: Any


class Scales(NamedTuple):
    """Pointers to the scales of x and of w, or None."""

    x: Any
    w: Any


class Operands(NamedTuple):
    """The parts of x and w that a tile multiplies.

    x and w are descriptors of [num_batches * M, K] and [num_batches * K, N] ([num_batches * N, K] if w is transposed),
    or pointers; the x of a gather is a descriptor of slots [num_slots, rows, K]. A descriptor of w may have a dim in
    front for the batches, or for each batch's parts of K, so that elements beyond K of one are zeros. Where a mask is
    false, loads can be anything.
    """

    x: Any
    x_rows: Any  # the first row (descriptor), or slot and first row, or all [BLOCK_M]
    x_mask: Any
    w: Any
    w_row: Any  # the first row of this batch in w's descriptor, or its index in the dim in front
    w_columns: Any  # the first column (descriptor), or all [BLOCK_N]
    w_mask: Any
    scales: Scales  # those that change along K
