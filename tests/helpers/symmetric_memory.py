"""Helpers for tests of CPU symmetric memory."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from fusedcomm.launch.ranks import RankPool

native = pytest.importorskip("fusedcomm.kernels.cpu.native", reason="the extension is not built")
native.register_symmetric_memory()

Ranks = Callable[[int], RankPool]
CPU = torch.device("cpu")
MISSING_S = 0.5  # how long tests wait for what never comes


def rendezvous(t: Tensor, group: dist.ProcessGroup | None = None) -> Any:
    group = group or dist.group.WORLD
    assert group is not None
    return symm_mem.rendezvous(t, group)


def make(numel: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Any]:
    t = symm_mem.empty(numel, dtype=dtype, device=CPU)
    return t, rendezvous(t)


def footprint() -> tuple[int, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("/memfd:fusedcomm-")
    num_fds = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            num_fds += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:fusedcomm-")
    return maps, num_fds


@contextlib.contextmanager
def timeout(seconds: float) -> Iterator[None]:
    before = os.environ.get("FUSEDCOMM_TIMEOUT_S")
    os.environ["FUSEDCOMM_TIMEOUT_S"] = str(seconds)
    try:
        yield
    finally:
        if before is None:
            del os.environ["FUSEDCOMM_TIMEOUT_S"]
        else:
            os.environ["FUSEDCOMM_TIMEOUT_S"] = before


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
