"""`chunked` and `fused`, as ops call them: programs of `fusedcomm.plan`, planned once for all calls of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from fusedcomm.memory.workspace import Call
from fusedcomm.plan import chunked as chunked_programs
from fusedcomm.plan import fused as fused_programs
from fusedcomm.run import calls


class Planned:
    """``programs``: the module of plan that has the algorithm's four programs.

    Without w, x is the product already.
    """

    def __init__(self, programs: ModuleType) -> None:
        self.programs = programs

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
        programs, w = (self.programs, w) if w is not None else self._of_product(call, x)
        return calls.run(call, programs.push_reduce, x, w, bias, partial_bias, out, scale=scale)[0]

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
        programs, w = (self.programs, w) if w is not None else self._of_product(call, x)
        return calls.run(call, programs.push_reduce_gather, x, w, bias, partial_bias, out, scale=scale)[0]

    def gather_matmul(
        self, call: Call, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], return_gathered: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        results = calls.run(call, self.programs.gather_matmul, x, ws, biases, return_gathered=return_gathered)
        return results[: len(ws)], results[-1] if return_gathered else None

    def _of_product(self, call: Call, x: Tensor) -> tuple[ModuleType, Tensor | None]:
        """The programs of `chunked`, which copy x: on the wire that is the same. A CUDA graph would fix their slots, so
        kernels multiply by an identity there, which makes NaN of a row with an inf.
        """
        if not call.workspace.device_facts().for_capture:
            return chunked_programs, None
        return self.programs, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


chunked, fused = Planned(chunked_programs), Planned(fused_programs)
