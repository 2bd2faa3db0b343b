"""Sibling linear layers of one replicated x. Only their backward communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import gradients
from fusedcomm.ops.library import refuse_outside_ops


def linears_of_replicated(
    name: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
) -> list[Tensor]:
    """``[F.linear(x, weight, bias) ...]`` for this rank's rows of the weights, [out / R, K].

    The gradient of x is the sum over ranks and weights, made by one `matmul_all_reduce`. ``name``: for errors.
    """
    refuse_outside_ops(name, x, *weights, *biases)
    group_size, group_name = resolve(group)
    x, *cast = autocast(x, *weights, *biases)
    needed = [t for t in (x, *cast) if t is not None and t.requires_grad]
    if not needed or not torch.is_grad_enabled():  # Dynamo traces no autograd.Function that saves something there
        return [F.linear(x, *each) for each in zip(cast[: len(weights)], cast[len(weights) :], strict=True)]
    return list(_LinearsOfReplicated.apply(group_size, group_name, x, *cast))


class _LinearsOfReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group_size: int, group_name: str, x: Tensor, *cast: Any) -> tuple[Tensor, ...]:
        count = len(cast) // 2
        weights, biases = cast[:count], cast[count:]
        needs_x, *needs = ctx.needs_input_grad[2:]
        saved = [x if any(needs[:count]) else None, *(weight if needs_x else None for weight in weights)]
        ctx.save_for_backward(*saved)
        ctx.layouts = [gradients.layout_of(weight) for weight in weights]
        ctx.group = (group_size, group_name)
        ctx.set_materialize_grads(False)  # the weight of a result that nobody has used gets no gradient
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[2:]
        needs_weight, needs_bias = needs[: len(weights)], needs[len(weights) :]
        if x is not None:
            x = gradients.same_on_all_ranks(x, ctx.group)
        grad_x = None
        used = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
        if needs_x and used:
            grad, weight = used[0]
            if len(used) > 1:
                grad, weight = torch.cat([each for each, _ in used], -1), torch.cat([each for _, each in used])
            grad_x = torch.ops.fusedcomm.matmul_all_reduce(grad, weight, None, "sum", *ctx.group)
        grad_weights = [
            gradients.of_w(grad, x, layout) if need and grad is not None else None
            for grad, layout, need in zip(grads, ctx.layouts, needs_weight, strict=True)
        ]
        grad_biases = [
            gradients.of_bias(grad) if need and grad is not None else None
            for grad, need in zip(grads, needs_bias, strict=True)
        ]
        return None, None, grad_x, *grad_weights, *grad_biases


def autocast(*tensors: Tensor | None) -> list[Any]:
    """Cast to autocast's dtype, outside of the autograd.Function: its backward runs without autocast."""
    device_type = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]
