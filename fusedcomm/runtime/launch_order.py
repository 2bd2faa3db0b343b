"""Kernels that wait for peers run in one order per device, across groups and streams. Otherwise two could block each
other: on one rank A's wait holds the SMs that B's push needs, and on the next rank it is the other way round.

A captured graph orders its own kernels. The stream on which it is replayed must order it against eager calls: replay it
on the stream of those calls, or let one stream wait for the other.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fusedcomm.runtime.workspace import Workspace

_last: dict[tuple[torch.device, int], torch.cuda.Event] = {}
_locks: dict[tuple[torch.device, int], threading.RLock] = defaultdict(threading.RLock)


@contextmanager
def ordered(workspace: Workspace) -> Iterator[None]:
    """What is launched inside starts after everything that any thread launched inside earlier."""
    if workspace.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        yield
        return
    key = (workspace.device, workspace.lane)
    with _locks[key]:
        stream = torch.cuda.current_stream(workspace.device)
        if key in _last:
            stream.wait_event(_last[key])
        try:
            yield
        finally:
            _last[key] = stream.record_event()
