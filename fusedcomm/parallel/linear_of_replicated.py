"""A linear layer with an x that all ranks hold alike: ``F.linear(x, weight, bias)`` for this rank's rows of the weight,
[out / R, K]. Only its backward communicates: the gradient of x is a sum over ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import gradients
from fusedcomm.ops.library import refuse_outside_ops
from fusedcomm.parallel.gradient_when_read import product
from fusedcomm.parallel.layouts import shards
from fusedcomm.parallel.shard_of import shard_of
from fusedcomm.parallel.unwritten import unwritten

NAME = "parallel.ColwiseParallel"  # for errors


def linear_of_replicated(linear: Any, x: Tensor, group: Group) -> Tensor:
    """For a plain x, whose gradient is summed by one `matmul_all_reduce`."""
    weight, bias = shards(linear)
    refuse_outside_ops(NAME, x, weight, bias)
    inputs = _autocast(x, weight, bias)
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in inputs):
        y = F.linear(*inputs)  # Dynamo traces no autograd.Function that saves something there
    else:
        y = _Linear.apply(*resolve(group), None, *inputs)
    return unwritten(y, x, linear.weight)


def linear_of_whole(linear: Any, x: DTensor, made: Tensor | None) -> Tensor:
    """For a DTensor, whose gradient is Partial, and multiplied when it is read.

    ``made``: the result without its gradients, if something has made it.
    """
    weight, bias = shards(linear)
    local = shard_of(x, (Partial(),))
    refuse_outside_ops(NAME, local, weight, bias)
    y = _Linear.apply(1, None, [made], *_autocast(local, weight, bias))
    return unwritten(y, x, linear.weight)


class _Linear(torch.autograd.Function):
    """``group_name``: None if the gradient of x is left to `product`."""

    @staticmethod
    def forward(
        ctx: Any, group_size: int, group_name: str | None, given: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad[3:]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.layout, ctx.group = gradients.layout_of(weight), (group_size, group_name)
        return F.linear(x, weight, bias) if given is None or given[0] is None else given[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[3:]
        grad_x = None
        if ctx.group[1] is None:
            grad_x = product(grad, weight, ctx.next_functions[0][0]) if needs_x else None
        else:
            x = x if x is None else gradients.same_on_all_ranks(x, ctx.group)
            if needs_x:
                grad_x = torch.ops.fusedcomm.matmul_all_reduce(grad, weight, None, "sum", *ctx.group)
        grad_weight = gradients.of_w(grad, x, ctx.layout) if needs_weight else None
        return None, None, None, grad_x, grad_weight, gradients.of_bias(grad) if needs_bias else None


def _autocast(*tensors: Tensor | None) -> list[Any]:
    """Cast to autocast's dtype, outside of the autograd.Function: its backward runs without autocast."""
    device_type = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]
