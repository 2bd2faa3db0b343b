"""Matmul of experts' rows, stored where they are, or each straight into the slot of the rank whose choice it is."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.bundles import Operands, Scales, Span
from fusedcomm.kernels.triton.matmul import matmul_tile, row_of_batch, sizes_in_units, store_tile
from fusedcomm.kernels.triton.primitives import next_push, report_all, slot_of, tile_coords
from fusedcomm.kernels.triton.ptx import await_earlier_kernels
from fusedcomm.kernels.triton.token_rows import MASK_32, first_of_rank


@triton.jit
def _rows_of(first_ptr, filled_ptr, experts, mask, capacity):
    """The first row of experts, and the row before which they end. A wrong routing leads to no other memory."""
    first = tl.load(first_ptr + experts, mask, other=0)
    filled = tl.load(filled_ptr + experts, mask, other=0)
    return tl.maximum(first, 0).to(tl.int32), tl.minimum(filled, capacity).to(tl.int32)


@triton.jit
def _find(tile, begin_tile, ends, first_ptr, filled_ptr, num_n, capacity, TILE: tl.constexpr):
    """Expert by expert: (expert, first row, row before which a tile ends, tile column). ``ends``: of experts' tiles."""
    tile = ((tile + begin_tile) % tl.max(ends, axis=0)).to(tl.int32)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    begin = tl.max(tl.where(ends <= tile, ends, 0), axis=0)
    first, end = _rows_of(first_ptr, filled_ptr, expert, expert >= 0, capacity)
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


@triton.jit
def _store_products(
    h,  # [capacity, K], descriptor or pointer, as in Operands
    w,  # [experts, K, N]
    first_ptr,  # [experts], the rows where experts begin, and
    filled_ptr,  # end
    out,  # pointer to [capacity, N], or to this rank's slot with
    returns_ptr,  # [capacity], by slot_places.return_kernel
    segments_ptr,  # [R] addresses of the ranks' segments, or None
    segment,  # this rank's
    sizes,
    rank,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    TRAITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Store h[rows of e] @ w[e] of each expert e where returns say, or in the same rows of ``out``."""
    tl.assume(sizes.K > 0)
    capacity = sizes.M
    ITEMSIZE: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    num_n = tl.cdiv(sizes.N, TILE.block_n)
    experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
    first, end = _rows_of(first_ptr, filled_ptr, experts, experts < EXPERTS, capacity)
    ends = tl.cumsum(tl.cdiv(tl.maximum(end - first, 0), TILE.block_m) * num_n, axis=0)
    begin_tile = 0 if returns_ptr is None else first_of_rank(tl.max(ends, axis=0), rank, LAYOUT)
    num_programs = tl.num_programs(0)
    columns = Span(sizes.N, 0, sizes.N, 0, 0)
    stored_tile = tl.program_id(0) - num_programs
    # As in push_matmul_kernel: flattened, and the stored tile is found again.
    for tile in tl.range(tl.program_id(0), tl.max(ends, axis=0), num_programs, flatten=TRAITS.by_tma):
        found = _find(tile, begin_tile, ends, first_ptr, filled_ptr, num_n, capacity, TILE)
        acc = _multiply(h, w, found, sizes, TILE, TRAITS)
        stored_tile += num_programs
        _, i, i_end, tile_n = _find(stored_tile, begin_tile, ends, first_ptr, filled_ptr, num_n, capacity, TILE)
        rows = i + tl.arange(0, TILE.block_m)
        if returns_ptr is None:
            there, to = rows < i_end, rows.to(tl.int64) * sizes.N
        else:
            places = tl.load(returns_ptr + rows, rows < i_end, other=-1)
            there = places >= 0
            apart = tl.load(segments_ptr + (places >> 32), there, other=0) - segment
            to = (apart // ITEMSIZE + (places & MASK_32) * sizes.N) // ALIGNED * ALIGNED
        j = tile_n * TILE.block_n
        store_tile(acc, out, to, there, j, j, sizes.N, None, None, 0, columns, 2, TILE.halves)


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def grouped_matmul_kernel(
    h,
    w,
    first_ptr,
    filled_ptr,
    returns_ptr,
    segments_ptr,
    sizes,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    TRAITS: tl.constexpr,
    ALIGNED: tl.constexpr,  # a divisor of N, up to 16 bytes
    EXPERTS: tl.constexpr,
):
    """Store h[rows of e] @ w[e] of each expert e in the slots of the ranks whose choices they are; signal every rank.

    The kernel waits for nothing: a slot is free by rule 1 of the protocol.
    """
    sizes = sizes_in_units(sizes, TRAITS.n_unit, TRAITS)
    round = next_push(segments_ptr, rank, fingerprint, LAYOUT)
    DTYPE: tl.constexpr = h.dtype if TRAITS.by_tma else h.dtype.element_ty
    slot = slot_of(round.segment, round.epoch, sizes.slot_bytes, LAYOUT, DTYPE)
    _store_products(
        h, w, first_ptr, filled_ptr, slot, returns_ptr, segments_ptr, round.segment, sizes, rank,
        LAYOUT, TILE, TRAITS, ALIGNED, EXPERTS,
    )  # fmt: skip
    report_all(round, LAYOUT)


@triton.jit
def experts_matmul_kernel(
    out_ptr,  # [capacity, N], contiguous
    rows_ptr,  # [capacity, K], contiguous
    h,  # the same, as in Operands
    w,  # [experts of the piece, K, N]
    first_ptr,  # [PIECE.experts], the rows where experts begin, and
    ends_ptr,  # end, with those that align
    sizes,
    TILE: tl.constexpr,
    TRAITS: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,  # that a program makes zero at a time
):
    """out = rows @ w[e] of each expert e's rows; behind the last expert zero, or NaN where the rows are."""
    await_earlier_kernels()
    sizes, capacity = sizes_in_units(sizes, TRAITS.n_unit, TRAITS), sizes.M
    _store_products(
        h, w, first_ptr + PIECE.begin, ends_ptr + PIECE.begin, out_ptr, None, None, None, sizes, 0,
        None, TILE, TRAITS, 1, PIECE.end - PIECE.begin,
    )  # fmt: skip
    if PIECE.end == PIECE.experts:
        end = tl.maximum(tl.load(ends_ptr + PIECE.experts - 1), 0).to(tl.int32)
        for first in range(end + tl.program_id(0) * ROWS, capacity, tl.num_programs(0) * ROWS):
            rows = first + tl.arange(0, ROWS)
            value = tl.load(rows_ptr + rows.to(tl.int64) * sizes.K, rows < capacity, other=0)
            values = tl.where(value == value, 0, value).to(value.dtype)[:, None]
            for j in range(0, sizes.N, TILE.block_n):
                columns = j + tl.arange(0, TILE.block_n)
                to = out_ptr + rows.to(tl.int64)[:, None] * sizes.N + columns[None, :]
                mask = (rows < capacity)[:, None] & (columns < sizes.N)[None, :]
                tl.store(to, tl.broadcast_to(values, (ROWS, TILE.block_n)), mask)
