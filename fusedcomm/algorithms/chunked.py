"""`chunked`, as ops call it; `fusedcomm.plan.chunked` says what it does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedcomm.plan import chunked
from fusedcomm.run import calls
from fusedcomm.runtime.workspace import Call


def push_matmul(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    return calls.run(call, chunked.push_matmul, x, w, bias, out)[0]


def push_reduce(
    call: Call,
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    return calls.run(call, chunked.push_reduce, x, w, bias, partial_bias, out, scale=scale)[0]


def push_reduce_gather(
    call: Call,
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    return calls.run(call, chunked.push_reduce_gather, x, w, bias, partial_bias, out, scale=scale)[0]


def gather_matmul(
    call: Call, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], return_gathered: bool
) -> tuple[list[Tensor], Tensor | None]:
    results = calls.run(call, chunked.gather_matmul, x, ws, biases, return_gathered=return_gathered)
    return results[: len(ws)], results[-1] if return_gathered else None
