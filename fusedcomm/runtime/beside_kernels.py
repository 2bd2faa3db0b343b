"""Copies by the host that do not wait for kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def beside_kernels(device: torch.device) -> Iterator[None]:
    """A context whose copies do not wait for kernels that wait for peers, and are done at its end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=-1)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
