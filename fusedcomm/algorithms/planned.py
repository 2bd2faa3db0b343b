"""`chunked` and `fused`, as ops call them: programs of `fusedcomm.plan`, planned once for all calls of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from fusedcomm.plan import chunked as chunked_programs
from fusedcomm.plan import fused as fused_programs
from fusedcomm.run import calls
from fusedcomm.runtime.workspace import Call


class Planned:
    """``programs``: the module of plan that has the algorithm's four programs. ``needs_w``: also where x is the product
    already.
    """

    def __init__(self, programs: ModuleType, *, needs_w: bool) -> None:
        self.programs, self.needs_w = programs, needs_w

    def push_matmul(self, call: Call, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        return calls.run(call, self.programs.push_matmul, x, w, bias, out)[0]

    def push_reduce(
        self,
        call: Call,
        x: Tensor,
        w: Tensor | None,
        bias: Tensor | None,
        scale: float,
        partial_bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        operands = x, self._factor(x, w), bias, partial_bias, out
        return calls.run(call, self.programs.push_reduce, *operands, scale=scale)[0]

    def push_reduce_gather(
        self,
        call: Call,
        x: Tensor,
        w: Tensor | None,
        bias: Tensor | None,
        scale: float,
        partial_bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        operands = x, self._factor(x, w), bias, partial_bias, out
        return calls.run(call, self.programs.push_reduce_gather, *operands, scale=scale)[0]

    def gather_matmul(
        self, call: Call, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], return_gathered: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        results = calls.run(call, self.programs.gather_matmul, x, ws, biases, return_gathered=return_gathered)
        return results[: len(ws)], results[-1] if return_gathered else None

    def _factor(self, x: Tensor, w: Tensor | None) -> Tensor | None:
        """w, or the factor that leaves an x that is the product already as it is."""
        return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) if w is None and self.needs_w else w


chunked, fused = Planned(chunked_programs, needs_w=False), Planned(fused_programs, needs_w=True)
