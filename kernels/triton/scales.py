"""Scales of float8 operands: where a tile's are, and when they are applied.

A product is scaled before it is added where scales change along K (`Scaled.block_k`, or sources that are parts of K),
otherwise their sum is, once.
"""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.bundles import Scales


@triton.jit
def scaled(acc, scales, mask, x_step=0, w_step=0):
    """acc [BLOCK_M, BLOCK_N] times the scales so far behind ``scales``: of its rows, or one for all, and one of w."""
    if scales.x is not None:
        at = scales.x + x_step
        acc *= tl.load(at, mask, other=0.0)[:, None] if len(at.shape) > 0 else tl.load(at)
    if scales.w is not None:
        acc *= tl.load(scales.w + w_step)
    return acc


@triton.jit
def of_tile(x_scales, w_scales, column, TRAITS: tl.constexpr):
    """Pointers to the scales of a tile in the first block of K; ``column``: its first one. Columns with scales of their
    own have them from `of_columns`.
    """
    if w_scales is not None and TRAITS.scaled.block_n > 1:
        w_scales += column // TRAITS.scaled.block_n
    elif w_scales is not None and TRAITS.scaled.block_n == 1:
        w_scales = None
    return Scales(x_scales, w_scales)


@triton.jit
def of_columns(w_scales, TRAITS: tl.constexpr):
    """w_scales [N], or None: columns share them."""
    if w_scales is not None and TRAITS.scaled.block_n != 1:
        w_scales = None
    return w_scales


@triton.jit
def of_blocks(scales, TRAITS: tl.constexpr):
    """Those of a tile's scales that change along K."""
    in_blocks: tl.constexpr = TRAITS.scaled is not None and TRAITS.scaled.block_k > 0
    return Scales(scales.x if in_blocks or TRAITS.split_k else None, scales.w if in_blocks else None)


@triton.jit
def of_sums(scales, TRAITS: tl.constexpr):
    """Those that do not."""
    in_blocks: tl.constexpr = TRAITS.scaled is not None and TRAITS.scaled.block_k > 0
    return Scales(None if in_blocks or TRAITS.split_k else scales.x, None if in_blocks else scales.w)


@triton.jit
def num_blocks(K, TRAITS: tl.constexpr):
    """The number of scales along K."""
    return tl.cdiv(K, TRAITS.scaled.block_k) if TRAITS.scaled.block_k > 0 else 1


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
    step = block_of(k, TRAITS)
    if TRAITS.scaled is not None and TRAITS.scaled.block_n > 0:
        step *= tl.cdiv(N, TRAITS.scaled.block_n)
    return step
