"""Scaled operands: recipes, float8 values with their scales, and gathered rows of both as they travel.

A row of a gather's payload is a row of x with its scales behind it, each part padded to `PADDED` bytes:

    [K values][scales]        where K is cut, one such piece for each rank

so that one signal covers both, and each row has the scales of its source.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

VALUES = (torch.float8_e4m3fn, torch.float8_e5m2)
BYTES = (torch.uint8, *VALUES)  # of gathers and exchanges: programs send float8 as bytes, or as it is
OUT_DTYPES = {15: torch.bfloat16, 5: torch.float16, 6: torch.float32}  # by c10::ScalarType
BLOCK = 128  # elements of K, and of N, with one scale
PADDED = 16  # bytes: rows of float8 begin at multiples, as tensor maps need
Shape = Sequence[int]


class Scaling(NamedTuple):
    """Elements of x [rows, K], or of w.mT [N, K], with one scale; 0 is all of a dim. Named as torch's ScalingType."""

    name: str
    rows: int
    k: int


class Recipe(NamedTuple):
    x: Scaling
    w: Scaling  # of w.mT


SCALINGS = {
    each.name: each
    for each in (
        Scaling("TensorWise", 0, 0),
        Scaling("RowWise", 1, 0),
        Scaling("BlockWise1x128", 1, BLOCK),
        Scaling("BlockWise128x128", BLOCK, BLOCK),
    )
}
RECIPES = tuple(
    Recipe(SCALINGS[x], SCALINGS[w])
    for x, w in (("TensorWise", "TensorWise"), ("RowWise", "RowWise"), ("BlockWise1x128", "BlockWise128x128"))
)
_REFUSED = {  # by the dtype of scales
    torch.float8_e8m0fnu: "BlockWise1x32 (MX)",
    torch.float8_e4m3fn: "BlockWise1x16 (NVFP4)",
}


def num_blocks(size: int, block: int) -> int:
    return 1 if block == 0 else -(-size // block)


def recipe_of(scale_x: Shape, scale_w: Shape, rows: Shape, k: int, w: Shape) -> Recipe:
    """The recipe by the shapes of scales, for x of ``rows`` rows of k elements and w [..., K, N]. Raises ValueError."""
    found = None
    for recipe in reversed(RECIPES):  # one row of one block is row-wise too
        if recipe.x.rows == 0:
            fits = [*scale_x] in ([], [1]) and [*scale_w] in ([], [1])
        else:
            k_blocks, n_blocks = num_blocks(w[-2], recipe.w.k), num_blocks(w[-1], recipe.w.rows)
            fits = [*scale_x] == [*rows, num_blocks(k, recipe.x.k)]
            fits = fits and [*scale_w] == [*w[:-2], k_blocks, n_blocks]
        found = recipe if fits else found
    if found is None:
        raise ValueError(
            f"scales must be of shapes [] or [1] and [] or [1]; {[*rows, 1]} and {[*w[:-2], 1, w[-1]]}; or "
            f"{[*rows, num_blocks(k, BLOCK)]} and {[*w[:-2], num_blocks(w[-2], BLOCK), num_blocks(w[-1], BLOCK)]}; got "
            f"{[*scale_x]} and {[*scale_w]}"
        )
    return found


def check_dtypes(x: Tensor, ws: Sequence[Tensor], scales: Sequence[Tensor], out_dtype: torch.dtype) -> None:
    for name, t in (("x", x), *(("w", w) for w in ws)):
        if t.dtype not in VALUES:
            raise ValueError(f"{name} must be float8_e4m3fn or float8_e5m2, got {t.dtype}")
    if x.dtype == torch.float8_e5m2 and any(w.dtype == torch.float8_e5m2 for w in ws):
        raise ValueError("x and w must not both be float8_e5m2")
    for scale in scales:
        if scale.dtype in _REFUSED:
            raise ValueError(f"scales must be float32, got {scale.dtype}: {_REFUSED[scale.dtype]} is not built")
        if scale.dtype != torch.float32:
            raise ValueError(f"scales must be float32, got {scale.dtype}")
        if scale.device != x.device:
            raise ValueError(f"scales must be on x's device {x.device}, got {scale.device}")
    check_out_dtype(out_dtype)


def check_out_dtype(out_dtype: torch.dtype) -> None:
    if out_dtype in VALUES:
        raise ValueError(
            f"out_dtype must not be {out_dtype}: a float8 result needs a scale, result_scale, which is not built"
        )
    if out_dtype not in OUT_DTYPES.values():
        raise ValueError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")


@dataclass(frozen=True)
class Scaled:
    """An operand of a matmul: values [..., M, N] and their scales, of as many dims or one. ``dtype``: the product's."""

    values: Tensor
    scale: Tensor  # of each dim one, one per element, or one per `BLOCK`
    dtype: torch.dtype
    fast: bool = field(default=False, kw_only=True)  # sums may have the tensor cores' bits, fewer than float32's

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def device(self) -> torch.device:
        return self.values.device


@dataclass(frozen=True)
class Payload:
    """Rows of x as bytes. ``ks``: K of each piece of a gathered row; ``block``: of K with one scale, 0 for all."""

    dtype: torch.dtype
    ks: tuple[int, ...]
    block: int

    @property
    def row_bytes(self) -> int:
        return sum(width(k, self.block) for k in self.ks)

    def pieces(self, rows: Tensor, ks: Sequence[int] | None = None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(K before it, values [..., k], scales [..., num_blocks(k)]) of each piece. ``ks``: as in `packed`."""
        start = before = 0
        for k in self.ks if ks is None else ks:
            behind = start + _padded(k)
            scales = rows[..., behind : behind + 4 * num_blocks(k, self.block)].view(torch.float32)
            yield before, rows[..., start : start + k].view(self.dtype), scales
            start, before = start + width(k, self.block), before + k

    def packed(self, rows: Tensor, x: Tensor, scale: Tensor, ks: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """(destination in rows, source) of the copies that fill them from x [..., K] and its scales; ``ks``: of the
        pieces that x is cut into, each with its scales.
        """
        per_row = (
            scale.expand(*x.shape[:-1], scale.shape[-1]) if scale.ndim == x.ndim else scale.expand(*x.shape[:-1], 1)
        )
        for before, values, scales in self.pieces(rows, ks):
            k, blocks = values.shape[-1], scales.shape[-1]
            first = before // self.block if self.block else 0
            yield values, x[..., before : before + k]
            yield scales, per_row[..., first : first + blocks]


def width(k: int, block: int) -> int:
    """Bytes of a piece of a row with its scales."""
    return _padded(k) + _padded(4 * max(1, num_blocks(k, block)))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // PADDED) * PADDED


def quantized(t: Tensor, scaling: Scaling, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values of t [..., rows, K], and the scales by which the largest of each block are the dtype's largest."""
    wide = t.to(torch.float32)
    if scaling.rows == scaling.k == 0:
        scale = _scale(wide.abs().amax() if t.numel() else wide.new_zeros(()), dtype)
        return rounded(wide / scale, dtype), scale
    rows, k = scaling.rows, scaling.k or t.shape[-1]
    padded = torch.nn.functional.pad(wide, (0, -t.shape[-1] % k if k else 0, 0, -t.shape[-2] % rows))
    blocks = padded.unflatten(-1, (-1, k) if k else (1, 0)).unflatten(-3, (-1, rows))  # [..., rows, b, K, b]
    amax = blocks.abs().amax((-3, -1)) if t.numel() else blocks.new_zeros((*blocks.shape[:-3], blocks.shape[-2]))
    scale = _scale(amax, dtype)
    values = (blocks / scale.unsqueeze(-2).unsqueeze(-1)).flatten(-2).flatten(-3, -2)
    return rounded(values[..., : t.shape[-2], : t.shape[-1]], dtype), scale


def _scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    scale = amax / torch.finfo(dtype).max
    return torch.where(scale > 0, scale, 1.0)


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return t.clamp(-most, most).to(dtype)
