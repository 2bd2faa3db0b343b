"""Results in place on the device: where a peer takes its result, what all programs of a push decide, and marks.

A push stores a chunk where it belongs in the peer's result, if the peer has posted in time where that is, or in the
slot. All its programs must do the same, as the receiver has one mark for a chunk. So the first one to decide decides.
"""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.primitives import block_barrier, flag_value, in_segment, poll, word

POST_BYTES = tl.constexpr(24)  # fusedcomm.runtime.segment.POST_BYTES: place, size and stamp
PLACE_UNIT = tl.constexpr(128)  # bytes: what places are multiples of

# What a decision says. It is 0 until a program has decided, and again when the chunk is complete.
SLOT = tl.constexpr(1)
RESULT = tl.constexpr(2)  # plus the place in the heap


@triton.jit
def decide(round, dst_rank, num_bytes, LAYOUT: tl.constexpr):
    """Where all programs store dst_rank's chunk of this round. Each calls this before its first store of the chunk.

    A post must be of exactly this round, call and size: another one names memory that may be another tensor by now. No
    word of it changes meanwhile, as dst_rank posts the next round only when it has this rank's signal of this one. If a
    rank has failed that may not hold, and threads may read different words. So the decision comes from an atomic.
    """
    post = word(round.segment, LAYOUT.posts + POST_BYTES * dst_rank)
    stamp = poll(post + 2)
    block_barrier()  # the loads of all threads come after the acquire of one
    place, size = tl.load(post), tl.load(post + 1)
    is_posted = (stamp == flag_value(round.epoch, round.fingerprint)) & (size == num_bytes)
    own = tl.where(is_posted, place + RESULT, SLOT).to(tl.int64)
    decision = word(round.segment, LAYOUT.decisions) + dst_rank
    undecided = tl.cast(0, tl.int64)
    tl.atomic_cas(decision, undecided, own, sem="acq_rel", scope="gpu")
    return tl.atomic_cas(decision, undecided, own, sem="acq_rel", scope="gpu")  # finds what is decided


@triton.jit
def chunk_at(decision, dst_rank, in_slot, results, DTYPE: tl.constexpr):
    """Where the decision has the chunk begin: ``in_slot``, or in dst_rank's result."""
    in_result = in_segment(tl.load(results.heaps_ptr + dst_rank), decision - RESULT, DTYPE) + results.start
    return tl.where(decision == SLOT, in_slot, in_result)


@triton.jit
def rows_at(decision, first_row, num_columns, results, BLOCK: tl.constexpr):
    """Where BLOCK rows begin, from the chunk's first one on, in elements [BLOCK], 64 bits wide.

    A slot has the runs of rows that a result has, but nothing between them.
    """
    rows = first_row + tl.arange(0, BLOCK)
    run = rows // results.rows_in_run
    in_slot = tl.cast(results.rows_in_run, tl.int64) * num_columns
    step = tl.where(decision == SLOT, in_slot, tl.cast(results.run_stride, tl.int64))
    return run.to(tl.int64) * step + (rows - run * results.rows_in_run).to(tl.int64) * num_columns


@triton.jit
def end_decision(round, dst_rank, decision, LAYOUT: tl.constexpr):
    """Called by the program that has found the chunk complete, before it signals: say to dst_rank where the chunk is.

    Every program has reported its part, so none looks for the decision again before the next round, a later kernel.
    """
    tl.store(word(round.segment, LAYOUT.decisions) + dst_rank, 0)
    if decision != SLOT:
        marks = marks_of(tl.load(round.segments_ptr + dst_rank), round.epoch, LAYOUT)
        tl.store(marks + round.rank, round.epoch)


@triton.jit
def is_in_place(round, src_rank, LAYOUT: tl.constexpr):
    """Whether src_rank, whose signal has come, has stored its chunk of this round in the result."""
    mark = poll(marks_of(round.segment, round.epoch, LAYOUT) + src_rank)
    block_barrier()  # the loads of all threads come after the acquire of one
    return mark == round.epoch


@triton.jit
def marks_of(segment, epoch, LAYOUT: tl.constexpr):
    """Pointer to the marks of the slot of ``epoch``, one per src_rank."""
    return word(segment, LAYOUT.marks) + (epoch % LAYOUT.num_slots) * LAYOUT.group_size
