"""This rank's shard of a parameter, with the gradients that the parameter would have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def shard_of(t: DTensor) -> Tensor:
    """``t.to_local()`` for t without partial sums. That of torch 2.11 makes zeros of a gradient that is None, and loses
    what a second derivative needs."""
    return t.to_local() if torch.compiler.is_compiling() else _ShardOf.apply(t)


class _ShardOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.placements, ctx.layout = t.device_mesh, t.placements, {"shape": t.shape, "stride": t.stride()}
        return t.to_local().data  # with a version counter of its own: see `unwritten`

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> DTensor | None:
        if grad is None:
            return None
        return DTensor.from_local(grad, ctx.mesh, ctx.placements, run_check=False, **ctx.layout)
