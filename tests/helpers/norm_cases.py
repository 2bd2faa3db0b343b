"""Calls with a norm behind the sum, and their exact results."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.exact_problem import NormProblem
from fusedcomm.ops.whole_group import PROGRAMS, MatmulSize
from fusedcomm.plan.geometry import norm
from fusedcomm.plan.geometry.exchange import Exchange
from tests.helpers.plain_cases import Case

K = 5


class NormCase(Case):
    """``shape``: rows and columns of the sum; ``splits``: one_shot or two_shot, of an all_reduce."""

    __slots__ = ()

    @property
    def scatters(self) -> bool:
        return self.op == "matmul_reduce_scatter_norm"

    def exchange(self, args: Arguments) -> Exchange:
        with mock.patch.object(norm, "goes_at_once", lambda *sizes: self.splits == "one_shot"):
            return super().exchange(args)

    def problem(self, num_ranks: int, seed: int = 0) -> NormProblem:
        op, parts = ("matmul_reduce_scatter", num_ranks) if self.scatters else ("matmul_all_reduce", 1)
        return NormProblem(PROGRAMS[op], MatmulSize(self.shape[0] // parts, K, self.shape[1]), num_ranks, seed)

    def tensors(self, rank: int, num_ranks: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor | None]:
        """The operands of the program, without memory for its results."""
        problem = self.problem(num_ranks, seed)
        of_ways = {op: tensors for op, tensors, _ in problem.calls(rank)}
        return [None if t is None else t.to(dtype) for t in of_ways[self.op]]

    def arguments(self, rank: int, num_ranks: int, dtype: torch.dtype) -> Arguments:
        *lead, n = self.shape
        ws: list[Any] = [None]
        made = partial(torch.empty, dtype=dtype, device="meta")
        x = made(self.shape)
        if self.op.startswith("matmul"):
            x, ws = made((*lead, K)), [made((K, n))]
        residual = made(self.shape).chunk(num_ranks if self.scatters else 1)[0]
        return Arguments(x, ws, [made(n)], num_ranks, "", residual=residual, norm_weight=made(n), eps=0.0)


ONE_SHOT = NormCase("matmul_all_reduce_norm", (256, 192), splits="one_shot")  # in rounds
TWO_SHOT = NormCase("all_reduce_norm", (757, 191), splits="two_shot")
SCATTERED = NormCase("matmul_reduce_scatter_norm", (1536, 192))
OTHERS = [SCATTERED, TWO_SHOT, *(NormCase("matmul_all_reduce_norm", (0, 8), splits=way) for way in ("one_shot", "two_shot"))]
