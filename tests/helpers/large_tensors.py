"""Tensors that no machine could fill, and launches in Triton's interpreter that compute only some tiles of them."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fusedcomm.memory.segment import HeaderLayout
from fusedcomm.plan import launches
from tests.helpers.virtual_ranks import VirtualRank


@contextmanager
def overflow_is_an_error(debug: bool = True) -> Iterator[None]:
    """Triton's own check of 32-bit sums, differences and products, in lanes behind a mask as well."""
    from triton.runtime.interpreter import interpreter_builder

    checked = dataclasses.replace(interpreter_builder.options, debug=debug, sanitize_overflow=True)
    with mock.patch.object(interpreter_builder, "options", checked):
        yield


@contextmanager
def only_programs(choose: Callable[[int], list[int]]) -> Iterator[None]:
    """Each program has one tile, and of ``num_tiles`` programs those of ``choose(num_tiles)`` run."""
    from triton.runtime.interpreter import interpreter_builder

    chosen: list[int] = []
    dims: list[int] = []

    def num_programs(s: Any, kind: str, num_tiles: int, *_: int) -> int:
        chosen[:], dims[:] = choose(num_tiles), (num_tiles, 1, 1)
        return len(chosen)

    def set_dim(*_: int) -> None:
        interpreter_builder.grid_dim = tuple(dims)

    def set_index(x: int, *_: int) -> None:
        interpreter_builder.grid_idx = (chosen[x], 0, 0)

    with (
        mock.patch.object(launches, "programs", num_programs),
        mock.patch.object(interpreter_builder, "set_grid_dim", set_dim),
        mock.patch.object(interpreter_builder, "set_grid_idx", set_index),
    ):
        yield


def large_ranks(group_size: int, slot_bytes: int) -> list[VirtualRank]:
    """Ranks whose slots are zeros; a page takes memory once it is touched."""
    num_bytes = HeaderLayout(group_size).segment_bytes(slot_bytes)
    segments = [sparse(num_bytes, torch.uint8) for _ in range(group_size)]
    return [VirtualRank(rank, segments, slot_bytes, 2) for rank in range(group_size)]


def slot_of(rank: VirtualRank, epoch: int, dtype: torch.dtype) -> torch.Tensor:
    start = rank.layout.slot(epoch, rank.slot_bytes)
    return rank.segment[start : start + rank.slot_bytes].view(dtype)


def signalled(rank: VirtualRank, epoch: int, fingerprint: int) -> None:
    rank.word(rank.layout.flag(epoch, 0), rank.group_size)[:] = epoch << 24 | fingerprint


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
