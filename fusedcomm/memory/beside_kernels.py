"""Copies by the host that do not wait for kernels."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def beside_kernels(device: torch.device) -> Iterator[None]:
    """A context in which copies do not wait for kernels that wait for peers; they are done at its end."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The host's only stream, at a priority that no other stream here has.

    torch draws streams from a pool of 32 for each priority, and then the same again: drawn anew for each use, it
    becomes in time the stream of a kernel that waits for a peer.
    """
    return torch.cuda.Stream(device, priority=-2)
