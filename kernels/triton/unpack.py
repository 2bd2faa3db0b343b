"""The copy-out of a round: from the slot to the final layout, source by source as they arrive."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.primitives import (
    ARRIVALS,
    EPOCH,
    block_barrier,
    fail,
    flag_value,
    flags_of,
    in_segment,
    is_broken,
    span_index,
    wait,
    word,
)


@triton.jit
def _copy_chunk(
    out_ptr,
    chunk,
    src_rank,
    unpack,
    POISON: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """This program's tiles of out[unpack(i, src_rank)] = chunk[i]; no division per element."""
    inner = unpack[2]
    num_runs = tl.cdiv(unpack[0], inner)
    tiles_in_run = tl.cdiv(inner, BLOCK_INNER)
    for tile in range(tl.program_id(0), tl.cdiv(num_runs, BLOCK_RUNS) * tiles_in_run, tl.num_programs(0)):
        run = (tile // tiles_in_run) * BLOCK_RUNS
        offset = (tile % tiles_in_run) * BLOCK_INNER
        runs, offsets = tl.arange(0, BLOCK_RUNS), tl.arange(0, BLOCK_INNER)
        mask = (runs < num_runs - run)[:, None] & (offsets < inner - offset)[None, :]
        first = tl.cast(run, tl.int64) * inner + offset  # index in the chunk
        at = span_index(first, src_rank, unpack[1], inner, unpack[3], unpack[4])
        to = out_ptr + at + runs.to(tl.int64)[:, None] * unpack[3] + offsets[None, :]
        if POISON:
            value = tl.full((BLOCK_RUNS, BLOCK_INNER), float("nan"), tl.float32)
        else:
            value = tl.load(chunk + first + runs[:, None] * inner + offsets[None, :], mask)
        tl.store(to, value.to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def unpack_kernel(
    out_ptr,  # contiguous
    segments_ptr,  # [R] addresses of the ranks' segments
    unpack,  # Span over src_rank: (size, start, inner, outer_stride, peer_stride)
    slot_bytes,
    fingerprint,
    rank,
    FLAGS: tl.constexpr,
    HEADER_BYTES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    NUM_SLOTS: tl.constexpr = 2,
):
    """out.flatten()[unpack(i, src)] = slot[src][i] for every src_rank: own, then as they send.

    Waits, bounded, for what push_matmul_kernel or signal_kernel of each src_rank signals; every
    program waits for every source, even if it has nothing to copy from it, so that the epoch that
    the last program sets means that all of them have signalled. On failure each program writes NaN
    where it would have written data.
    """
    segment = tl.load(segments_ptr + rank)
    epoch = tl.load(word(segment, EPOCH)) + 1
    flags = flags_of(segment, epoch, FLAGS, GROUP_SIZE, NUM_SLOTS)
    slot_offset = HEADER_BYTES + (epoch % NUM_SLOTS) * slot_bytes
    slot = in_segment(segment, slot_offset, out_ptr.dtype.element_ty)
    failed = epoch < 0
    for step in range(GROUP_SIZE):
        src_rank = (rank + GROUP_SIZE - step) % GROUP_SIZE
        flag = wait(flags + src_rank, segment, rank, epoch, failed, GROUP_SIZE)
        failed = failed | (flag != flag_value(epoch, fingerprint))
        if failed == 0:
            chunk = slot + tl.cast(src_rank, tl.int64) * unpack[0]
            _copy_chunk(out_ptr, chunk, src_rank, unpack, False, BLOCK_RUNS, BLOCK_INNER)
    if failed | is_broken(segment, rank, epoch, GROUP_SIZE):
        fail(segments_ptr, segment, rank, epoch, fingerprint, FLAGS, GROUP_SIZE, NUM_SLOTS)
        for src_rank in range(GROUP_SIZE):
            _copy_chunk(out_ptr, slot, src_rank, unpack, True, BLOCK_RUNS, BLOCK_INNER)

    block_barrier()  # the reads of all threads come before the arrival of one
    arrivals = tl.atomic_add(word(segment, ARRIVALS), tl.cast(1, tl.int64), sem="acq_rel", scope="gpu")
    if arrivals + 1 == tl.num_programs(0):
        tl.store(word(segment, ARRIVALS), 0)
        tl.store(word(segment, EPOCH), epoch)
