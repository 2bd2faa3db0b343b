"""Chains of casts: whether one cast, from the first dtype to the last, gives the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # with infinities, signed zeros and subnormals


def is_one_cast(dtypes: Sequence[torch.dtype]) -> bool:
    """Whether casts through ``dtypes`` equal one cast from the first to the last."""
    dtypes = [dtype for dtype, _ in groupby(dtypes)]
    first, last = dtypes[0], dtypes[-1]
    return all(each == first or (_keeps(first, each) and _reads_alike(first, each, last)) for each in dtypes[1:-1])


def _keeps(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether b has every value of a."""
    if a.is_complex or b.is_complex:
        return False
    if b.is_floating_point:
        return b in _WIDE and _fits(a, torch.finfo(b))
    if a.is_floating_point or b is torch.bool:
        return False
    if a is torch.bool:
        return True
    own, other = torch.iinfo(a), torch.iinfo(b)
    return other.min <= own.min and own.max <= other.max


def _fits(a: torch.dtype, b: torch.finfo) -> bool:
    if a is torch.bool:
        return True
    if not a.is_floating_point:
        return torch.iinfo(a).max <= min(2 / b.eps, b.max)
    own = torch.finfo(a)
    smallest = min(own.tiny, own.tiny * own.eps)
    return own.eps >= b.eps and own.max <= b.max and b.tiny * b.eps <= smallest


def _reads_alike(a: torch.dtype, b: torch.dtype, last: torch.dtype) -> bool:
    """Whether equal numbers in a and b are cast alike: out-of-range casts to an integer depend on the dtype."""
    return last.is_floating_point or a.is_floating_point == b.is_floating_point
