"""Matmul whose tiles are stored straight into the slots of the ranks that they belong to."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.matmul import (
    matmul_tile,
    num_tiles,
    store_tile,
    tile_indices,
    tile_of_chunk,
    tile_range,
)
from fusedcomm.kernels.triton.primitives import span_index
from fusedcomm.kernels.triton.rounds import next_push, report, slot_of


@triton.jit
def _find(tile, rank, num_m, num_n, tiles_in_chunk, GROUP_SIZE: tl.constexpr, GROUP_M: tl.constexpr):
    """dst_rank, batch, tile row and column: destination by destination, from rank + 1 to rank."""
    dst_rank = (rank + 1 + tile // tiles_in_chunk) % GROUP_SIZE
    batch, tile_m, tile_n = tile_of_chunk(tile % tiles_in_chunk, num_m, num_n, GROUP_M)
    return dst_rank, batch, tile_m, tile_n


@triton.jit
def _multiply(
    x,
    w,
    tile,  # as _find gives it
    batches,
    rows,
    columns,
    M,
    N,
    K,
    w_strides,
    USE_TMA: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    ROWS_IN_RUNS: tl.constexpr,
    COLUMNS_IN_RUNS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ALLOW_TF32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tile of dst_rank's chunk in fp32 [BLOCK_M, BLOCK_N], without the bias."""
    dst_rank, b, tile_m, tile_n = tile
    batch = span_index(b, dst_rank, batches[1], batches[2], batches[3], batches[4])
    i, i_end = tile_range(tile_m, rows, BLOCK_M, ROWS_IN_RUNS)
    j, j_end = tile_range(tile_n, columns, BLOCK_N, COLUMNS_IN_RUNS)
    x_mask = i + tl.arange(0, BLOCK_M) < i_end
    w_mask = j + tl.arange(0, BLOCK_N) < j_end
    if USE_TMA:
        row = span_index(i, dst_rank, rows[1], rows[2], rows[3], rows[4])
        column = span_index(j, dst_rank, columns[1], columns[2], columns[3], columns[4])
        x_rows, w_columns = (batch * M + row).to(tl.int32), column.to(tl.int32)
        w_row = (batch * (N if W_TRANSPOSED else K)).to(tl.int32)
        w_batch = w
    else:
        x_rows = batch * M + tile_indices(i, dst_rank, rows, BLOCK_M, ROWS_IN_RUNS)
        w_columns = tile_indices(j, dst_rank, columns, BLOCK_N, COLUMNS_IN_RUNS)
        w_row = 0
        w_batch = w + batch * w_strides[0]
    return matmul_tile(
        x,
        w_batch,
        x_rows,
        x_mask,
        w_row,
        w_columns,
        w_mask,
        K,
        w_strides[1],
        w_strides[2],
        USE_TMA,
        USE_TMA,
        W_TRANSPOSED,
        EVEN_K,
        ALLOW_TF32,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )


@triton.jit
def _epilogue(
    acc,
    chunk,
    bias_ptr,
    tile,
    rows,
    columns,
    ROWS_IN_RUNS: tl.constexpr,
    COLUMNS_IN_RUNS: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Store a tile, with the bias, to its place in the chunk; ``tile`` as _find gives it."""
    dst_rank, b, tile_m, tile_n = tile
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    i, i_end = tile_range(tile_m, rows, BLOCK_M, ROWS_IN_RUNS)
    j, j_end = tile_range(tile_n, columns, BLOCK_N, COLUMNS_IN_RUNS)
    part = chunk + (tl.cast(b, tl.int64) * rows[0] + i) * columns[0]
    offsets = tl.arange(0, BLOCK_M)
    mask = offsets < i_end - i
    store_tile(acc, part, offsets * columns[0], mask, j, j_end, bias_ptr, dst_rank, columns, COLUMNS_IN_RUNS, HALVES)


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def push_matmul_kernel(
    x,  # descriptor or pointer, as matmul_tile takes it
    w,
    bias_ptr,  # [N], or None
    segments_ptr,  # [R] addresses of the ranks' segments
    batches,  # Spans over dst_rank: (size, start, inner, outer_stride, peer_stride)
    rows,
    columns,
    M,
    N,
    K,
    w_strides,  # (batch, K, N)
    chunk_numel,
    slot_bytes,
    fingerprint,
    rank,
    COUNTERS: tl.constexpr,
    FLAGS: tl.constexpr,
    HEADER_BYTES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_TMA: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    ROWS_IN_RUNS: tl.constexpr,
    COLUMNS_IN_RUNS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ALLOW_TF32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HALVES: tl.constexpr,
    NUM_SLOTS: tl.constexpr = 2,
):
    """slot[rank] of each dst_rank = x[batches, rows] @ w[batches][:, columns] + bias; signal it.

    The kernel waits for nothing: a slot is free by rule 1 of the protocol. It reads the epoch on the device, so that a
    replayed graph moves on. Programs share the tiles of all chunks; a chunk must have at least one element.
    """
    tl.assume(K > 0)
    epoch = next_push(segments_ptr, rank, GROUP_SIZE)
    num_m = num_tiles(rows, BLOCK_M, ROWS_IN_RUNS)
    num_n = num_tiles(columns, BLOCK_N, COLUMNS_IN_RUNS)
    tiles_in_chunk = batches[0] * num_m * num_n
    call = (segments_ptr, rank, epoch, fingerprint, tiles_in_chunk)
    num_programs = tl.num_programs(0)

    stored_tile = tl.program_id(0) - num_programs
    num_stored = 0  # tiles of stored_rank's chunk that are stored but not reported
    stored_rank = rank
    # The loop is flattened: the loads of a tile are under way while the tile before it is stored.
    for tile in tl.range(tl.program_id(0), tiles_in_chunk * GROUP_SIZE, num_programs, flatten=USE_TMA):
        computed = _find(tile, rank, num_m, num_n, tiles_in_chunk, GROUP_SIZE, GROUP_M)
        acc = _multiply(
            x,
            w,
            computed,
            batches,
            rows,
            columns,
            M,
            N,
            K,
            w_strides,
            USE_TMA,
            W_TRANSPOSED,
            ROWS_IN_RUNS,
            COLUMNS_IN_RUNS,
            EVEN_K,
            ALLOW_TF32,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )

        # The stored tile is found again from a counter of its own, so that the next tile's loads do not depend on this
        # tile's store.
        stored_tile += num_programs
        stored = _find(stored_tile, rank, num_m, num_n, tiles_in_chunk, GROUP_SIZE, GROUP_M)
        dst_rank = stored[0]
        # A finished chunk is reported one tile late: its stores have landed by now, so the release
        # does not stall.
        if (dst_rank != stored_rank) & (num_stored > 0):
            report(call, stored_rank, num_stored, COUNTERS, FLAGS, GROUP_SIZE, NUM_SLOTS)
            num_stored = 0
        slot = slot_of(tl.load(segments_ptr + dst_rank), epoch, slot_bytes, HEADER_BYTES, NUM_SLOTS, DTYPE)
        chunk = slot + tl.cast(rank, tl.int64) * chunk_numel
        _epilogue(acc, chunk, bias_ptr, stored, rows, columns, ROWS_IN_RUNS, COLUMNS_IN_RUNS, HALVES)
        num_stored += 1
        stored_rank = dst_rank
    if num_stored > 0:
        report(call, stored_rank, num_stored, COUNTERS, FLAGS, GROUP_SIZE, NUM_SLOTS)
