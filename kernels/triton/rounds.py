"""A round on the device: its slot, arrivals, failure and end."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.bundles import Round
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
    poll,
    signal,
    wait,
    word,
)


@triton.jit
def next_round(segments_ptr, rank, fingerprint):
    """The round after the last one that has ended.

    The epoch is read on the device, so that a replayed graph moves on.
    """
    segment = tl.load(segments_ptr + rank)
    epoch = tl.load(word(segment, EPOCH)) + 1
    return Round(segments_ptr, segment, rank, epoch, fingerprint)


@triton.jit
def next_push(segments_ptr, rank, fingerprint, LAYOUT: tl.constexpr):
    """The round to push. Every program calls this before its first store to a peer.

    Round e overwrites the slot of round e - 2. That is safe once every peer has signalled e - 1. A rank that failed in
    round f never waited, so it first warns peers still reading f - 1.
    """
    give_up_earlier(segments_ptr, rank, LAYOUT)
    return next_round(
        segments_ptr, rank, fingerprint
    )  # loads again: words held over a branch cost main loops registers


@triton.jit
def signal_peer(round, dst_rank, LAYOUT: tl.constexpr):
    """Tell dst_rank that its chunk of the round is there: stores of this program, and stores that it has seen."""
    flags = flags_of(tl.load(round.segments_ptr + dst_rank), round.epoch, LAYOUT)
    signal(flags + round.rank, flag_value(round.epoch, round.fingerprint))


@triton.jit
def signal_peers(round, first, count, LAYOUT: tl.constexpr):
    """`signal_peer` of ``count`` ranks from dst_rank ``first`` on, all at once: each alone would wait for a release."""
    steps = tl.arange(0, triton.next_power_of_2(LAYOUT.group_size))
    segments = tl.load(round.segments_ptr + (first + steps) % LAYOUT.group_size, steps < count, other=0)
    values = tl.zeros_like(segments) + flag_value(round.epoch, round.fingerprint)
    signal(flags_of(segments, round.epoch, LAYOUT) + round.rank, values, steps < count)


@triton.jit
def report(round, dst_rank, num_stored, num_parts, LAYOUT: tl.constexpr):
    """Count parts of dst_rank's chunk that this program has stored. The program that completes the chunk signals it.

    Each program's release and the last one's acquire are on the same word, so that the signal
    covers the stores of all.
    """
    counter = word(tl.load(round.segments_ptr + round.rank), LAYOUT.counters) + dst_rank
    block_barrier()  # the stores of all threads come before the release of one
    before = tl.atomic_add(counter, tl.cast(num_stored, tl.int64), sem="acq_rel", scope="gpu")
    if before + num_stored == num_parts:
        tl.store(counter, 0)  # for the next round, a later kernel
        signal_peer(round, dst_rank, LAYOUT)


@triton.jit
def report_all(round, LAYOUT: tl.constexpr):
    """Count the programs that have stored their parts of all chunks. The last one signals all ranks."""
    counter = word(tl.load(round.segments_ptr + round.rank), LAYOUT.counters)
    block_barrier()
    before = tl.atomic_add(counter, tl.cast(1, tl.int64), sem="acq_rel", scope="gpu")
    if before + 1 == tl.num_programs(0):
        tl.store(counter, 0)
        signal_peers(round, round.rank, LAYOUT.group_size, LAYOUT)


@triton.jit
def slot_of(segment, epoch, slot_bytes, LAYOUT: tl.constexpr, DTYPE: tl.constexpr):
    return in_segment(segment, LAYOUT.header_bytes + (epoch % LAYOUT.num_slots) * slot_bytes, DTYPE)


@triton.jit
def source_rank(step, rank, LAYOUT: tl.constexpr):
    """fusedcomm.memory.workspace.sources_of: own data first, then in the peers' order of sends."""
    return (rank + LAYOUT.group_size - step) % LAYOUT.group_size


@triton.jit
def wait_source(src_rank, round, failed, LAYOUT: tl.constexpr):
    """Wait, bounded, for src_rank's signal. Returns whether the round has failed by now; if it had, looks only once."""
    flag = wait(flags_of(round.segment, round.epoch, LAYOUT) + src_rank, round, failed, LAYOUT)
    return failed | (flag != flag_value(round.epoch, round.fingerprint))


@triton.jit
def all_there(round, LAYOUT: tl.constexpr):
    """Whether every source has signalled, by one look at all flags: as if `wait_source` had been called for each."""
    RANKS: tl.constexpr = triton.next_power_of_2(LAYOUT.group_size)
    ranks = tl.arange(0, RANKS)
    mask = ranks < LAYOUT.group_size
    flags = poll(flags_of(round.segment, round.epoch, LAYOUT) + ranks, mask)
    missing = tl.max((mask & (flags != flag_value(round.epoch, round.fingerprint))).to(tl.int32), axis=0)
    block_barrier()  # the loads of all threads come after the acquires of some
    return missing == 0


@triton.jit
def wait_all(round, LAYOUT: tl.constexpr):
    """Wait for every source. Returns whether the round has failed."""
    failed = round.epoch < 0
    if not all_there(round, LAYOUT):
        for step in range(LAYOUT.group_size):
            failed = wait_source(source_rank(step, round.rank, LAYOUT), round, failed, LAYOUT)
    return failed


@triton.jit
def must_poison(round, failed, LAYOUT: tl.constexpr):
    """Whether this program's results may be wrong, asked after its last read. If so, all ranks are told."""
    failed = failed | is_broken(round, LAYOUT)
    if failed:
        fail(round, LAYOUT)
    return failed


@triton.jit
def end_round(round):
    """Called by every program of the kernel that ends a round, after its last read; the last one counts the epoch.

    Each program must have waited for every source, so that all have signalled when the epoch is counted.
    """
    block_barrier()  # the reads of all threads come before the arrival of one
    arrivals = tl.atomic_add(word(round.segment, ARRIVALS), tl.cast(1, tl.int64), sem="acq_rel", scope="gpu")
    if arrivals + 1 == tl.num_programs(0):
        tl.store(word(round.segment, ARRIVALS), 0)
        tl.store(word(round.segment, EPOCH), round.epoch)
