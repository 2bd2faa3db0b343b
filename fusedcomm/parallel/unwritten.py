"""Writes between forward and backward. A DTensor and its local tensor count them apart, and the ops see neither count:
`shard_of` gives them a tensor of its own count, and `unwritten` saves both for the backward that needs the values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


def shard_of(t: DTensor, grad_placements: Sequence[Placement] | None = None) -> Tensor:
    """``t.to_local(grad_placements=grad_placements)`` for t without partial sums. torch 2.11's turns a gradient of
    None into zeros, and breaks double backward."""
    if torch.compiler.is_compiling():
        return t.to_local(grad_placements=grad_placements)
    return _ShardOf.apply(t, grad_placements)  # type: ignore[no-any-return]


class _ShardOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: DTensor, grad_placements: Sequence[Placement] | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.placements = t.device_mesh, grad_placements or t.placements
        ctx.layout = {"shape": t.shape, "stride": t.stride()}
        return t.to_local().data  # with a version counter of its own: see `unwritten`

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[DTensor | None, None]:
        if grad is None:
            return None, None
        return DTensor.from_local(grad, ctx.mesh, ctx.placements, run_check=False, **ctx.layout), None


def unwritten(y: Tensor, x: Tensor, weight: Tensor, keeps_x: bool = True) -> Tensor:
    """Make the backward of y = x @ weight raise if a DTensor that it needs was written meanwhile.

    ``keeps_x``: whether the gradient of the weight is made of x itself, not of the gathered x.
    """
    if torch.compiler.is_compiling() or not y.requires_grad:
        return y
    needed = [x] if keeps_x and weight.requires_grad else []
    needed += [weight] if x.requires_grad else []
    counts = [each for t in needed if isinstance(t, DTensor) and not is_cast(t) for each in counts_of(t)]
    if not counts:
        return y
    with torch.autograd._unsafe_preserve_version_counter(y):  # selective checkpointing would take it for a write
        return _Unwritten.apply(y, *counts)  # type: ignore[no-any-return]


def counts_of(t: Tensor) -> list[Tensor]:
    """Empty tensors with the version counters of t, which keep no memory and cost saved-tensor hooks nothing."""
    bases = [each for each in (t, t._base) if isinstance(each, DTensor)]
    counted = [t, *(each._local_tensor for each in bases)]
    counts = []
    with torch._C._DisableTorchDispatch():
        for each in counted:
            counts.append(Tensor.detach(each))
            counts[-1].data = torch.empty(0, device="cpu")
    return counts


def is_cast(t: Tensor) -> bool:
    """Whether autocast has made a copy of t: the backward then needs that instead."""
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
