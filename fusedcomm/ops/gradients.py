"""Shared by the backwards of the ops: the gradients of a matmul by itself."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.run import reference


class WeightLayout(NamedTuple):
    """The layout of w. ``transposed``: as nn.Linear's weight.mT; autograd copies a gradient of another layout."""

    batched: bool
    transposed: bool


def layout_of(w: Tensor) -> WeightLayout:
    return WeightLayout(batched=w.ndim > 2, transposed=w.stride(-2) == 1 and w.stride(-1) != 1)


def of_w(x: Tensor, grad_y: Tensor, w: WeightLayout) -> Tensor:
    """``xT @ grad_y``, summed over rows; per batch where w is batched."""
    if not w.batched:
        x, grad_y = x.flatten(0, -2), grad_y.flatten(0, -2)
    return torch.matmul(grad_y.mT, x).mT if w.transposed else torch.matmul(x.mT, grad_y)


def of_bias(grad_y: Tensor) -> Tensor:
    return grad_y.flatten(0, -2).sum(0)


def same_on_all_ranks(t: Tensor, group: tuple[int, str]) -> Tensor:
    """t, replicated, where each rank computes only its part of the result: derivatives are summed over the ranks."""
    return _Same.apply(t, group) if torch.is_grad_enabled() and t.requires_grad else t


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: tuple[int, str]) -> Tensor:
        ctx.group = group
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum of the ranks' tensors, which is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: tuple[int, str]) -> Tensor:
        ctx.group = group
        return reference.all_reduce(t, "sum", *group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Same.apply(grad, ctx.group), None
