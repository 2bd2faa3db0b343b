"""Copies between a slot and a tensor: chunks sent or received as they are."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.bundles import Span
from fusedcomm.kernels.triton.primitives import (
    all_there,
    end_round,
    must_poison,
    next_push,
    next_round,
    poison,
    report,
    report_all,
    slot_of,
    source_rank,
    span_index,
    wait_source,
)


@triton.jit
def _copy(
    chunk,
    tensor,
    peer,
    span,  # the tensor's; the chunk is contiguous
    begin,
    TO_CHUNK: tl.constexpr,
    POISON: tl.constexpr,
    TILE: tl.constexpr,
):
    """tensor[span(i, peer)] = chunk[i], or back, in this program's tiles; no division per element.

    ``begin``: the first of them. Returns the one in the next chunk: tiles are dealt out through all chunks, so that no
    program is the first in each.
    """
    BLOCK_RUNS: tl.constexpr = TILE.block_runs
    BLOCK_INNER: tl.constexpr = TILE.block_inner
    inner = span.inner
    # in 64 bits: the sums before the divisions may wrap
    num_runs = tl.cdiv(tl.cast(span.size, tl.int64), inner).to(tl.int32)
    tiles_in_run = tl.cdiv(tl.cast(inner, tl.int64), BLOCK_INNER).to(tl.int32)
    num_tiles = tl.cdiv(num_runs, BLOCK_RUNS) * tiles_in_run
    num_programs = tl.num_programs(0)
    for tile in range(begin, num_tiles, num_programs):
        run = (tile // tiles_in_run) * BLOCK_RUNS
        offset = (tile % tiles_in_run) * BLOCK_INNER
        runs, offsets = tl.arange(0, BLOCK_RUNS), tl.arange(0, BLOCK_INNER)
        mask = (runs < num_runs - run)[:, None] & (offsets < inner - offset)[None, :]
        first = tl.cast(run, tl.int64) * inner + offset  # index in the chunk
        at = span_index(first, peer, span)
        in_tensor = tensor + at + runs.to(tl.int64)[:, None] * span.outer_stride + offsets[None, :]
        in_chunk = chunk + first + runs[:, None] * inner + offsets[None, :]
        if POISON:
            tl.store(in_tensor, poison(tensor.dtype.element_ty), mask)
        elif TO_CHUNK:
            tl.store(in_chunk, tl.load(in_tensor, mask), mask)
        else:
            tl.store(in_tensor, tl.load(in_chunk, mask), mask)
    return (begin + num_programs - num_tiles % num_programs) % num_programs


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def pack_kernel(
    tensor,  # contiguous
    segments_ptr,  # [R] addresses of the ranks' segments
    pack,  # Span over dst_rank
    slot_bytes,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    TRAITS: tl.constexpr,  # Packed
):
    """slot[rank][i] of each dst_rank = tensor.flatten()[pack(i, dst_rank)]; signal it: own chunk first, then rank + 1.

    The kernel waits for nothing: a slot is free by rule 1 of the protocol. It counts programs, not tiles.
    """
    pack = Span(*pack)
    round = next_push(segments_ptr, rank, fingerprint, LAYOUT)
    begin = tl.program_id(0)
    for step in range(LAYOUT.group_size):
        dst_rank = (rank + step) % LAYOUT.group_size
        segment = tl.load(segments_ptr + dst_rank)
        slot = slot_of(segment, round.epoch, slot_bytes, LAYOUT, tensor.dtype.element_ty)
        if (step > 0) | TRAITS.own:
            chunk = slot + tl.cast(rank, tl.int64) * pack.size
            begin = _copy(chunk, tensor, dst_rank, pack, begin, True, False, TILE)
        if TRAITS.by_chunk:
            report(round, dst_rank, 1, tl.num_programs(0), LAYOUT)
    if not TRAITS.by_chunk:
        report_all(round, LAYOUT)


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def unpack_kernel(
    out_ptr,  # contiguous
    segments_ptr,  # [R] addresses of the ranks' segments
    unpack,  # Span over src_rank
    slot_bytes,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    TRAITS: tl.constexpr,  # Unpacked
):
    """out.flatten()[unpack(i, src)] = slot[src][i] for every src_rank: own data first, then in order of sends.

    The kernel waits, bounded, for the signal of each src_rank's push_matmul_kernel, pack_kernel or signal_kernel. Every
    program waits for every source, even if it has nothing to copy from it (end_round). On failure each program writes
    NaN where it would have written data.
    """
    unpack = Span(*unpack)
    round = next_round(segments_ptr, rank, fingerprint)
    slot = slot_of(round.segment, round.epoch, slot_bytes, LAYOUT, out_ptr.dtype.element_ty)
    failed = round.epoch < 0
    there = all_there(round, LAYOUT)
    begin = tl.program_id(0)
    for step in range(LAYOUT.group_size):
        src_rank = source_rank(step, rank, LAYOUT)
        if not there:
            failed = wait_source(src_rank, round, failed, LAYOUT)
        if (failed == 0) & ((step > 0) | TRAITS.own):
            chunk = slot + tl.cast(src_rank, tl.int64) * unpack.size
            begin = _copy(chunk, out_ptr, src_rank, unpack, begin, False, False, TILE)
    if must_poison(round, failed, LAYOUT):
        begin = tl.program_id(0)
        for step in range(LAYOUT.group_size):
            next_begin = _copy(slot, out_ptr, source_rank(step, rank, LAYOUT), unpack, begin, False, True, TILE)
            if (step > 0) | TRAITS.own:
                begin = next_begin
    if TRAITS.end_round:
        end_round(round)
