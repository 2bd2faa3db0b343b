"""A round on the device: which slot, who has arrived, what a failure leaves behind, and the end."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.primitives import (
    ARRIVALS,
    EPOCH,
    block_barrier,
    fail,
    flag_value,
    flags_of,
    give_up_earlier,
    in_segment,
    is_broken,
    signal,
    wait,
    word,
)


@triton.jit
def next_round(segments_ptr, rank, fingerprint):
    """The round after the last one that has ended, as the functions below take it.

    The epoch is read on the device, so that a replayed graph moves on.
    """
    segment = tl.load(segments_ptr + rank)
    epoch = tl.load(word(segment, EPOCH)) + 1
    return segments_ptr, segment, rank, epoch, fingerprint


@triton.jit
def next_push(segments_ptr, rank, GROUP_SIZE: tl.constexpr):
    """The epoch of the round to push. Every program calls this before its first store to a peer.

    Round e overwrites the slot of round e - 2. That is safe once every peer has signalled e - 1. A rank that failed in
    round f never waited, so it first warns peers still reading f - 1.
    """
    segment = tl.load(segments_ptr + rank)
    last_epoch = word(segment, EPOCH)
    give_up_earlier(segments_ptr, segment, rank, tl.load(last_epoch), GROUP_SIZE)
    return tl.load(last_epoch) + 1  # loaded again: held over the branch, it costs main loops a register


@triton.jit
def report(
    call,  # (segments_ptr, rank, epoch, fingerprint, parts of a chunk)
    dst_rank,
    num_stored,
    COUNTERS: tl.constexpr,
    FLAGS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
):
    """Count parts of dst_rank's chunk that this program has stored. The program that completes the chunk signals it.

    Each program's release and the last one's acquire are on the same word, so that the signal
    covers the stores of all.
    """
    segments_ptr, rank, epoch, fingerprint, num_parts = call
    counter = word(tl.load(segments_ptr + rank), COUNTERS) + dst_rank
    block_barrier()  # the stores of all threads come before the release of one
    before = tl.atomic_add(counter, tl.cast(num_stored, tl.int64), sem="acq_rel", scope="gpu")
    if before + num_stored == num_parts:
        tl.store(counter, 0)  # for the next round, a later kernel
        flags = flags_of(tl.load(segments_ptr + dst_rank), epoch, FLAGS, GROUP_SIZE, NUM_SLOTS)
        signal(flags + rank, flag_value(epoch, fingerprint))


@triton.jit
def slot_of(segment, epoch, slot_bytes, HEADER_BYTES: tl.constexpr, NUM_SLOTS: tl.constexpr, DTYPE: tl.constexpr):
    return in_segment(segment, HEADER_BYTES + (epoch % NUM_SLOTS) * slot_bytes, DTYPE)


@triton.jit
def source_rank(step, rank, GROUP_SIZE: tl.constexpr):
    """fusedcomm.runtime.workspace.sources_of: own data first, then in the order in which the peers send."""
    return (rank + GROUP_SIZE - step) % GROUP_SIZE


@triton.jit
def wait_source(src_rank, round, failed, FLAGS: tl.constexpr, GROUP_SIZE: tl.constexpr, NUM_SLOTS: tl.constexpr):
    """Wait, bounded, for src_rank's signal. Returns whether the round has failed by now; if it had, looks only once."""
    _, segment, rank, epoch, fingerprint = round
    flags = flags_of(segment, epoch, FLAGS, GROUP_SIZE, NUM_SLOTS)
    flag = wait(flags + src_rank, segment, rank, epoch, failed, GROUP_SIZE)
    return failed | (flag != flag_value(epoch, fingerprint))


@triton.jit
def wait_all(round, FLAGS: tl.constexpr, GROUP_SIZE: tl.constexpr, NUM_SLOTS: tl.constexpr):
    """Wait for every source. Returns whether the round has failed."""
    failed = round[3] < 0
    for step in range(GROUP_SIZE):
        src_rank = source_rank(step, round[2], GROUP_SIZE)
        failed = wait_source(src_rank, round, failed, FLAGS, GROUP_SIZE, NUM_SLOTS)
    return failed


@triton.jit
def must_poison(round, failed, FLAGS: tl.constexpr, GROUP_SIZE: tl.constexpr, NUM_SLOTS: tl.constexpr):
    """Whether what this program has written may be wrong, asked after its last read. If so, all ranks are told."""
    segments_ptr, segment, rank, epoch, fingerprint = round
    failed = failed | is_broken(segment, rank, epoch, GROUP_SIZE)
    if failed:
        fail(segments_ptr, segment, rank, epoch, fingerprint, FLAGS, GROUP_SIZE, NUM_SLOTS)
    return failed


@triton.jit
def end_round(round):
    """Called by every program of the kernel that ends a round, after its last read; the last one counts the epoch.

    Each program must have waited for every source, so that all have signalled when the epoch is counted.
    """
    segment, epoch = round[1], round[3]
    block_barrier()  # the reads of all threads come before the arrival of one
    arrivals = tl.atomic_add(word(segment, ARRIVALS), tl.cast(1, tl.int64), sem="acq_rel", scope="gpu")
    if arrivals + 1 == tl.num_programs(0):
        tl.store(word(segment, ARRIVALS), 0)
        tl.store(word(segment, EPOCH), epoch)
