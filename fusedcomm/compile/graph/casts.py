"""Chains of casts: whether one cast, from the first dtype to the last, gives the same."""

from collections.abc import Sequence
from itertools import groupby

import torch

_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # with infinities, signed zeros and subnormals


def is_one_cast(dtypes: Sequence[torch.dtype]) -> bool:
    """Whether casts through ``dtypes`` equal one cast from the first to the last."""
    first, *others = [dtype for dtype, _ in groupby(dtypes)]
    return all(between == first or _keeps(first, between) for between in others[:-1])


def _keeps(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether b has every value of a, as far as chains of floats need it."""
    return a in _WIDE and b in _WIDE and torch.promote_types(a, b) == b
