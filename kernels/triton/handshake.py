"""Signal and wait as kernels of one program: for what is copied, not computed, and for rounds without data."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.primitives import (
    EPOCH,
    block_barrier,
    fail,
    flag_value,
    flags_of,
    is_broken,
    signal,
    wait,
    word,
)


@triton.jit(do_not_specialize=["first", "count", "fingerprint", "rank"])
def signal_kernel(
    segments_ptr,  # [R] addresses of the ranks' segments
    first,
    count,
    fingerprint,
    rank,
    FLAGS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_SLOTS: tl.constexpr = 2,
):
    """Signal ``count`` ranks from dst_rank ``first`` on: what the stream wrote before is there."""
    epoch = tl.load(word(tl.load(segments_ptr + rank), EPOCH)) + 1
    for step in range(count):
        dst_rank = (first + step) % GROUP_SIZE
        flags = flags_of(tl.load(segments_ptr + dst_rank), epoch, FLAGS, GROUP_SIZE, NUM_SLOTS)
        signal(flags + rank, flag_value(epoch, fingerprint))


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def wait_kernel(
    segments_ptr,  # [R] addresses of the ranks' segments
    fingerprint,
    rank,
    FLAGS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_SLOTS: tl.constexpr = 2,
):
    """Wait, bounded, for what signal_kernel of each src_rank signals; ends the round. No data are read."""
    segment = tl.load(segments_ptr + rank)
    epoch = tl.load(word(segment, EPOCH)) + 1
    flags = flags_of(segment, epoch, FLAGS, GROUP_SIZE, NUM_SLOTS)
    failed = epoch < 0
    for step in range(GROUP_SIZE):
        src_rank = (rank + GROUP_SIZE - step) % GROUP_SIZE
        flag = wait(flags + src_rank, segment, rank, epoch, failed, GROUP_SIZE)
        failed = failed | (flag != flag_value(epoch, fingerprint))
    if failed | is_broken(segment, rank, epoch, GROUP_SIZE):
        fail(segments_ptr, segment, rank, epoch, fingerprint, FLAGS, GROUP_SIZE, NUM_SLOTS)
    block_barrier()  # every thread has read the epoch
    tl.store(word(segment, EPOCH), epoch)
