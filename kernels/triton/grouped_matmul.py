"""Matmul of experts' rows that stores each row straight into the slot of the rank whose choice it is."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.bundles import Operands, Returns, Scales, Span
from fusedcomm.kernels.triton.matmul import matmul_tile, row_of_batch, sizes_in_units, store_tile
from fusedcomm.kernels.triton.primitives import tile_coords
from fusedcomm.kernels.triton.rounds import next_push, slot_of
from fusedcomm.kernels.triton.token_rows import all_fit, report_all, way_back


@triton.jit
def _rows_of(returns, experts, mask, capacity):
    """The first row of experts, and the row before which they end. A wrong routing leads to no other memory."""
    first = tl.load(returns.first + experts, mask, other=0)
    filled = tl.load(returns.filled + experts, mask, other=0)
    return tl.maximum(first, 0).to(tl.int32), tl.minimum(filled, capacity).to(tl.int32)


@triton.jit
def _find(tile, ends, num_experts, num_n, returns, capacity, TILE: tl.constexpr):
    """Expert by expert: (expert, first row, row before which a tile ends, tile column). ``ends``: of experts' tiles."""
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    begin = tl.max(tl.where(ends <= tile, ends, 0), axis=0)
    first, end = _rows_of(returns, expert, expert < num_experts, capacity)
    num_m = tl.maximum(tl.cdiv(end - first, TILE.block_m), 1)
    tile_m, tile_n = tile_coords(tile - begin, num_m, num_n, TILE.group_m)
    return expert, first + tile_m * TILE.block_m, end, tile_n


@triton.jit
def _multiply(h, w, tile, sizes, TILE: tl.constexpr, TRAITS: tl.constexpr):
    """A tile in fp32 [BLOCK_M, BLOCK_N]; ``tile`` is from _find."""
    expert, i, end, tile_n = tile
    rows, columns = i + tl.arange(0, TILE.block_m), tile_n * TILE.block_n + tl.arange(0, TILE.block_n)
    x_mask, w_mask = rows < end, columns < sizes.N
    if TRAITS.by_tma:
        w_row = row_of_batch(w, expert, sizes, TRAITS.w_transposed)
        operands = Operands(h, i, x_mask, w, w_row, tile_n * TILE.block_n, w_mask, Scales(0, 0))
    else:
        w += tl.cast(expert, tl.int64) * sizes.w_stride_batch
        operands = Operands(h, rows.to(tl.int64), x_mask, w, 0, columns.to(tl.int64), w_mask, Scales(0, 0))
    return matmul_tile(operands, sizes.K, sizes.K, sizes, TILE, TRAITS)


@triton.jit(do_not_specialize=["num_experts", "fingerprint", "rank"])
def grouped_matmul_kernel(
    h,  # [capacity, K], descriptor or pointer, as in Operands
    w,  # [E / R, K, N]
    first_ptr,  # these five are Returns
    filled_ptr,
    kept_ptr,
    shifts_ptr,
    sums_ptr,
    segments_ptr,  # [R] addresses of the ranks' segments
    sizes,
    num_experts,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    TRAITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Store h[rows of e] @ w[e] of each expert e in the slots of the ranks whose choices they are; signal every rank.

    The kernel waits for nothing: a slot is free by rule 1 of the protocol.
    """
    tl.assume(sizes.K > 0)
    sizes, capacity = sizes_in_units(sizes, TRAITS.n_unit, TRAITS), sizes.M
    returns = Returns(first_ptr, filled_ptr, kept_ptr, shifts_ptr, sums_ptr)
    round = next_push(segments_ptr, rank, fingerprint, LAYOUT)
    DTYPE: tl.constexpr = h.dtype if TRAITS.by_tma else h.dtype.element_ty
    slot = slot_of(round.segment, round.epoch, sizes.slot_bytes, LAYOUT, DTYPE)
    fit = all_fit(sums_ptr, capacity, LAYOUT)
    num_n = tl.cdiv(sizes.N, TILE.block_n)
    experts = tl.arange(0, EXPERTS)
    first, end = _rows_of(returns, experts, experts < num_experts, capacity)
    ends = tl.cumsum(tl.cdiv(tl.maximum(end - first, 0), TILE.block_m) * num_n, axis=0)
    num_programs = tl.num_programs(0)
    columns = Span(sizes.N, 0, sizes.N, 0, 0)
    stored_tile = tl.program_id(0) - num_programs
    # As in push_matmul_kernel: flattened, and the stored tile is found again.
    for tile in tl.range(tl.program_id(0), tl.max(ends, axis=0), num_programs, flatten=TRAITS.by_tma):
        found = _find(tile, ends, num_experts, num_n, returns, capacity, TILE)
        acc = _multiply(h, w, found, sizes, TILE, TRAITS)
        stored_tile += num_programs
        expert, i, i_end, tile_n = _find(stored_tile, ends, num_experts, num_n, returns, capacity, TILE)
        rows = (i + tl.arange(0, TILE.block_m)).to(tl.int64)
        to = way_back(rows, expert, returns, fit, num_experts, capacity, sizes.N, round, LAYOUT, DTYPE, ALIGNED)
        j = tile_n * TILE.block_n
        store_tile(acc, slot, to, rows < i_end, j, j, sizes.N, None, None, 0, columns, 2, TILE.halves)
    report_all(round, LAYOUT)
