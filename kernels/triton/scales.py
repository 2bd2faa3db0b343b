"""Scales of float8 operands: where a tile's are, and when they are applied.

A product is scaled before it is added where scales change along K (`Scaled.block_k`, or sources that are parts of K),
otherwise their sum is, once. Triton 3.6 cannot return a tuple that has None in it: without scales they are 0.
"""

import triton
import triton.language as tl


@triton.jit
def scaled(acc, scales, mask, x_step, w_step, AT_END: tl.constexpr, TRAITS: tl.constexpr):
    """acc [BLOCK_M, BLOCK_N], a product or AT_END the sum, times those of a tile's ``scales`` that are due.

    They are so far behind the pointers. Columns with scales of their own get them when they are stored.
    """
    if TRAITS.scaled is not None:
        by_block: tl.constexpr = TRAITS.scaled.block_k > 0
        x_by_block: tl.constexpr = by_block or (TRAITS.split_k and TRAITS.scaled.packed)
        if x_by_block != AT_END:
            at = scales.x + x_step
            acc *= tl.load(at, mask, other=0.0)[:, None] if len(at.shape) > 0 else tl.load(at)
        if by_block != AT_END and TRAITS.scaled.block_n != 1:
            acc *= tl.load(scales.w + w_step)
    return acc


@triton.jit
def of_columns(w_scales, batch, column, sizes, TRAITS: tl.constexpr):
    """Pointer to the scale of a tile's columns in the first block of K. ``column``: the first one, which tells for all;
    where each has its own, the pointer is to column 0's.
    """
    if TRAITS.scaled is not None:
        if TRAITS.scaled.by_batch:
            w_scales += batch * num_blocks(sizes.K, TRAITS) * num_columns(sizes.N, TRAITS)
        if TRAITS.scaled.block_n > 1:
            w_scales += column // TRAITS.scaled.block_n
    return w_scales


@triton.jit
def num_blocks(K, TRAITS: tl.constexpr):
    """The number of scales along K."""
    return tl.cdiv(K, TRAITS.scaled.block_k) if TRAITS.scaled.block_k > 0 else 1


@triton.jit
def num_columns(N, TRAITS: tl.constexpr):
    """The number of scales along N."""
    return tl.cdiv(N, TRAITS.scaled.block_n) if TRAITS.scaled.block_n > 0 else 1


@triton.jit
def block_of(k, TRAITS: tl.constexpr):
    """The block of K that index k is in."""
    block = 0
    if TRAITS.scaled is not None and TRAITS.scaled.block_k > 0:
        block = k // TRAITS.scaled.block_k
    return block


@triton.jit
def w_step(k, N, TRAITS: tl.constexpr):
    """From w's scale of the first block of K to that of index k."""
    step = 0
    if TRAITS.scaled is not None:
        step = block_of(k, TRAITS) * num_columns(N, TRAITS)
    return step
