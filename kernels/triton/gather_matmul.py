"""Matmul of what every rank has sent, source by source as the chunks arrive."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.matmul import (
    load_block,
    load_box,
    matmul_tile,
    multiply,
    num_tiles,
    store_tile,
    tile_indices,
    tile_of_chunk,
    tile_range,
)
from fusedcomm.kernels.triton.primitives import span_index
from fusedcomm.kernels.triton.rounds import end_round, must_poison, next_round, slot_of, source_rank, wait_source


@triton.jit
def _store(acc, out_ptr, bias_ptr, tile, src_rank, sizes, ROWS_IN_RUNS: tl.constexpr, HALVES: tl.constexpr):
    """Store a tile of src_rank's chunk, with the bias, to its rows of out."""
    batches, rows, _, M, N, _ = sizes
    b, tile_m, tile_n = tile
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    batch = span_index(b, src_rank, batches[1], batches[2], batches[3], batches[4])
    i, i_end = tile_range(tile_m, rows, BLOCK_M, ROWS_IN_RUNS)
    at = batch * M + tile_indices(i, src_rank, rows, BLOCK_M, ROWS_IN_RUNS)
    mask = tl.arange(0, BLOCK_M) < i_end - i
    columns = (N, 0, N, 0, 0)
    store_tile(acc, out_ptr, at * N, mask, tile_n * BLOCK_N, N, bias_ptr, 0, columns, True, HALVES)


@triton.jit
def _poison(
    out_ptr,
    num_tiles,
    tiles_in_chunk,
    num_m,
    num_n,
    rank,
    sizes,
    GROUP_SIZE: tl.constexpr,
    ROWS_IN_RUNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """NaN in every tile that this program has, or would have, stored."""
    nan = tl.full((BLOCK_M, BLOCK_N), float("nan"), tl.float32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        src_rank = source_rank(tile // tiles_in_chunk, rank, GROUP_SIZE)
        at = tile_of_chunk(tile % tiles_in_chunk, num_m, num_n, GROUP_M)
        _store(nan, out_ptr, None, at, src_rank, sizes, ROWS_IN_RUNS, False)


@triton.jit
def _operands(
    w,
    tile,
    src_rank,
    sizes,
    w_strides,
    W_TMA: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    ROWS_IN_RUNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x_rows of the chunk, x_mask, w, w_row, w_columns, w_mask of a tile, as matmul_tile takes them."""
    batches, rows, _, _, N, K = sizes
    b, tile_m, tile_n = tile
    batch = span_index(b, src_rank, batches[1], batches[2], batches[3], batches[4])
    i, i_end = tile_range(tile_m, rows, BLOCK_M, ROWS_IN_RUNS)
    offsets = tl.arange(0, BLOCK_M)
    x_rows = tl.cast(b, tl.int64) * rows[0] + i + offsets
    x_mask = offsets < i_end - i
    w_columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    w_mask = w_columns < N
    w_row = 0
    if W_TMA:
        w_columns = tile_n * BLOCK_N
        w_row = (batch * (N if W_TRANSPOSED else K)).to(tl.int32)
    else:
        w = w + batch * w_strides[0]
        if W_TRANSPOSED:  # otherwise they lie side by side, and 32 bits spare registers
            w_columns = w_columns.to(tl.int64)
    return x_rows, x_mask, w, w_row, w_columns, w_mask


@triton.jit
def _add_sources(
    acc,
    first_step,  # step of source_rank
    num_steps,
    slot,
    operands,
    chunk_numel,
    rank,
    columns,
    w_strides,
    GROUP_SIZE: tl.constexpr,
    COLUMNS_IN_RUNS: tl.constexpr,
    W_TMA: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,  # no block of BLOCK_K ends early
    ALLOW_TF32: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc + the products of some sources; one loop, so that loads stay in flight from source to source."""
    x_rows, x_mask, w, w_row, w_columns, w_mask = operands
    in_chunk = num_tiles(columns, BLOCK_K, COLUMNS_IN_RUNS)
    offsets = tl.arange(0, BLOCK_K)
    for block in range(first_step * in_chunk, (first_step + num_steps) * in_chunk):
        src_rank = source_rank(block // in_chunk, rank, GROUP_SIZE)
        k, k_end = tile_range(block % in_chunk, columns, BLOCK_K, COLUMNS_IN_RUNS)
        chunk = slot + tl.cast(src_rank, tl.int64) * chunk_numel
        mask = x_mask[:, None] if EVEN_K else x_mask[:, None] & (offsets < k_end - k)[None, :]
        a = load_block(chunk, x_rows, columns[0], k + offsets, 1, mask)
        if W_TMA:
            row = span_index(k, src_rank, columns[1], columns[2], columns[3], columns[4])
            b = load_box(w, w_row, row.to(tl.int32), w_columns, W_TRANSPOSED)
        else:
            w_rows = tile_indices(k, src_rank, columns, BLOCK_K, COLUMNS_IN_RUNS)
            mask = w_mask[None, :] if EVEN_K else w_mask[None, :] & (offsets < k_end - k)[:, None]
            b = load_block(w, w_rows, w_strides[1], w_columns, w_strides[2], mask)
        acc = multiply(a, b, acc, ALLOW_TF32)
    return acc


@triton.jit(do_not_specialize=["fingerprint", "rank"])
def gather_matmul_kernel(
    out_ptr,  # [..., N], contiguous
    w,  # descriptor or pointer, as matmul_tile takes it
    bias_ptr,  # [N], or None
    segments_ptr,  # [R] addresses of the ranks' segments
    batches,  # Spans over src_rank: (size, start, inner, outer_stride, peer_stride)
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
    FLAGS: tl.constexpr,
    HEADER_BYTES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SPLIT_K: tl.constexpr,
    W_TMA: tl.constexpr,
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
    END_ROUND: tl.constexpr,
    NUM_SLOTS: tl.constexpr = 2,
):
    """out[batches * M + rows] = sum over src_rank of slot[src_rank] @ w[batches][columns] + bias.

    Without SPLIT_K the sources own different rows, and are done one after the other. With SPLIT_K each source owns a
    part of K; a tile sums over them in the order of source_rank, the same in every run, and is rounded once.

    The kernel waits, bounded, for what pack_kernel or signal_kernel of each src_rank signals; every program waits for
    every source (end_round). On failure each program writes NaN where it would have written data.

    Chunks are loaded by pointer: peers wrote them by ordinary stores, which TMA loads (the async proxy) would see
    only behind a proxy fence.
    """
    round = next_round(segments_ptr, rank, fingerprint)
    failed = round[3] < 0
    slot = slot_of(round[1], round[3], slot_bytes, HEADER_BYTES, NUM_SLOTS, out_ptr.dtype.element_ty)
    num_m, num_n = num_tiles(rows, BLOCK_M, ROWS_IN_RUNS), tl.cdiv(N, BLOCK_N)
    tiles_in_chunk = batches[0] * num_m * num_n
    sizes = (batches, rows, columns, M, N, K)
    program, num_programs = tl.program_id(0), tl.num_programs(0)

    if SPLIT_K:
        num_all = tiles_in_chunk
        # The first tile takes the sources as they arrive; after it, all are there.
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        at = tile_of_chunk(program, num_m, num_n, GROUP_M)
        operands = _operands(w, at, 0, sizes, w_strides, W_TMA, W_TRANSPOSED, ROWS_IN_RUNS, BLOCK_M, BLOCK_N)
        for step in range(GROUP_SIZE):
            src_rank = source_rank(step, rank, GROUP_SIZE)
            round = next_round(segments_ptr, rank, fingerprint)
            failed = wait_source(src_rank, round, failed, FLAGS, GROUP_SIZE, NUM_SLOTS)
            acc = _add_sources(
                acc,
                step,
                tl.where(failed, 0, 1),
                slot,
                operands,
                chunk_numel,
                rank,
                columns,
                w_strides,
                GROUP_SIZE,
                COLUMNS_IN_RUNS,
                W_TMA,
                W_TRANSPOSED,
                EVEN_K,
                ALLOW_TF32,
                BLOCK_K,
            )
        _store(acc, out_ptr, bias_ptr, at, 0, sizes, ROWS_IN_RUNS, HALVES)
        for tile in range(program + num_programs, tl.where(failed, 0, num_all), num_programs):
            at = tile_of_chunk(tile, num_m, num_n, GROUP_M)
            operands = _operands(w, at, 0, sizes, w_strides, W_TMA, W_TRANSPOSED, ROWS_IN_RUNS, BLOCK_M, BLOCK_N)
            acc = _add_sources(
                tl.zeros((BLOCK_M, BLOCK_N), tl.float32),
                0,
                GROUP_SIZE,
                slot,
                operands,
                chunk_numel,
                rank,
                columns,
                w_strides,
                GROUP_SIZE,
                COLUMNS_IN_RUNS,
                W_TMA,
                W_TRANSPOSED,
                EVEN_K,
                ALLOW_TF32,
                BLOCK_K,
            )
            _store(acc, out_ptr, bias_ptr, at, 0, sizes, ROWS_IN_RUNS, HALVES)
    else:
        num_all = tiles_in_chunk * GROUP_SIZE
        for step in range(GROUP_SIZE):
            src_rank = source_rank(step, rank, GROUP_SIZE)
            failed = wait_source(
                src_rank, next_round(segments_ptr, rank, fingerprint), failed, FLAGS, GROUP_SIZE, NUM_SLOTS
            )
            chunk = slot + tl.cast(src_rank, tl.int64) * chunk_numel
            # Tiles are dealt out through all chunks, so that no program is the first in each of them.
            first = (program + num_programs - (step * tiles_in_chunk) % num_programs) % num_programs
            for tile in range(first, tl.where(failed, 0, tiles_in_chunk), num_programs):
                at = tile_of_chunk(tile, num_m, num_n, GROUP_M)
                x_rows, x_mask, w_batch, w_row, w_columns, w_mask = _operands(
                    w, at, src_rank, sizes, w_strides, W_TMA, W_TRANSPOSED, ROWS_IN_RUNS, BLOCK_M, BLOCK_N
                )
                acc = matmul_tile(
                    chunk,
                    w_batch,
                    x_rows,
                    x_mask,
                    w_row,
                    w_columns,
                    w_mask,
                    columns[0],
                    w_strides[1],
                    w_strides[2],
                    False,
                    W_TMA,
                    W_TRANSPOSED,
                    EVEN_K,
                    ALLOW_TF32,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                )
                _store(acc, out_ptr, bias_ptr, at, src_rank, sizes, ROWS_IN_RUNS, HALVES)
    round = next_round(segments_ptr, rank, fingerprint)
    if must_poison(round, failed, FLAGS, GROUP_SIZE, NUM_SLOTS):
        _poison(
            out_ptr,
            num_all,
            tiles_in_chunk,
            num_m,
            num_n,
            rank,
            sizes,
            GROUP_SIZE,
            ROWS_IN_RUNS,
            BLOCK_M,
            BLOCK_N,
            GROUP_M,
        )
    if END_ROUND:
        end_round(round)
