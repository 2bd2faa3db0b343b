"""Matmul of gathered chunks, source by source as they arrive."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.bundles import Operands, Scales, Span
from fusedcomm.kernels.triton.matmul import (
    load_block,
    load_box,
    load_x_box,
    matmul_tile,
    multiply,
    num_tiles,
    row_of_batch,
    sizes_in_units,
    store_tile,
    tile_indices,
    tile_of_chunk,
    tile_range,
)
from fusedcomm.kernels.triton.primitives import (
    end_round,
    must_poison,
    named,
    next_round,
    slot_of,
    source_rank,
    span_index,
    wait_source,
)
from fusedcomm.kernels.triton.ptx import fence_generic_writes
from fusedcomm.kernels.triton.scales import block_of, num_blocks, of_columns, scaled, w_step


@triton.jit
def _row_stride(K, TRAITS: tl.constexpr):
    """Elements from a row of a chunk to the next. Packed scales lie behind float8 values, both padded to 16 bytes."""
    stride = K
    if TRAITS.scaled is not None and TRAITS.scaled.packed:
        stride = (tl.cdiv(K, 16) + tl.maximum(1, tl.cdiv(num_blocks(K, TRAITS), 4))) * 16
    return stride


@triton.jit
def _scales(scales, tile, src_rank, spans, sizes, TILE: tl.constexpr, TRAITS: tl.constexpr):
    """Pointers to the scales of a tile in the first block of K, for `scaled`."""
    b, tile_m, tile_n = tile
    x, K = scales.x, spans.columns.size
    batch = span_index(b, src_rank, spans.batches, TRAITS.one_batch)
    i, _ = tile_range(tile_m, spans.rows, TILE.block_m, TRAITS.rows_in_runs)
    if TRAITS.scaled is not None:
        if TRAITS.scaled.packed:
            row = (src_rank * spans.batches.size + b) * spans.rows.size + i
            rows = (row + tl.arange(0, TILE.block_m)).to(tl.int64)
            x += rows * (_row_stride(K, TRAITS) // 4) + tl.cdiv(K, 16) * 4
        elif TRAITS.scaled.by_row:
            rows = batch * sizes.M + tile_indices(i, src_rank, spans.rows, TILE.block_m, TRAITS.rows_in_runs)
            x += rows * num_blocks(sizes.K, TRAITS)
    return Scales(x, of_columns(scales.w, batch, tile_n * TILE.block_n, sizes, TRAITS))


@triton.jit
def _store(acc, out_ptr, bias_ptr, scales, tile, src_rank, spans, sizes, TILE: tl.constexpr, TRAITS: tl.constexpr):
    """Store a tile of src_rank's chunk, scaled, with the bias, to its rows of out."""
    b, tile_m, tile_n = tile
    N = sizes.N
    batch = span_index(b, src_rank, spans.batches, TRAITS.one_batch)
    i, i_end = tile_range(tile_m, spans.rows, TILE.block_m, TRAITS.rows_in_runs)
    at = batch * sizes.M + tile_indices(i, src_rank, spans.rows, TILE.block_m, TRAITS.rows_in_runs)
    mask = tl.arange(0, TILE.block_m) < i_end - i
    columns = Span(N, 0, N, 0, 0)
    j = tile_n * TILE.block_n
    scales = _scales(scales, tile, src_rank, spans, sizes, TILE, TRAITS)
    acc = scaled(acc, scales, mask, 0, 0, True, TRAITS)
    w_scales = scales.w if TRAITS.scaled is not None and TRAITS.scaled.block_n == 1 else None
    store_tile(acc, out_ptr, at * N, mask, j, j, N, bias_ptr, w_scales, 0, columns, 2, TILE.halves)


@triton.jit
def _poison(
    out_ptr,
    scales,
    num_all,
    tiles_in_chunk,
    num_m,
    num_n,
    rank,
    spans,
    sizes,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    TRAITS: tl.constexpr,
):
    """Store NaN to all tiles of this program."""
    nan = tl.full((TILE.block_m, TILE.block_n), float("nan"), tl.float32)
    for tile in range(tl.program_id(0), num_all, tl.num_programs(0)):
        src_rank = source_rank(tile // tiles_in_chunk, rank, LAYOUT)
        at = tile_of_chunk(tile % tiles_in_chunk, num_m, num_n, TILE, TRAITS)
        _store(nan, out_ptr, None, scales, at, src_rank, spans, sizes, TILE, TRAITS)


@triton.jit
def _operands(
    x, slot, w, scales, tile, src_rank, spans, sizes, LAYOUT: tl.constexpr, TILE: tl.constexpr, TRAITS: tl.constexpr
):
    """The Operands of a tile of src_rank's chunk. x: descriptor of the slots, or pointer to the slot."""
    b, tile_m, tile_n = tile
    batch = span_index(b, src_rank, spans.batches, TRAITS.one_batch)
    i, i_end = tile_range(tile_m, spans.rows, TILE.block_m, TRAITS.rows_in_runs)
    offsets = tl.arange(0, TILE.block_m)
    x_mask = offsets < i_end - i
    w_columns = tile_n * TILE.block_n + tl.arange(0, TILE.block_n)
    w_mask = w_columns < sizes.N
    w_row = 0
    scales = _scales(scales, tile, src_rank, spans, sizes, TILE, TRAITS)
    if TRAITS.by_tma:
        x_rows = (slot, (src_rank * spans.batches.size + b) * spans.rows.size + i)
        w_columns = tile_n * TILE.block_n
        parts: tl.constexpr = LAYOUT.group_size if TRAITS.split_k else 1
        w_row = row_of_batch(w, batch, sizes, TRAITS.w_transposed, parts)
    else:
        x += tl.cast(src_rank, tl.int64) * sizes.chunk_numel
        x_rows = tl.cast(b, tl.int64) * spans.rows.size + i + offsets
        w += batch * sizes.w_stride_batch
        if TRAITS.w_transposed:  # otherwise they lie side by side, and 32 bits spare registers
            w_columns = w_columns.to(tl.int64)
    return Operands(x, x_rows, x_mask, w, w_row, w_columns, w_mask, scales)


@triton.jit
def _add_sources(
    acc,
    first,  # blocks of K, counted through the chunks in the order of source_rank
    end,
    operands,  # with the rows of source 0
    rank,
    spans,
    sizes,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    TRAITS: tl.constexpr,
):
    """acc + the products of some sources; one loop, so that loads stay in flight from source to source."""
    x, x_rows, x_mask, w, w_row, w_columns, w_mask, scales = operands
    columns = spans.columns
    in_chunk = num_tiles(columns, TILE.block_k, TRAITS.columns_in_runs)
    offsets = tl.arange(0, TILE.block_k)
    for block in range(first, end):
        src_rank = source_rank(block // in_chunk, rank, LAYOUT)
        k, k_end = tile_range(block % in_chunk, columns, TILE.block_k, TRAITS.columns_in_runs)
        if TRAITS.by_tma:
            row = x_rows[1] + src_rank * (spans.batches.size * spans.rows.size)
            a = load_x_box(x, (x_rows[0], row), k)
            if len(w.block_shape) == 2:
                at = span_index(k, src_rank, columns, TRAITS.columns_in_runs == 2).to(tl.int32)
                b = load_box(w, w_row, at, w_columns, TRAITS.w_transposed)
            else:
                b = load_box(w, w_row + src_rank, k, w_columns, TRAITS.w_transposed)
        else:
            chunk = x + tl.cast(src_rank, tl.int64) * sizes.chunk_numel
            mask = x_mask[:, None] if TRAITS.even_k else x_mask[:, None] & (offsets < k_end - k)[None, :]
            a = load_block(chunk, x_rows, _row_stride(columns.size, TRAITS), k + offsets, 1, mask)
            w_rows = tile_indices(k, src_rank, columns, TILE.block_k, TRAITS.columns_in_runs)
            mask = w_mask[None, :] if TRAITS.even_k else w_mask[None, :] & (offsets < k_end - k)[:, None]
            b = load_block(w, w_rows, sizes.w_stride_k, w_columns, sizes.w_stride_n, mask)
        w_k = span_index(k, src_rank, columns, TRAITS.columns_in_runs == 2)
        x_step = block_of(w_k, TRAITS)
        if TRAITS.scaled is not None and TRAITS.scaled.packed:
            x_step = block_of(k, TRAITS) + tl.cast(src_rank, tl.int64) * (sizes.chunk_numel // 4)
        acc = multiply(a, b, acc, scales, x_mask, x_step, w_step(w_k, sizes.N, TRAITS), TRAITS)
    return acc


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def gather_matmul_kernel(
    out_ptr,  # [..., N], contiguous
    slots,  # descriptor of this rank's slots [num_slots, rows of all chunks, K of one], or None: loads by pointer
    w,  # descriptor or pointer, as in Operands
    bias_ptr,  # [N], or None
    x_scales,  # [rows of out or 1, blocks of K], or None: there are none, or they come with the rows
    w_scales,  # [batches or 1, blocks of K, blocks of N], or None
    segments_ptr,  # [R] addresses of the ranks' segments
    spans,  # Spans over src_rank
    sizes,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    TRAITS: tl.constexpr,
):
    """out[batches * M + rows] = sum over src_rank of slot[src_rank] @ w[batches][columns] + bias.

    Without split_k the sources own different rows, and are done one after the other. With split_k each source owns a
    part of K; a tile sums over them in the order of source_rank, the same in every run, and is rounded once. Without
    TRAITS.own the rows of this rank's chunk are in out already.

    The kernel waits, bounded, for the signal of each src_rank's pack_kernel or signal_kernel; every program waits for
    every source (end_round), the own one too. On failure each program writes NaN where it would have written data, and
    to its share of this rank's rows.

    With descriptors one loop runs through the tiles and K, so that the loads of a tile fly while the one before is
    stored: Triton joins the loop over K with the one around it, as it is sure to turn (`tl.assume`). TMA loads belong
    to the async proxy, so a fence follows each wait (`fence_generic_writes`).
    """
    spans, sizes = named(spans, TRAITS.k_unit), sizes_in_units(sizes, TRAITS.k_unit, TRAITS)
    round = next_round(segments_ptr, rank, fingerprint)
    failed = round.epoch < 0
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    DTYPE: tl.constexpr = OUT if TRAITS.scaled is None else getattr(tl, TRAITS.scaled.in_slots)
    if TRAITS.by_tma:
        x, slot = slots, (round.epoch % LAYOUT.num_slots).to(tl.int32)
    else:
        x, slot = slot_of(round.segment, round.epoch, sizes.slot_bytes, LAYOUT, DTYPE), 0
    scales = Scales(0, 0)
    if TRAITS.scaled is not None:
        scales = Scales(x_scales, w_scales)
        if TRAITS.scaled.packed:
            scales = Scales(slot_of(round.segment, round.epoch, sizes.slot_bytes, LAYOUT, tl.float32), w_scales)
    num_m = num_tiles(spans.rows, TILE.block_m, TRAITS.rows_in_runs)
    num_n = tl.cdiv(sizes.N, TILE.block_n)
    tiles_in_chunk = spans.batches.size * num_m * num_n
    program, num_programs = tl.program_id(0), tl.num_programs(0)

    if TRAITS.split_k:
        num_all = tiles_in_chunk
        in_chunk = num_tiles(spans.columns, TILE.block_k, TRAITS.columns_in_runs)
        num_blocks = in_chunk * LAYOUT.group_size
        if TRAITS.by_tma:
            tl.assume(num_blocks > 0)
        # The first tile takes the sources as they arrive; after it, all are there.
        acc = tl.full((TILE.block_m, TILE.block_n), 0.0, tl.float32)
        at = tile_of_chunk(program, num_m, num_n, TILE, TRAITS)
        operands = _operands(x, slot, w, scales, at, 0, spans, sizes, LAYOUT, TILE, TRAITS)
        for step in range(LAYOUT.group_size):
            round = next_round(segments_ptr, rank, fingerprint)
            failed = wait_source(source_rank(step, rank, LAYOUT), round, failed, LAYOUT)
            if TRAITS.by_tma:
                fence_generic_writes()
            first, end = step * in_chunk, tl.where(failed, step, step + 1) * in_chunk
            acc = _add_sources(acc, first, end, operands, rank, spans, sizes, LAYOUT, TILE, TRAITS)
        _store(acc, out_ptr, bias_ptr, scales, at, 0, spans, sizes, TILE, TRAITS)
        num_left = tl.where(failed, 0, num_all)
        for tile in tl.range(program + num_programs, num_left, num_programs, flatten=TRAITS.by_tma):
            acc = tl.full((TILE.block_m, TILE.block_n), 0.0, tl.float32)
            at = tile_of_chunk(tile, num_m, num_n, TILE, TRAITS)
            operands = _operands(x, slot, w, scales, at, 0, spans, sizes, LAYOUT, TILE, TRAITS)
            acc = _add_sources(acc, 0, num_blocks, operands, rank, spans, sizes, LAYOUT, TILE, TRAITS)
            _store(acc, out_ptr, bias_ptr, scales, at, 0, spans, sizes, TILE, TRAITS)
    else:
        num_all = tiles_in_chunk * LAYOUT.group_size
        if TRAITS.by_tma:
            tl.assume(spans.columns.size > 0)
        step = program * 0
        if not TRAITS.own:
            step += 1
        while step < LAYOUT.group_size:  # Triton does not join the loops inside a `for`
            src_rank = source_rank(step, rank, LAYOUT)
            failed = wait_source(src_rank, next_round(segments_ptr, rank, fingerprint), failed, LAYOUT)
            if TRAITS.by_tma:
                fence_generic_writes()
            # Tiles are dealt out through all chunks, so that no program is the first in each of them.
            before = step * tiles_in_chunk
            first = (program + num_programs - before % num_programs) % num_programs
            num_left = tl.where(failed, 0, tiles_in_chunk)
            for tile in tl.range(first, num_left, num_programs, flatten=TRAITS.by_tma):
                at = tile_of_chunk(tile, num_m, num_n, TILE, TRAITS)
                operands = _operands(x, slot, w, scales, at, src_rank, spans, sizes, LAYOUT, TILE, TRAITS)
                x_stride = _row_stride(spans.columns.size, TRAITS)
                acc = matmul_tile(operands, spans.columns.size, x_stride, sizes, TILE, TRAITS)
                _store(acc, out_ptr, bias_ptr, scales, at, src_rank, spans, sizes, TILE, TRAITS)
            step += 1
        if not TRAITS.own:  # behind the loop, where it takes no registers from it
            failed = wait_source(rank, next_round(segments_ptr, rank, fingerprint), failed, LAYOUT)
    round = next_round(segments_ptr, rank, fingerprint)
    if must_poison(round, failed, LAYOUT):
        _poison(out_ptr, scales, num_all, tiles_in_chunk, num_m, num_n, rank, spans, sizes, LAYOUT, TILE, TRAITS)
    if TRAITS.end_round:
        end_round(round)
