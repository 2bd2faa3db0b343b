"""RMSNorm of rows: of sums that are there or come from their owners, or of pushed terms, behind their sum and a
residual.
"""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.bundles import Span
from fusedcomm.kernels.triton.primitives import (
    all_there,
    end_round,
    in_units,
    must_poison,
    next_round,
    poison,
    rounded,
    slot_of,
    source_rank,
    span_index,
    wait_all,
    wait_source,
)
from fusedcomm.kernels.triton.ptx import await_earlier_kernels
from fusedcomm.kernels.triton.reduce import summed

STAGES = tl.constexpr(3)  # rows of a program in flight


@triton.jit
def _row(out_ptr, slot, residual_ptr, bias_ptr, first, columns, mask, step, GROUP_SIZE: tl.constexpr):
    """A block of a row of out; with a slot it is made of the ranks' terms, and stored."""
    if slot is None:
        value = tl.load(out_ptr + first + columns, mask)
    else:
        total = summed(slot, first, columns, mask, step, GROUP_SIZE)
        if residual_ptr is not None:
            total += tl.load(residual_ptr + first + columns, mask).to(tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + columns, mask).to(tl.float32)
        value = rounded(total, out_ptr.dtype.element_ty)
        tl.store(out_ptr + first + columns, value, mask)
    return value


@triton.jit
def _squares(value, mask):
    wide = value.to(tl.float32)
    return tl.where(mask, wide * wide, 0.0)


@triton.jit
def _scale(squares, N, eps):
    mean = tl.div_rn(tl.sum(squares, axis=0), tl.cast(N, tl.float32))
    return tl.div_rn(tl.cast(1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def _weights(weight_ptr, columns, mask):
    return 1.0 if weight_ptr is None else tl.load(weight_ptr + columns, mask).to(tl.float32)


@triton.jit
def _norm(
    normed_ptr,
    out_ptr,
    residual_ptr,
    bias_ptr,
    weight_ptr,
    slot,
    first,
    step,
    N,
    eps,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The row from element ``first`` on. WHOLE: a block holds it; other rows are read again, by who stored them."""
    dtype = out_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    if WHOLE:
        mask = columns < N
        value = _row(out_ptr, slot, residual_ptr, bias_ptr, first, columns, mask, step, GROUP_SIZE)
        weights = _weights(weight_ptr, columns, mask)  # flies beside the terms
        scaled = value.to(tl.float32) * _scale(_squares(value, mask), N, eps)
        tl.store(normed_ptr + first + columns, rounded(scaled * weights, dtype), mask)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, N, BLOCK):
            mask = begin + columns < N
            value = _row(out_ptr, slot, residual_ptr, bias_ptr, first, begin + columns, mask, step, GROUP_SIZE)
            squares += _squares(value, mask)
        scale = _scale(squares, N, eps)
        for begin in range(0, N, BLOCK):
            mask = begin + columns < N
            scaled = tl.load(out_ptr + first + begin + columns, mask).to(tl.float32) * scale
            weights = _weights(weight_ptr, begin + columns, mask)
            tl.store(normed_ptr + first + begin + columns, rounded(scaled * weights, dtype), mask)


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def reduce_norm_kernel(
    normed_ptr,  # contiguous, as out
    out_ptr,  # contiguous
    weight_ptr,  # [N], or None
    segments_ptr,  # [R] addresses of the ranks' segments
    N,
    eps,
    slot_bytes,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    run,  # Reduced, whole rows
    residual_ptr,  # contiguous, as out
    bias_ptr,  # [N], or None
):
    """out.flatten()[start + i] = sum of slot[src][i] over src_rank 0 .. R-1 + residual + bias, rounded once, and
    normed = out / sqrt(mean(out ** 2) + eps) * weight of each row, rounded once; 0 <= i < size.

    The kernel waits, bounded, for the signal of each src_rank's pack_kernel or signal_kernel, and ends the round. On
    failure each program writes NaN where it would have written data.
    """
    size, start, step = run
    N = in_units(N, UNIT)
    start = in_units(start, UNIT)
    step = in_units(step, UNIT)
    round = next_round(segments_ptr, rank, fingerprint)
    dtype = out_ptr.dtype.element_ty
    slot = slot_of(round.segment, round.epoch, slot_bytes, LAYOUT, dtype)
    failed = wait_all(round, LAYOUT)
    normed, out, residual = normed_ptr + start, out_ptr + start, residual_ptr + start
    num_rows = size // N
    if failed == 0:
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            first = tl.cast(row, tl.int64) * N
            _norm(
                normed, out, residual, bias_ptr, weight_ptr, slot, first, step, N, eps, LAYOUT.group_size, BLOCK, WHOLE
            )
    if must_poison(round, failed, LAYOUT):
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            _poison(normed, out, tl.cast(row, tl.int64) * N, N, BLOCK)
    end_round(round)


@triton.jit
def _poison(normed_ptr, out_ptr, first, N, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    for begin in range(0, N, BLOCK):
        mask = begin + columns < N
        tl.store(out_ptr + first + begin + columns, poison(out_ptr.dtype.element_ty), mask)
        tl.store(normed_ptr + first + begin + columns, poison(out_ptr.dtype.element_ty), mask)


@triton.jit
def _norm_chunk(to, chunk, src_rank, rows, begin, eps, POISON: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """src_rank's rows, in this program's turns, the first at ``begin``. Returns that of the next chunk.

    ``to``: pointers to normed, out and weight, and N. No chunk: the rows are in out, or must be poisoned.
    """
    normed_ptr, out_ptr, weight_ptr, N = to
    num_programs = tl.num_programs(0)
    for row in tl.range(begin, rows.size, num_programs, num_stages=STAGES):
        first = span_index(tl.cast(row, tl.int64), src_rank, rows) * N
        if POISON:
            _poison(normed_ptr, out_ptr, first, N, BLOCK)
        else:
            slot = None if chunk is None else chunk + (tl.cast(row, tl.int64) * N - first)
            _norm(normed_ptr, out_ptr, None, None, weight_ptr, slot, first, 0, N, eps, 1, BLOCK, WHOLE)
    return (begin + num_programs - rows.size % num_programs) % num_programs


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def unpack_norm_kernel(
    normed_ptr,  # contiguous, as out
    out_ptr,  # contiguous
    weight_ptr,  # [N], or None
    segments_ptr,  # [R] addresses of the ranks' segments
    N,
    eps,
    slot_bytes,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    rows,  # Span over src_rank, of whole rows
    OWN: tl.constexpr,
):
    """out[rows(i, src)] = slot[src][i] for every src_rank, and normed = out / sqrt(mean(out ** 2) + eps) * weight of
    each row, rounded once: own rows first, without OWN those in out, then others as they come.

    The kernel waits as unpack_kernel does, and ends the round. On failure each program writes NaN where it would have
    written data.
    """
    rows = Span(*rows)
    N = in_units(N, UNIT)
    round = next_round(segments_ptr, rank, fingerprint)
    slot = slot_of(round.segment, round.epoch, slot_bytes, LAYOUT, out_ptr.dtype.element_ty)
    failed, begin, to = round.epoch < 0, tl.program_id(0), (normed_ptr, out_ptr, weight_ptr, N)
    FIRST: tl.constexpr = 0 if OWN else 1  # of the sources in the slot; the own signal, behind all sends, is then last
    if not OWN:
        begin = _norm_chunk(to, None, rank, rows, begin, eps, False, BLOCK, WHOLE)
    there = all_there(round, LAYOUT)
    for step in range(FIRST, LAYOUT.group_size + FIRST):
        src_rank = source_rank(step, rank, LAYOUT)
        if not there:
            failed = wait_source(src_rank, round, failed, LAYOUT)
        if (failed == 0) & (step < LAYOUT.group_size):  # not the own signal alone
            chunk = slot + tl.cast(src_rank, tl.int64) * rows.size * N
            begin = _norm_chunk(to, chunk, src_rank, rows, begin, eps, False, BLOCK, WHOLE)
    if must_poison(round, failed, LAYOUT):
        begin = tl.program_id(0)
        for step in range(LAYOUT.group_size):
            begin = _norm_chunk(to, None, source_rank(step, rank, LAYOUT), rows, begin, eps, True, BLOCK, WHOLE)
    end_round(round)


@triton.jit
def norm_kernel(
    normed_ptr,  # contiguous, [num_rows, N]
    out_ptr,  # likewise
    weight_ptr,  # [N], or None
    num_rows,
    N,
    eps,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """normed = out / sqrt(mean(out ** 2) + eps) * weight of each row: in fp32, rounded once."""
    await_earlier_kernels()
    N = in_units(N, UNIT)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        first = tl.cast(row, tl.int64) * N
        _norm(normed_ptr, out_ptr, None, None, weight_ptr, None, first, 0, N, eps, 1, BLOCK, WHOLE)
