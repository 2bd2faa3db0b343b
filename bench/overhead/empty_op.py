"""An op that makes an empty result and does nothing else: what a call costs before an op does its work.

It is defined as the ops of fusedcomm are: a torch library, a kernel in Python, autograd, arguments alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

lib = torch.library.Library("fusedcomm_bench", "DEF")
lib.define(
    "empty(Tensor x, Tensor w, Tensor? bias, SymInt[] shape, int gather_dim, int scatter_dim, int group_size, "
    "str group_name) -> Tensor"
)


@torch.library.impl(lib, "empty", "CPU")
def _kernel(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    shape: list[int],
    gather_dim: int,
    scatter_dim: int,
    group_size: int,
    group_name: str,
) -> Tensor:
    return x.new_empty(shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    return torch.empty_like(x), torch.empty_like(w), None, None, None, None, None, None


torch.library.register_autograd("fusedcomm_bench::empty", _backward, setup_context=_setup_context, lib=lib)
