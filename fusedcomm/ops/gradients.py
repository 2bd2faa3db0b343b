"""What the backwards of the ops have in common: the gradients that a matmul has by itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.run import reference


class WeightLayout(NamedTuple):
    """How w lies. ``transposed``: as nn.Linear's weight.mT; the gradient must lie likewise, or autograd copies it."""

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
    """t, which is the same on all ranks and of which each makes its part of a result: derivatives by t are added."""
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
