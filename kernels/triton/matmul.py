"""The main loop of every matmul here: one tile of x @ w, accumulated in fp32."""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.primitives import INTERPRET, span_index


@triton.jit
def num_tiles(span, BLOCK: tl.constexpr, IN_RUNS: tl.constexpr):
    """Tiles of a Span. IN_RUNS: none crosses the end of a run of ``inner`` consecutive indices."""
    size, inner = span[0], span[2]
    return tl.cdiv(size, inner) * tl.cdiv(inner, BLOCK) if IN_RUNS else tl.cdiv(size, BLOCK)


@triton.jit
def tile_range(tile, span, BLOCK: tl.constexpr, IN_RUNS: tl.constexpr):
    """First index of a tile of a Span, and the index before which it ends."""
    size, inner = span[0], span[2]
    if IN_RUNS:
        tiles_in_run = tl.cdiv(inner, BLOCK)
        run_first = (tile // tiles_in_run) * inner
        first = run_first + (tile % tiles_in_run) * BLOCK
        end = min(run_first + inner, size)
    else:
        first = tile * BLOCK
        end = size
    return first, end


@triton.jit
def tile_indices(first, peer, span, BLOCK: tl.constexpr, IN_RUNS: tl.constexpr):
    """Where the indices of a tile lie [BLOCK], 64 bits wide; in a run visibly consecutive."""
    offsets = tl.arange(0, BLOCK)
    if IN_RUNS:
        indices = span_index(first, peer, span[1], span[2], span[3], span[4]) + offsets
    else:
        indices = span_index(first + offsets, peer, span[1], span[2], span[3], span[4])
    return indices


@triton.jit
def matmul_tile(
    x,  # descriptor of [num_batches * M, K], or pointer
    w,  # descriptor of [num_batches * K, N] ([num_batches * N, K]: W_TRANSPOSED), or pointer
    x_rows,  # rows of x: the first one (descriptors), or all [BLOCK_M]
    x_mask,
    w_row,  # first row of this batch in w's descriptor
    w_columns,  # columns of w: the first one (descriptors), or all [BLOCK_N]
    w_mask,
    K,
    w_stride_k,
    w_stride_n,
    USE_TMA: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    ALLOW_TF32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x[x_rows] @ w[:, w_columns] in fp32 [BLOCK_M, BLOCK_N]; anything where a mask is false.

    Descriptors fill what lies beyond K with zeros; beyond K of one batch lies the next batch of w,
    so the host uses them for batched w only if BLOCK_K divides K (0 * inf would be NaN).
    """
    PRECISION: tl.constexpr = "tf32" if ALLOW_TF32 else "ieee"
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ks = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        if USE_TMA:
            a = x.load([x_rows, k])
            at = [w_row + w_columns, k] if W_TRANSPOSED else [w_row + k, w_columns]
            b = w.load(at)
            if W_TRANSPOSED:
                b = b.T
        else:
            a_mask, b_mask = x_mask[:, None], w_mask[None, :]
            if not EVEN_K:
                a_mask &= (ks < K - k)[None, :]
                b_mask &= (ks < K - k)[:, None]
            a = tl.load(x + x_rows[:, None] * K + (k + ks)[None, :], a_mask, other=0.0)
            b_ptrs = w + (k + ks).to(tl.int64)[:, None] * w_stride_k + w_columns[None, :] * w_stride_n
            b = tl.load(b_ptrs, b_mask, other=0.0)
        if INTERPRET:  # its dot is wrong on bf16
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc
