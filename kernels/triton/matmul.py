"""The main loop of every matmul here: one tile of x @ w, accumulated in fp32."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.bundles import Sizes
from fusedcomm.kernels.triton.primitives import in_units, rounded, span_index, tile_coords
from fusedcomm.kernels.triton.ptx import INTERPRET
from fusedcomm.kernels.triton.scales import block_of, scaled, w_step


@triton.jit
def sizes_in_units(sizes, COLUMNS: tl.constexpr, TRAITS: tl.constexpr):
    """``sizes`` as multiples of their units, for the compiler to see; COLUMNS divides the columns of a chunk."""
    M, N, K, w_stride_batch, w_stride_k, w_stride_n, chunk_numel, slot_bytes = sizes
    w_unit: tl.constexpr = TRAITS.w_unit
    return Sizes(
        M,
        in_units(N, TRAITS.n_unit),
        in_units(K, TRAITS.k_unit),
        in_units(w_stride_batch, w_unit),
        w_stride_k if TRAITS.w_transposed else in_units(w_stride_k, w_unit),
        in_units(w_stride_n, w_unit) if TRAITS.w_transposed else w_stride_n,
        in_units(chunk_numel, COLUMNS),
        slot_bytes,
    )


@triton.jit
def num_tiles(span, BLOCK: tl.constexpr, IN_RUNS: tl.constexpr, SHIFT: tl.constexpr = 0):
    """The number of tiles of a Span, which end at the ends of its runs if IN_RUNS (Traits)."""
    several: tl.constexpr = IN_RUNS == 1
    num_runs = tl.cdiv(span.size, span.inner) if several else 1
    return num_runs * tl.cdiv((span.inner if several else span.size) + SHIFT, BLOCK)


@triton.jit
def tile_range(tile, span, BLOCK: tl.constexpr, IN_RUNS: tl.constexpr):
    """First index of a tile of a Span, and the index before which it ends."""
    if IN_RUNS == 1:
        tiles_in_run = tl.cdiv(span.inner, BLOCK)
        run_first = (tile // tiles_in_run) * span.inner
        first = run_first + (tile % tiles_in_run) * BLOCK
        end = min(run_first + span.inner, span.size)
    else:
        first = tile * BLOCK
        end = span.size
    return first, end


@triton.jit
def column_range(tile, peer, span, BLOCK: tl.constexpr, TRAITS: tl.constexpr):
    """First index of a tile of columns, and the indices from and before which it is stored.

    A TMA load begins at a multiple of 16 bytes, or ends the context. So with a shift a tile begins up to so many
    indices before its run, in columns of a neighbour, where the index in w is a multiple of shift + 1.
    """
    if TRAITS.shift == 0:
        first, end = tile_range(tile, span, BLOCK, TRAITS.columns_in_runs)
        begin = first
    else:
        tiles_in_run = tl.cdiv(span.inner + TRAITS.shift, BLOCK)
        begin = (tile // tiles_in_run) * span.inner
        shift = in_units((span_index(begin, peer, span) % (TRAITS.shift + 1)).to(tl.int32), TRAITS.n_unit)
        first = begin + (tile % tiles_in_run) * BLOCK - shift
        end = min(begin + span.inner, span.size)
    return first, begin, end


@triton.jit
def column_index(first, begin, peer, span, IN_RUNS: tl.constexpr):
    """Index in w of a tile's first column, which may be outside of the run that begins at ``begin``."""
    return span_index(begin, peer, span, IN_RUNS == 2) + (first - begin)


@triton.jit
def tile_indices(first, peer, span, BLOCK: tl.constexpr, IN_RUNS: tl.constexpr):
    """Offsets of the indices of a tile [BLOCK], 64 bits wide; in a run the compiler sees that they are consecutive."""
    offsets = tl.arange(0, BLOCK)
    return span_index(first, peer, span, IN_RUNS == 2) + offsets if IN_RUNS else span_index(first + offsets, peer, span)


@triton.jit
def tile_of_chunk(tile, num_m, num_n, TILE: tl.constexpr, TRAITS: tl.constexpr):
    """The batch, tile row and tile column of a tile."""
    batch = tile * 0 if TRAITS.one_batch else tile // (num_m * num_n)
    tile_m, tile_n = tile_coords(tile - batch * (num_m * num_n), num_m, num_n, TILE.group_m)
    return batch, tile_m, tile_n


@triton.jit
def load_block(ptr, rows, row_stride, columns, column_stride, mask):
    return tl.load(ptr + rows[:, None] * row_stride + columns[None, :] * column_stride, mask, other=0.0)


@triton.jit
def multiply(a, b, acc, scales, mask, x_step, w_step, TRAITS: tl.constexpr):
    """acc + a @ b, in fp32. ``scales`` and behind it: arguments of `scaled`, for this product alone.

    A float8 product is added as a whole, unless ``fast``: Hopper's sums of them have fewer bits than fp32. (A dot with
    an accumulator and `max_num_imprecise_acc` reads wgmma's registers before its wait, in Triton 3.9.)
    """
    PRECISION: tl.constexpr = "tf32" if TRAITS.allow_tf32 else "ieee"
    if INTERPRET:  # the interpreter's dot is wrong on bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    if TRAITS.scaled is None or TRAITS.scaled.fast:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        acc += scaled(tl.dot(a, b, input_precision=PRECISION), scales, mask, x_step, w_step, False, TRAITS)
    return acc


@triton.jit
def matmul_tile(operands, K, x_stride, sizes, TILE: tl.constexpr, TRAITS: tl.constexpr):
    """x[x_rows] @ w[:, w_columns] in fp32 [BLOCK_M, BLOCK_N]. Where a mask is false, the result can be anything.

    Descriptors read zeros beyond K. Where BLOCK_K does not divide K, w's descriptor has a dim for the batches: if they
    lay below one another, zeros of x would meet the next one (0 * inf is NaN).
    """
    x, x_rows, x_mask, w, w_row, w_columns, w_mask, scales = operands
    acc = tl.full((TILE.block_m, TILE.block_n), 0.0, tl.float32)
    ks = tl.arange(0, TILE.block_k)
    for k in range(0, K, TILE.block_k):
        if TRAITS.by_tma:
            a = load_x_box(x, x_rows, k)
            b = load_box(w, w_row, k, w_columns, TRAITS.w_transposed)
        else:
            mask = x_mask[:, None] if TRAITS.even_k else x_mask[:, None] & (ks < K - k)[None, :]
            a = load_block(x, x_rows, x_stride, k + ks, 1, mask)
            mask = w_mask[None, :] if TRAITS.even_k else w_mask[None, :] & (ks < K - k)[:, None]
            b = load_block(w, (k + ks).to(tl.int64), sizes.w_stride_k, w_columns, sizes.w_stride_n, mask)
        acc = multiply(a, b, acc, scales, x_mask, block_of(k, TRAITS), w_step(k, sizes.N, TRAITS), TRAITS)
    return acc


@triton.jit
def load_x_box(x, rows, k):
    """x[rows:, k:] by descriptor. A box of a slot may end behind a chunk, in rows that are not stored."""
    if len(x.block_shape) == 2:
        box = x.load([rows, k])
    else:
        box = x.load([rows[0], rows[1], k]).reshape(x.block_shape[1], x.block_shape[2])
    return box


@triton.jit
def row_of_batch(w, batch, sizes, W_TRANSPOSED: tl.constexpr, PARTS: tl.constexpr = 1):
    """Start of a batch in w's descriptor: a row, or an index in front, PARTS per batch."""
    rows = sizes.N if W_TRANSPOSED else sizes.K
    return (batch * (rows if len(w.block_shape) == 2 else PARTS)).to(tl.int32)


@triton.jit
def load_box(w, w_row, k, column, W_TRANSPOSED: tl.constexpr):
    """w[k:, column:] of one batch or part of K, by descriptor."""
    if len(w.block_shape) == 2:
        box = w.load([w_row + column, k]) if W_TRANSPOSED else w.load([w_row + k, column])
    else:
        box = w.load([w_row, column, k]) if W_TRANSPOSED else w.load([w_row, k, column])
        box = box.reshape(w.block_shape[1], w.block_shape[2])
    return box.T if W_TRANSPOSED else box


@triton.jit
def _store_part(
    acc,
    ptr,
    rows,
    row_mask,
    j,
    j_begin,
    j_end,
    bias_ptr,
    w_scales,
    peer,
    columns,
    IN_RUNS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    BLOCK_N: tl.constexpr = acc.shape[1]
    offsets = tl.arange(0, BLOCK_N)
    mask = offsets < j_end - j
    if SHIFT > 0:
        mask &= offsets >= j_begin - j
    if SHIFT > 0:
        at = column_index(j, j_begin, peer, columns, IN_RUNS) + offsets
    else:
        at = tile_indices(j, peer, columns, BLOCK_N, IN_RUNS)
    if w_scales is not None:
        acc *= tl.load(w_scales + at, mask, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + at, mask, other=0.0).to(tl.float32)[None, :]
    tl.store(
        ptr + j + rows[:, None] + offsets[None, :],
        rounded(acc, ptr.dtype.element_ty),  # the only rounding
        row_mask[:, None] & mask[None, :],
    )


@triton.jit
def store_tile(
    acc,  # [BLOCK_M, BLOCK_N]
    ptr,
    rows,  # where each row begins, from ptr on [BLOCK_M]
    row_mask,
    j,  # first column of the tile in a row, and those from and before which it is stored
    j_begin,
    j_end,
    bias_ptr,  # or None
    w_scales,  # of each column, or None
    peer,
    columns,  # Span of the columns in the bias and w_scales
    IN_RUNS: tl.constexpr,
    HALVES: tl.constexpr,
    SHIFT: tl.constexpr = 0,
):
    """Scale columns, add the bias, round, store. Stores are ordinary: no async proxy is between data and a flag."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    if HALVES:  # fewer registers and half the shared memory at a time
        left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        _store_part(left, ptr, rows, row_mask, j, j_begin, j_end, bias_ptr, w_scales, peer, columns, IN_RUNS, SHIFT)
        j += BLOCK_N // 2
        _store_part(right, ptr, rows, row_mask, j, j_begin, j_end, bias_ptr, w_scales, peer, columns, IN_RUNS, SHIFT)
    else:
        _store_part(acc, ptr, rows, row_mask, j, j_begin, j_end, bias_ptr, w_scales, peer, columns, IN_RUNS, SHIFT)
