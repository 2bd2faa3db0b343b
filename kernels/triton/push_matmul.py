"""Matmul that stores its tiles straight into the slots of the ranks that they belong to."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.bundles import Operands, Scales
from fusedcomm.kernels.triton.matmul import (
    column_index,
    column_range,
    matmul_tile,
    num_tiles,
    row_of_batch,
    sizes_in_units,
    store_tile,
    tile_indices,
    tile_of_chunk,
    tile_range,
)
from fusedcomm.kernels.triton.primitives import named, next_push, report, slot_of, span_index
from fusedcomm.kernels.triton.scales import num_blocks, of_columns, scaled


@triton.jit
def _find(tile, rank, num_m, num_n, tiles_in_chunk, LAYOUT: tl.constexpr, TILE: tl.constexpr, TRAITS: tl.constexpr):
    """Destination by destination, from rank + 1 to rank: (dst_rank, batch, tile row, tile column)."""
    dst_rank = (rank + 1 + tile // tiles_in_chunk) % LAYOUT.group_size
    batch, tile_m, tile_n = tile_of_chunk(tile % tiles_in_chunk, num_m, num_n, TILE, TRAITS)
    return dst_rank, batch, tile_m, tile_n


@triton.jit
def _scales(scales, batch, i, j, dst_rank, spans, sizes, TILE: tl.constexpr, TRAITS: tl.constexpr):
    """Pointers to the scales of the tile from i and j on in the first block of K."""
    x = scales.x
    if TRAITS.scaled is not None and TRAITS.scaled.by_row:
        rows = batch * sizes.M + tile_indices(i, dst_rank, spans.rows, TILE.block_m, TRAITS.rows_in_runs)
        x += rows * num_blocks(sizes.K, TRAITS)
    column = span_index(j, dst_rank, spans.columns, TRAITS.columns_in_runs == 2)
    return Scales(x, of_columns(scales.w, batch, column, sizes, TRAITS))


@triton.jit
def _multiply(x, w, scales, tile, spans, sizes, TILE: tl.constexpr, TRAITS: tl.constexpr):
    """A tile of a chunk in fp32 [BLOCK_M, BLOCK_N], without the bias; ``tile`` is from _find."""
    _, rows, columns = spans
    dst_rank, b, tile_m, tile_n = tile
    batch = span_index(b, dst_rank, spans.batches, TRAITS.one_batch)
    i, i_end = tile_range(tile_m, rows, TILE.block_m, TRAITS.rows_in_runs)
    j, j_begin, j_end = column_range(tile_n, dst_rank, columns, TILE.block_n, TRAITS)
    x_mask = i + tl.arange(0, TILE.block_m) < i_end
    w_mask = j + tl.arange(0, TILE.block_n) < j_end
    if TRAITS.by_tma:
        row = span_index(i, dst_rank, rows, TRAITS.rows_in_runs == 2)
        column = column_index(j, j_begin, dst_rank, columns, TRAITS.columns_in_runs)
        x_rows, w_columns = (batch * sizes.M + row).to(tl.int32), column.to(tl.int32)
        w_row = row_of_batch(w, batch, sizes, TRAITS.w_transposed)
    else:
        x_rows = batch * sizes.M + tile_indices(i, dst_rank, rows, TILE.block_m, TRAITS.rows_in_runs)
        w_columns = tile_indices(j, dst_rank, columns, TILE.block_n, TRAITS.columns_in_runs)
        w_row = 0
        w += batch * sizes.w_stride_batch
    scales = _scales(scales, batch, i, j, dst_rank, spans, sizes, TILE, TRAITS)
    operands = Operands(x, x_rows, x_mask, w, w_row, w_columns, w_mask, scales)
    return matmul_tile(operands, sizes.K, sizes.K, sizes, TILE, TRAITS)


@triton.jit
def _epilogue(acc, chunk, bias_ptr, scales, tile, spans, sizes, TILE: tl.constexpr, TRAITS: tl.constexpr):
    """Store a tile, scaled, with the bias, to its place in the contiguous chunk; ``tile`` is from _find."""
    _, rows, columns = spans
    dst_rank, b, tile_m, tile_n = tile
    i, i_end = tile_range(tile_m, rows, TILE.block_m, TRAITS.rows_in_runs)
    j, j_begin, j_end = column_range(tile_n, dst_rank, columns, TILE.block_n, TRAITS)
    part = chunk + (tl.cast(b, tl.int64) * rows.size + i) * columns.size
    offsets = tl.arange(0, TILE.block_m)
    mask = offsets < i_end - i
    at = offsets * columns.size  # a chunk fits 32 bits; rows behind the mask may wrap
    batch = span_index(b, dst_rank, spans.batches, TRAITS.one_batch)
    scales = _scales(scales, batch, i, j, dst_rank, spans, sizes, TILE, TRAITS)
    acc = scaled(acc, scales, mask, 0, 0, True, TRAITS)
    in_runs: tl.constexpr = TRAITS.columns_in_runs
    shift: tl.constexpr = TRAITS.shift
    w_scales = scales.w if TRAITS.scaled is not None and TRAITS.scaled.block_n == 1 else None
    halves: tl.constexpr = TILE.halves
    store_tile(acc, part, at, mask, j, j_begin, j_end, bias_ptr, w_scales, dst_rank, columns, in_runs, halves, shift)


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def push_matmul_kernel(
    x,  # descriptor or pointer, as in Operands
    w,
    bias_ptr,  # [N], or None
    x_scales,  # [rows or 1, blocks of K], or None
    w_scales,  # [batches or 1, blocks of K, blocks of N], or None
    segments_ptr,  # [R] addresses of the ranks' segments
    spans,  # Spans over dst_rank
    sizes,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    TRAITS: tl.constexpr,
):
    """slot[rank] of each dst_rank = x[batches, rows] @ w[batches][:, columns], scaled, + bias; signal it.

    The kernel waits for nothing: a slot is free by rule 1 of the protocol. It reads the epoch on the device, so that a
    replayed graph moves on. Programs share the tiles of all chunks; there must be at least one.
    """
    tl.assume(sizes.K > 0)
    spans, sizes = named(spans, TRAITS.n_unit), sizes_in_units(sizes, TRAITS.n_unit, TRAITS)
    round = next_push(segments_ptr, rank, fingerprint, LAYOUT)
    num_m = num_tiles(spans.rows, TILE.block_m, TRAITS.rows_in_runs)
    num_n = num_tiles(spans.columns, TILE.block_n, TRAITS.columns_in_runs, TRAITS.shift)
    tiles_in_chunk = spans.batches.size * num_m * num_n
    num_all = tiles_in_chunk * LAYOUT.group_size
    num_programs = tl.num_programs(0)
    scales = Scales(0, 0)
    if TRAITS.scaled is not None:
        scales = Scales(x_scales, w_scales)
    X_DTYPE: tl.constexpr = x.dtype if TRAITS.by_tma else x.dtype.element_ty
    DTYPE: tl.constexpr = X_DTYPE if TRAITS.scaled is None else getattr(tl, TRAITS.scaled.in_slots)

    stored_tile = tl.program_id(0) - num_programs
    num_stored = 0  # tiles of stored_rank's chunk that are stored but not reported
    stored_rank = rank
    # The loop is flattened: the loads of a tile are under way while the tile before it is stored.
    for tile in tl.range(tl.program_id(0), num_all, num_programs, flatten=TRAITS.by_tma):
        computed = _find(tile, rank, num_m, num_n, tiles_in_chunk, LAYOUT, TILE, TRAITS)
        acc = _multiply(x, w, scales, computed, spans, sizes, TILE, TRAITS)

        # The stored tile is found again from a counter of its own, so that the next tile's loads do not depend on this
        # tile's store.
        stored_tile += num_programs
        stored = _find(stored_tile, rank, num_m, num_n, tiles_in_chunk, LAYOUT, TILE, TRAITS)
        dst_rank = stored[0]
        # A finished chunk is reported one tile late: its stores have landed by now, so the release
        # does not stall.
        if (dst_rank != stored_rank) & (num_stored > 0):
            report(round, stored_rank, num_stored, tiles_in_chunk, LAYOUT)
            num_stored = 0
        slot = slot_of(tl.load(segments_ptr + dst_rank), round.epoch, sizes.slot_bytes, LAYOUT, DTYPE)
        chunk = slot + tl.cast(rank, tl.int64) * sizes.chunk_numel
        _epilogue(acc, chunk, bias_ptr, scales, stored, spans, sizes, TILE, TRAITS)
        num_stored += 1
        stored_rank = dst_rank
    if num_stored > 0:
        report(round, stored_rank, num_stored, tiles_in_chunk, LAYOUT)
