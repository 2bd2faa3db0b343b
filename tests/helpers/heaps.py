"""Helpers for tests of the heap of results."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from tests.helpers.symmetric_memory import CPU, native

PAGE = os.sysconf("SC_PAGESIZE")
NUMEL = 2048
BYTES = 4 * NUMEL
MB = 1 << 20
CHILD_S = 60  # a child that takes longer hangs


def make_heap(num_bytes: int = 4 * MB, least_bytes: int = 0) -> Any:
    return native.ResultsHeap(symm_mem.empty(num_bytes, dtype=torch.uint8, device=CPU), least_bytes)


def in_heap(heap: Any, numel: int = NUMEL) -> Tensor:
    """A tensor in a block, after results of its size were freed."""
    for _ in range(2):
        heap.empty([numel], torch.float32)
    t = heap.empty([numel], torch.float32)
    assert heap.place(t) is not None
    return t


def places(heap: Any, tensors: list[Tensor]) -> list[int | None]:
    return [heap.place(t) for t in tensors]


def in_child(body: Callable[[], object]) -> int:
    """The status of a forked child: 0 if the body is true there. A child that hangs is killed by its alarm."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_S)
        try:
            os._exit(0 if body() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1]
