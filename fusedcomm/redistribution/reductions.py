"""Reductions, by a rank itself, of parts that have arrived."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def reduced(parts: list[Tensor], op: str, divisor: int) -> Tensor:
    """The parts reduced one after the other, in their order; float16 and bfloat16 are rounded once, at the end.

    Parts are divided before they are added, as their sum might overflow where the average does not.
    """
    dtype = wide = parts[0].dtype
    if op in ("sum", "product") and dtype in (torch.float16, torch.bfloat16):
        wide = torch.float32
    total = averaged(parts[0].to(wide), divisor)
    for part in parts[1:]:
        total = _OPS[op](total, averaged(part.to(wide), divisor))
    return total.to(dtype)


def averaged(total: Tensor, divisor: int) -> Tensor:
    """``total / divisor``, where whole numbers are rounded towards 0."""
    if divisor == 1:
        return total
    if total.is_floating_point() or total.is_complex():
        return total / divisor
    return torch.div(total, divisor, rounding_mode="trunc")
