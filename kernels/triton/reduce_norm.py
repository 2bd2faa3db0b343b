"""RMSNorm of rows: of sums that are there, or of rows that all ranks have pushed, behind their sum and a residual."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.primitives import in_units, rounded
from fusedcomm.kernels.triton.reduce import summed
from fusedcomm.kernels.triton.rounds import end_round, must_poison, next_round, slot_of, wait_all


@triton.jit
def _row(out_ptr, slot, residual_ptr, bias_ptr, first, columns, mask, step, GROUP_SIZE: tl.constexpr):
    """A block of a row of out; with a slot it is made of the ranks' terms, and stored."""
    if slot is None:
        value = tl.load(out_ptr + first + columns, mask)
    else:
        total = summed(slot, first, columns, mask, step, GROUP_SIZE)
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
    residual_ptr,  # likewise
    bias_ptr,  # [N], or None
    weight_ptr,  # [N], or None
    segments_ptr,  # [R] addresses of the ranks' segments
    run,  # Reduced, whole rows
    N,
    eps,
    slot_bytes,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
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
        nan = tl.full((BLOCK,), float("nan"), tl.float32).to(dtype)
        columns = tl.arange(0, BLOCK)
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            first = tl.cast(row, tl.int64) * N
            for begin in range(0, N, BLOCK):
                mask = begin + columns < N
                tl.store(out + first + begin + columns, nan, mask)
                tl.store(normed + first + begin + columns, nan, mask)
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
    N = in_units(N, UNIT)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        first = tl.cast(row, tl.int64) * N
        _norm(normed_ptr, out_ptr, None, None, weight_ptr, None, first, 0, N, eps, 1, BLOCK, WHOLE)
