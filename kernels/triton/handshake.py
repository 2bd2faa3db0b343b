"""Signal and wait as kernels of one program: for data that are copied or computed elsewhere, and for empty rounds."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.primitives import (
    end_round,
    must_poison,
    next_push,
    next_round,
    poison,
    signal_peers,
    wait_all,
    wait_source,
)


@triton.jit(do_not_specialize=["rank"])
def begin_push_kernel(
    segments_ptr,  # [R] addresses of the ranks' segments
    rank,
    LAYOUT: tl.constexpr,
):
    """Run before the first copy of a round to a peer: copies cannot tell the peers of a failure."""
    next_push(segments_ptr, rank, 0, LAYOUT)


@triton.jit(do_not_specialize=["first", "count", "fingerprint", "rank"])
def signal_kernel(
    segments_ptr,  # [R] addresses of the ranks' segments
    first,
    count,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
):
    """Signal ``count`` ranks from dst_rank ``first`` on: the stream's earlier writes are there."""
    signal_peers(next_round(segments_ptr, rank, fingerprint), first, count, LAYOUT)


@triton.jit(do_not_specialize=["src_rank", "fingerprint", "rank"])
def wait_source_kernel(
    segments_ptr,  # [R] addresses of the ranks' segments
    src_rank,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
):
    """Wait, bounded, for src_rank's signal, so that later work on the stream may read its chunk.

    This judges nothing and ends nothing: finish_kernel does, after the reads.
    """
    round = next_round(segments_ptr, rank, fingerprint)
    wait_source(src_rank, round, round.epoch < 0, LAYOUT)


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def finish_kernel(
    out_ptr,  # contiguous; None: nothing was read
    numel,
    segments_ptr,  # [R] addresses of the ranks' segments
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    END_ROUND: tl.constexpr,
):
    """Set out to NaN if any of it may be wrong. Run after the last read of a slot on this stream.

    The kernel waits, bounded, for the signal of each src_rank's pack_kernel or signal_kernel.
    """
    round = next_round(segments_ptr, rank, fingerprint)
    failed = wait_all(round, LAYOUT)
    failed = must_poison(round, failed, LAYOUT)
    if out_ptr is not None:
        for first in range(0, tl.where(failed, tl.cast(numel, tl.int64), 0), BLOCK):
            offsets = tl.arange(0, BLOCK)
            tl.store(out_ptr + first + offsets, poison(out_ptr.dtype.element_ty), offsets < numel - first)
    if END_ROUND:
        end_round(round)
