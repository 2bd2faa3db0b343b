"""Helpers for tests of CPU symmetric memory."""

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed import HashStore, Store

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


def timeout(seconds: float) -> contextlib.AbstractContextManager[object]:
    return mock.patch.dict(os.environ, FUSEDCOMM_TIMEOUT_S=str(seconds))


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


CHILD_S = 60  # a child that takes longer hangs


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


class CutStore(Store):
    """``calls`` calls succeed; the later ones set ``blocked``, and block until ``back`` is set."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.inner = HashStore()
        self.calls_left = calls
        self.blocked, self.back = threading.Event(), threading.Event()

    def _call(self, name: str, *args: Any) -> Any:
        self.calls_left -= 1
        if self.calls_left < 0:
            self.blocked.set()
            assert self.back.wait(60)
        return getattr(self.inner, name)(*args)


for _name in ("set", "get", "check", "add", "delete_key", "multi_get"):
    setattr(CutStore, _name, partialmethod(CutStore._call, _name))
