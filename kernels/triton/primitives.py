"""The common parts of all kernels: signal, bounded wait, failure, a round, tile order, Span maps.

Control flow must be the same in all threads of a program, and two threads that load a word that a peer is about to
write, or read the clock, may see different values. So the condition of each branch comes from an atomic, which one
thread executes and Triton hands to the whole block, or from `any_thread`.
"""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.bundles import Round, Span, Spans
from fusedcomm.kernels.triton.ptx import (
    INTERPRET,
    acquired,
    any_thread,
    await_earlier_kernels,
    back_off,
    block_barrier,
    clock_ns,
    poll,
    start_next_kernel,
)

# The header of a segment, in bytes: fusedcomm.memory.segment.HeaderLayout, the parts that do not depend
# on group_size.
EPOCH = tl.constexpr(0)
ARRIVALS = tl.constexpr(8)
TIMEOUT = tl.constexpr(16)
RECORD = tl.constexpr(24)
CLAIM = tl.constexpr(32)
BROKEN = tl.constexpr(128)

FINGERPRINT_BITS = tl.constexpr(24)
KIND_BITS = tl.constexpr(8)
KIND = tl.constexpr(0xFF)
TIMED_OUT = tl.constexpr(1)
MISMATCHED = tl.constexpr(2)
BROKEN_BY_PEER = tl.constexpr(3)
ABANDONED = tl.constexpr(4)
ENDED = tl.constexpr(6)
RECORD_COMPLETE = tl.constexpr(2)
RECORD_WORDS = tl.constexpr(8)
POLLS = tl.constexpr(1 if INTERPRET.value else 16)  # of a flag between two looks at who has given up


@triton.jit
def tile_coords(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Column-major order inside bands of GROUP_M tile rows: the rows of a band stay in L2."""
    tiles_in_band = GROUP_M * num_n
    first_m = (tile // tiles_in_band) * GROUP_M
    band_m = min(num_m - first_m, GROUP_M)
    in_band = tile % tiles_in_band
    return first_m + in_band % band_m, in_band // band_m


@triton.jit
def in_units(number, UNIT: tl.constexpr):
    """``number``, a multiple of UNIT, so that Triton sees it: of arguments it infers only multiples of 16."""
    return number if UNIT == 1 else number // UNIT * UNIT


@triton.jit
def named(spans, UNIT: tl.constexpr):
    """The host's tuples of numbers as Spans; the columns' are multiples of UNIT.

    Triton 3.6 loses constants in tuples of tuples that are not made anew.
    """
    size, start, inner, outer_stride, peer_stride = spans[2]
    columns = Span(
        in_units(size, UNIT),
        in_units(start, UNIT),
        in_units(inner, UNIT),
        in_units(outer_stride, UNIT),
        in_units(peer_stride, UNIT),
    )
    return Spans(Span(*spans[0]), Span(*spans[1]), columns)


@triton.jit
def span_index(i, peer, span, ONE_RUN: tl.constexpr = False):
    """Offset of index i of a peer's part of a Span, 64 bits wide. A division takes a matmul's tile 100 ns."""
    first = tl.cast(span.start, tl.int64) + tl.cast(peer, tl.int64) * span.peer_stride
    if ONE_RUN:
        at = first + i
    else:
        run = i // span.inner
        at = first + tl.cast(run, tl.int64) * span.outer_stride + (i - run * span.inner)
    return at


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """fp32 rounded to DTYPE, to the nearest value, or to even."""
    if INTERPRET:
        value = _without_lost_bits(value, DTYPE)
    return value.to(DTYPE)


@triton.jit
def _without_lost_bits(value, DTYPE: tl.constexpr):
    """``value`` where the bits are 0 that the interpreter cuts off, as it does not round to bf16."""
    if DTYPE.is_bf16():
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = tl.where(value == value, nearest.to(tl.float32, bitcast=True), value)
    return value


@triton.jit
def in_segment(segment, offset, DTYPE: tl.constexpr):
    """Pointer to data ``offset`` bytes into a segment; both are multiples of 128."""
    return tl.multiple_of((segment + offset).to(tl.pointer_type(DTYPE)), 128)


@triton.jit
def word(segment, offset):
    """Pointer to the int64 word ``offset`` bytes into the segment at address ``segment``."""
    return (segment + offset).to(tl.pointer_type(tl.int64))


@triton.jit
def flag_value(epoch, fingerprint):
    return (epoch << FINGERPRINT_BITS) | fingerprint


@triton.jit
def flags_of(segment, epoch, LAYOUT: tl.constexpr):
    """Pointer to the flags of the slot of ``epoch``, one per src_rank."""
    return word(segment, LAYOUT.flags) + (epoch % LAYOUT.num_slots) * LAYOUT.group_size


@triton.jit
def poison(DTYPE: tl.constexpr):
    """The mark of a wrong result: NaN, in bytes that of float8 and of float32 scales; 0 of other integers."""
    if tl.uint8 == DTYPE:
        value = tl.cast(255, tl.uint8)
    elif DTYPE.is_int():
        value = tl.cast(0, DTYPE)
    else:
        value = tl.cast(float("nan"), tl.float32).to(DTYPE)
    return value


@triton.jit
def signal(flag_ptr, value, mask=None):
    """Release at system scope: an acquire of ``value`` sees all earlier writes of this block. One flag, or several.

    The barrier puts the stores of all threads before the release of the one that signals. The kernels here write peers'
    memory with ordinary stores only. A kernel that used TMA stores (the async proxy) would have to complete them first,
    in the thread that issued them (cp.async.bulk.wait_group 0).
    """
    block_barrier()
    tl.atomic_xchg(flag_ptr, tl.cast(value, tl.int64), mask, sem="release", scope="sys")


@triton.jit
def poll_broken(round, expired, LAYOUT: tl.constexpr):
    """Whether any rank has given up on this workspace by ``round``. If ``expired``, this rank gives it up too.

    A peer that failed in a later round has completed this one: its data are good.

    The block is told through memory that the clock has run out: ``expired`` may differ between threads, but the word
    that one of them writes does not.
    """
    RANKS: tl.constexpr = triton.next_power_of_2(LAYOUT.group_size)
    ranks = tl.arange(0, RANKS)
    value = tl.where((ranks == round.rank) & expired, TIMED_OUT, 0).to(tl.int64)
    mask = ranks < LAYOUT.group_size
    words = tl.atomic_or(word(round.segment, BROKEN) + ranks, value, mask=mask, sem="acquire", scope="sys")
    return tl.max((mask & given_up(words, round.epoch)).to(tl.int32), axis=0) != 0


@triton.jit
def given_up(words, epoch):
    """Whether broken[src] says so: it is kind | epoch << 8, or 0 while src_rank goes on."""
    return (words != 0) & ((words >> KIND_BITS) <= epoch)


@triton.jit
def fail(round, LAYOUT: tl.constexpr):
    """Judge why a wait failed. The first program to do so fills the record and breaks all ranks.

    A mismatch is judged before ``broken``: the peer that has found it too has broken this workspace already. A peer
    that has left a round, or has ended, will not signal again: that is the cause, not its silence. Nobody is to blame
    if the flag that this rank gave up on has come since.
    """
    segments_ptr, segment, rank, epoch, fingerprint = round
    GROUP_SIZE: tl.constexpr = LAYOUT.group_size
    RANKS: tl.constexpr = triton.next_power_of_2(GROUP_SIZE)
    ranks = tl.arange(0, RANKS)
    mask = ranks < GROUP_SIZE
    flags = poll(flags_of(segment, epoch, LAYOUT) + ranks, mask)
    arrived = (flags >> FINGERPRINT_BITS) >= epoch
    now = (flags >> FINGERPRINT_BITS) == epoch  # a later flag comes from a rank that has failed and goes on
    mismatched = (mask & now & (flags != flag_value(epoch, fingerprint))).to(tl.int64)
    missing = (mask & (arrived == 0) & (ranks != rank)).to(tl.int64)
    words = poll(word(segment, BROKEN) + ranks, mask)
    breakers = mask & given_up(words, epoch) & (ranks != rank)
    left = (breakers & (((words & KIND) == ABANDONED) | ((words & KIND) == ENDED))).to(tl.int64)
    any_mismatched = tl.max(mismatched, axis=0) != 0
    any_left = tl.max(left, axis=0) != 0
    any_missing = tl.max(missing, axis=0) != 0
    cause = tl.where(any_left, left, tl.where(any_missing, missing, breakers.to(tl.int64)))
    timed_out = any_missing & (any_left == 0)
    kind = tl.where(any_mismatched, MISMATCHED, tl.where(timed_out, TIMED_OUT, BROKEN_BY_PEER))
    bad = tl.where(any_mismatched, mismatched, cause)

    record = tl.load(word(segment, RECORD)).to(tl.pointer_type(tl.int64))
    # Programs of this device compete for the record. The record itself lies in the host's memory, where many machines
    # have no atomics for GPUs, so it gets ordinary stores alone.
    one = tl.cast(1, tl.int64)
    if tl.atomic_cas(word(segment, CLAIM), one - 1, one, sem="acq_rel", scope="gpu") == 0:
        tl.store(record + 1, kind.to(tl.int64))
        tl.store(record + 2, epoch)
        tl.store(record + 3, tl.cast(rank, tl.int64))
        tl.store(record + 4, tl.cast(fingerprint, tl.int64))
        tl.store(record + RECORD_WORDS + ranks, flags, mask)
        tl.store(record + RECORD_WORDS + GROUP_SIZE + ranks, bad, mask)
        block_barrier()  # whoever learns of the failure finds it on record
        segments = tl.load(segments_ptr + ranks, mask, other=0)
        value = tl.zeros((RANKS,), tl.int64) + (kind.to(tl.int64) | (epoch << KIND_BITS))
        # acquires too: later stores are seen after all earlier ones
        tl.atomic_xchg(word(segments, BROKEN) + rank, value, mask=mask, sem="acq_rel", scope="sys")
        block_barrier()
        tl.store(record, tl.cast(RECORD_COMPLETE, tl.int64))


@triton.jit
def give_up_earlier(segments_ptr, rank, LAYOUT: tl.constexpr):
    """If this rank has failed by its last round, tell the peers that it has given up on the round before that too.

    Each program tells them for its own stores. This rank's own word is never changed here. A concurrent kernel can only
    write a later round to it, or set a word of round 0, so all threads take the same branch. The exchange acquires, so
    it has reached the peers before the next store.
    """
    segment = tl.load(segments_ptr + rank)
    own = tl.load(word(segment, BROKEN) + rank)
    failed = own >> KIND_BITS
    if (failed > 1) & (failed <= tl.load(word(segment, EPOCH))):
        RANKS: tl.constexpr = triton.next_power_of_2(LAYOUT.group_size)
        ranks = tl.arange(0, RANKS)
        peers = (ranks < LAYOUT.group_size) & (ranks != rank)
        segments = tl.load(segments_ptr + ranks, peers, other=0)
        value = tl.zeros((RANKS,), tl.int64) + ((own & KIND) | ((failed - 1) << KIND_BITS))
        tl.atomic_xchg(word(segments, BROKEN) + rank, value, mask=peers, sem="acq_rel", scope="sys")
        block_barrier()


@triton.jit
def is_broken(round, LAYOUT: tl.constexpr):
    """Whether earlier reads may be wrong: a peer that gave up may have overwritten the slot.

    Readers ask after their last read. The stores that needed the data come before the barrier, so the data are read.
    """
    block_barrier()
    words = acquired(word(round.segment, BROKEN), LAYOUT.group_size, 0)
    return any_thread(given_up(words, round.epoch))


@triton.jit
def next_round(segments_ptr, rank, fingerprint):
    """The round after the last one that has ended.

    The epoch is read on the device, so that a replayed graph moves on.
    """
    await_earlier_kernels()
    segment = tl.load(segments_ptr + rank)
    epoch = tl.load(word(segment, EPOCH)) + 1
    return Round(segments_ptr, segment, rank, epoch, fingerprint)


@triton.jit
def next_push(segments_ptr, rank, fingerprint, LAYOUT: tl.constexpr):
    """The round to push. Every program calls this before its first store to a peer.

    Round e overwrites the slot of round e - 2. That is safe once every peer has signalled e - 1. A rank that failed in
    round f never waited, so it first warns peers still reading f - 1.
    """
    await_earlier_kernels()
    start_next_kernel()
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
    """Wait, bounded, for src_rank's `signal`. Returns whether the round has failed by now; if it had, looks only once.

    It ends early if the workspace is broken, or if its time-out is over, which breaks it.
    """
    flag_ptr = flags_of(round.segment, round.epoch, LAYOUT) + src_rank
    expected = flag_value(round.epoch, round.fingerprint)
    deadline = tl.load(word(round.segment, TIMEOUT)) + clock_ns()
    late, wrong = _compared(flag_ptr, round.epoch, expected)
    stops = failed
    polls = 0
    while late & (stops == 0):
        back_off()
        polls += 1
        if polls % POLLS == 0:
            stops = poll_broken(round, clock_ns() > deadline, LAYOUT)
        late, wrong = _compared(flag_ptr, round.epoch, expected)
    return failed | wrong


@triton.jit
def _compared(flag_ptr, epoch, expected):
    """Whether a flag is of an earlier round than ``epoch``, and whether it is another than expected."""
    flag = acquired(flag_ptr, 1, expected)
    return any_thread((flag >> FINGERPRINT_BITS) < epoch), any_thread(flag != expected)


@triton.jit
def all_there(round, LAYOUT: tl.constexpr):
    """Whether every source has signalled, by one look at all flags: as if `wait_source` had been called for each."""
    expected = flag_value(round.epoch, round.fingerprint)
    flags = acquired(flags_of(round.segment, round.epoch, LAYOUT), LAYOUT.group_size, expected)
    return any_thread(flags != expected) == 0


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
