"""Kernels that wait for peers run in one order per device, across groups and streams. Otherwise two could block each
other: on one rank A's wait holds the SMs that B's push needs, and on the next rank it is the other way round.

A captured graph orders its own kernels. Its replays need an order against eager calls: replay it on their stream, or
let one stream wait for the other.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusedcomm.kernels.native_part import native
from fusedcomm.memory.workspace import Workspace


class _Order:
    """As native.LaunchOrder."""

    def __init__(self) -> None:
        self._lock, self._last = threading.RLock(), None
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def begin(self, stream: torch.cuda.Stream) -> None:
        if self._last is not None:
            stream.wait_event(self._last)

    def end(self, stream: torch.cuda.Stream) -> None:
        self._last = stream.record_event()


_orders: dict[tuple[torch.device, int], Any] = {}


def order_of(workspace: Workspace) -> Any:
    """The order that plans of the native part and launches from Python share."""
    key = workspace.device, workspace.lane
    return _orders.get(key) or _orders.setdefault(key, _Order() if native is None else native.LaunchOrder())


@contextmanager
def ordered(workspace: Workspace) -> Iterator[None]:
    """Launches inside start after all earlier launches inside, of any thread."""
    if workspace.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        yield
        return
    order, stream = order_of(workspace), torch.cuda.current_stream(workspace.device)
    order.acquire()
    try:
        order.begin(stream)
        try:
            yield
        finally:
            order.end(stream)
    finally:
        order.release()
