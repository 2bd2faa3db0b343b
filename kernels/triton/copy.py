"""Copies between a slot and a tensor: what is sent as it is, and what has arrived and is wanted as it is."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.primitives import span_index
from fusedcomm.kernels.triton.rounds import (
    end_round,
    must_poison,
    next_push,
    next_round,
    report,
    slot_of,
    source_rank,
    wait_source,
)


@triton.jit
def _copy(
    chunk,
    tensor,
    peer,
    span,  # Span of the tensor; the chunk is contiguous
    TO_CHUNK: tl.constexpr,
    POISON: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """This program's tiles of tensor[span(i, peer)] = chunk[i], or back; no division per element."""
    size, start, inner, outer_stride, peer_stride = span
    num_runs = tl.cdiv(size, inner)
    tiles_in_run = tl.cdiv(inner, BLOCK_INNER)
    for tile in range(tl.program_id(0), tl.cdiv(num_runs, BLOCK_RUNS) * tiles_in_run, tl.num_programs(0)):
        run = (tile // tiles_in_run) * BLOCK_RUNS
        offset = (tile % tiles_in_run) * BLOCK_INNER
        runs, offsets = tl.arange(0, BLOCK_RUNS), tl.arange(0, BLOCK_INNER)
        mask = (runs < num_runs - run)[:, None] & (offsets < inner - offset)[None, :]
        first = tl.cast(run, tl.int64) * inner + offset  # index in the chunk
        at = span_index(first, peer, start, inner, outer_stride, peer_stride)
        in_tensor = tensor + at + runs.to(tl.int64)[:, None] * outer_stride + offsets[None, :]
        in_chunk = chunk + first + runs[:, None] * inner + offsets[None, :]
        if POISON:
            nan = tl.full((BLOCK_RUNS, BLOCK_INNER), float("nan"), tl.float32)
            tl.store(in_tensor, nan.to(tensor.dtype.element_ty), mask)
        elif TO_CHUNK:
            tl.store(in_chunk, tl.load(in_tensor, mask), mask)
        else:
            tl.store(in_tensor, tl.load(in_chunk, mask), mask)


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def pack_kernel(
    tensor,  # contiguous
    segments_ptr,  # [R] addresses of the ranks' segments
    pack,  # Span over dst_rank: (size, start, inner, outer_stride, peer_stride)
    slot_bytes,
    fingerprint,
    rank,
    COUNTERS: tl.constexpr,
    FLAGS: tl.constexpr,
    HEADER_BYTES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    NUM_SLOTS: tl.constexpr = 2,
):
    """slot[rank][i] of each dst_rank = tensor.flatten()[pack(i, dst_rank)]; signal it: own chunk first, then rank + 1.

    The kernel waits for nothing: a slot is free by rule 1 of the protocol. It counts programs, not tiles: the own
    signal then says that every program has read the epoch, which a kernel beside this one may count on from there.
    """
    epoch = next_push(segments_ptr, rank, GROUP_SIZE)
    call = (segments_ptr, rank, epoch, fingerprint, tl.num_programs(0))
    for step in range(GROUP_SIZE):
        dst_rank = (rank + step) % GROUP_SIZE
        segment = tl.load(segments_ptr + dst_rank)
        slot = slot_of(segment, epoch, slot_bytes, HEADER_BYTES, NUM_SLOTS, tensor.dtype.element_ty)
        chunk = slot + tl.cast(rank, tl.int64) * pack[0]
        _copy(chunk, tensor, dst_rank, pack, True, False, BLOCK_RUNS, BLOCK_INNER)
        report(call, dst_rank, 1, COUNTERS, FLAGS, GROUP_SIZE, NUM_SLOTS)


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
    END_ROUND: tl.constexpr,
    NUM_SLOTS: tl.constexpr = 2,
):
    """out.flatten()[unpack(i, src)] = slot[src][i] for every src_rank: own data first, then in the order of sending.

    The kernel waits, bounded, for what push_matmul_kernel, pack_kernel or signal_kernel of each src_rank signals. Every
    program waits for every source, even if it has nothing to copy from it (end_round). On failure each program writes
    NaN where it would have written data.
    """
    round = next_round(segments_ptr, rank, fingerprint)
    epoch = round[3]
    slot = slot_of(round[1], epoch, slot_bytes, HEADER_BYTES, NUM_SLOTS, out_ptr.dtype.element_ty)
    failed = epoch < 0
    for step in range(GROUP_SIZE):
        src_rank = source_rank(step, rank, GROUP_SIZE)
        failed = wait_source(src_rank, round, failed, FLAGS, GROUP_SIZE, NUM_SLOTS)
        if failed == 0:
            chunk = slot + tl.cast(src_rank, tl.int64) * unpack[0]
            _copy(chunk, out_ptr, src_rank, unpack, False, False, BLOCK_RUNS, BLOCK_INNER)
    if must_poison(round, failed, FLAGS, GROUP_SIZE, NUM_SLOTS):
        for src_rank in range(GROUP_SIZE):
            _copy(slot, out_ptr, src_rank, unpack, False, True, BLOCK_RUNS, BLOCK_INNER)
    if END_ROUND:
        end_round(round)
