"""Copies by the host that do not wait for kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def beside_kernels(device: torch.device) -> Iterator[None]:
    """A context whose copies do not wait for kernels that wait for peers, and are done at its end."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of the host, of a priority that no other stream here has.

    torch draws streams from a pool of 32 for each priority, and then the same again: a stream that is drawn for each
    use becomes, in time, the one whose kernel waits for a peer.
    """
    return torch.cuda.Stream(device, priority=-2)
