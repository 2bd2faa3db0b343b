"""`fused`, as ops call it; `fusedcomm.plan.fused` says what it does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomm.plan import fused
from fusedcomm.run import calls
from fusedcomm.runtime.workspace import Call


def push_matmul(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    return calls.run(call, fused.push_matmul, x, w, bias, out)[0]


def push_reduce(
    call: Call,
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    return calls.run(call, fused.push_reduce, x, _factor(x, w), bias, partial_bias, out, scale=scale)[0]


def push_reduce_gather(
    call: Call,
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    return calls.run(call, fused.push_reduce_gather, x, _factor(x, w), bias, partial_bias, out, scale=scale)[0]


def gather_matmul(
    call: Call, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], return_gathered: bool
) -> tuple[list[Tensor], Tensor | None]:
    results = calls.run(call, fused.gather_matmul, x, ws, biases, return_gathered=return_gathered)
    return results[: len(ws)], results[-1] if return_gathered else None


def _factor(x: Tensor, w: Tensor | None) -> Tensor:
    """w, or the factor that leaves an x that is the product already as it is."""
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) if w is None else w
