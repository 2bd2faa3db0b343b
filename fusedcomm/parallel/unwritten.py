"""Writes between forward and backward. A DTensor and its local tensor count them apart, and the ops see neither count:
`shard_of` gives them a tensor of its own count, and `unwritten` saves both for the backward that needs the values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def unwritten(y: Tensor, x: Tensor, weight: Tensor, keeps_x: bool = True) -> Tensor:
    """y, a product of ``x`` and ``weight``, whose backward raises if a DTensor that it needs was written meanwhile.

    ``keeps_x``: whether the gradient of the weight is made of x itself, and not of what was gathered from it.
    """
    if torch.compiler.is_compiling() or not y.requires_grad:
        return y
    needed = [x] if keeps_x and weight.requires_grad else []
    needed += [weight] if x.requires_grad else []
    counts = [_count(each) for t in needed if isinstance(t, DTensor) and not _is_cast(t) for each in counted(t)]
    return _Unwritten.apply(y, *counts) if counts else y  # type: ignore[no-any-return]


def counted(t: DTensor) -> list[Tensor]:
    """The tensors whose versions rise when t is written."""
    found = [t, t._local_tensor]
    return found if t._base is None else [*found, t._base._local_tensor]


def _count(t: Tensor) -> Tensor:
    """An empty tensor with the version counter of t, which keeps no memory and costs saved-tensor hooks nothing."""
    with torch._C._DisableTorchDispatch():
        count = Tensor.detach(t)
        count.data = torch.empty(0, device="cpu")
    return count


def _is_cast(t: Tensor) -> bool:
    """Whether autocast has made a copy of t, which the backward then needs in its place."""
    device_type = t.device.type
    if not torch.is_autocast_enabled(device_type):
        return False
    return t.dtype not in (torch.float64, torch.get_autocast_dtype(device_type))


class _Unwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *counts: Tensor) -> Tensor:
        if not y._is_view():
            ctx.mark_dirty(y)  # otherwise the result would be a view of y, which nobody may write
        ctx.save_for_backward(*counts)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is not None:
            _ = ctx.saved_tensors  # raises
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)
