"""A linear layer with an x that is a replicated DTensor: ``F.linear(x, weight, bias)``, local in the forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F

from fusedcomm.ops import gradients
from fusedcomm.ops.library import refuse_outside_ops
from fusedcomm.parallel.gradient_when_read import product
from fusedcomm.parallel.layouts import shards
from fusedcomm.parallel.linear_of_replicated import autocast
from fusedcomm.parallel.shard_of import shard_of
from fusedcomm.parallel.unwritten import unwritten


def linear_of_whole(linear: Any, x: DTensor, made: Tensor | None) -> Tensor:
    """This rank's columns. ``made``: without its gradients, if something has made it."""
    weight, bias = shards(linear)
    local = shard_of(x, (Partial(),))
    refuse_outside_ops("parallel.ColwiseParallel", local, weight, bias)
    y = _LinearOfWhole.apply([made], *autocast(local, weight, bias))
    return unwritten(y, x, linear.weight)


class _LinearOfWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: list[Tensor | None], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _, needs_x, needs_weight, _ = ctx.needs_input_grad
        made = given[0]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.layout = gradients.layout_of(weight)
        return F.linear(x, weight, bias) if made is None else made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = product(grad, weight, ctx.next_functions[0][0]) if needs_x else None
        grad_weight = gradients.of_w(grad, x, ctx.layout) if needs_weight else None
        return None, grad_x, grad_weight, gradients.of_bias(grad) if needs_bias else None
