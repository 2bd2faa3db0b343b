"""This rank's shard of a parameter, with the gradients that the parameter would have."""

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
