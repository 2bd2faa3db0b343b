"""What the backwards of the ops have in common: the gradients that a matmul has by itself."""

from __future__ import annotations

import torch
from torch import Tensor


def of_w(x: Tensor, grad_y: Tensor, w_ndim: int) -> Tensor:
    """``xT @ grad_y``, summed over rows; per batch where w is batched."""
    if w_ndim == 2:
        x, grad_y = x.flatten(0, -2), grad_y.flatten(0, -2)
    return torch.matmul(x.mT, grad_y)


def of_bias(grad_y: Tensor) -> Tensor:
    return grad_y.flatten(0, -2).sum(0)
