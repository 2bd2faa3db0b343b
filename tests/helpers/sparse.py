"""Tensors of many gigabytes, of which only the pages that are touched take memory."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

MAP_NORESERVE = 0x4000  # Linux; the mmap module has no name for it before Python 3.13
_BEFORE = 2**31  # elements: an index that has wrapped to a negative one finds a zero, and no end of the memory


def sparse(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A flat tensor of zeros. The test is skipped where the kernel reserves no more than there is."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    num_bytes = (_BEFORE + numel) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except (OSError, MemoryError) as error:
        pytest.skip(f"this machine must reserve {num_bytes} bytes that are not used, but cannot ({error})")
    return torch.frombuffer(memory, dtype=dtype)[_BEFORE:]
