"""CUDA graphs: whether one is captured, and the calls before it that allocate and load for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusedcomm.kernels.native_part import native

WARM_UP = "call the op once with these shapes on every rank inside fusedcomm.before_capture() first"
MOST_LOADED = 1 << 14  # `inference.Linear.warm_up` loads one for each number of rows

_warm_ups = 0  # how many before_capture() this process is in; autograd calls ops on threads of its own


@contextmanager
def before_capture() -> Iterator[None]:
    """Run calls as the capture of a CUDA graph will run them, in a ``with`` statement around them.

    A capture can neither load kernels nor make memory, and takes ``fused`` where a call outside of it may run
    ``chunked``. Inside the statement each call on a GPU is planned as in a capture, so that its algorithm is proved,
    its memory made and its kernels loaded by the end. A call that a capture meets first raises RuntimeError. Enter it
    alike on every rank, with the shapes, dtypes, strides and alignments of the capture. On CPUs it changes nothing.

    Example, on each of 2 ranks::

        x, w = torch.ones(4, 8), torch.ones(8, 6)
        with fusedcomm.before_capture():
            y = fusedcomm.matmul_all_reduce(x, w)
        assert (y == 16).all()
    """
    _count_warm_ups(1)
    try:
        yield
    finally:
        _count_warm_ups(-1)


def _count_warm_ups(more: int) -> None:
    global _warm_ups
    _warm_ups += more
    if native is not None:
        native.set_warm_ups(_warm_ups)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_for_capture(device: torch.device) -> bool:
    """Whether a call must run as in a capture: it is in one, or comes before one."""
    return device.type == "cuda" and (_warm_ups > 0 or torch.cuda.is_current_stream_capturing())


class LoadedCalls(dict[Any, None]):
    """The last calls with loaded kernels, oldest first. More than a program captures need not be kept.

    Kernels count the bytes of a slot in 32 or 64 bits: a workspace that grows keeps the kernels of most calls.
    """

    def has(self, call: Any, slot_bytes: int) -> bool:
        return (call, slot_bytes < 1 << 31) in self

    def add(self, call: Any, slot_bytes: int) -> None:
        key = call, slot_bytes < 1 << 31
        self.pop(key, None)
        self[key] = None
        if len(self) > MOST_LOADED:
            del self[next(iter(self))]
