"""The arithmetic of chunks done at once, on real tensors: for `pipelined`, and to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fusedcomm.run.profiler import lane


class Now:
    """As `fusedcomm.plan.builder.Builder`, for tensors on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def multiply(self, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, *, adds: bool = False) -> None:
        if out.numel() == 0:
            return
        if out.shape[0] == 1:
            x, w, out = x[0], w[0], out[0]
        multiply(x, w, bias, out, adds=adds)

    def copy(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source)

    def temporary(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def reshape(self, t: Tensor, *shape: int) -> Tensor:
        return t.reshape(shape)

    def contiguous(self, t: Tensor) -> Tensor:
        return t.contiguous()

    def is_at(self, t: Tensor, other: Tensor) -> bool:
        return t.data_ptr() == other.data_ptr()

    def lane(self, name: str, peer: int | None = None) -> AbstractContextManager[None]:
        return lane(name, peer)


def multiply(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, *, adds: bool) -> None:
    """``out = x @ w + bias``, or ``out += x @ w``: 2-D, or 3-D with batches; one rounding."""
    batched = out.dim() == 3
    added = out if adds else bias
    if added is not None:
        (torch.baddbmm if batched else torch.addmm)(added, x, w, out=out)
    else:
        (torch.bmm if batched else torch.mm)(x, w, out=out)
