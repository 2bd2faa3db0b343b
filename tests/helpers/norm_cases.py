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
from fusedcomm.plan.geometry.cut import EVEN, Splits
from fusedcomm.plan.geometry.exchange import Exchange
from tests.helpers.plain_cases import Case

K = 5


class NormCase(Case):
    """``shape``: rows and columns of the sum. ``splits``: one_shot or two_shot, of an all_reduce; the last rank may get
    one row less of a reduce_scatter.
    """

    __slots__ = ()

    @property
    def scatters(self) -> bool:
        return self.op == "matmul_reduce_scatter_norm"

    def exchange(self, args: Arguments) -> Exchange:
        with mock.patch.object(norm, "goes_at_once", lambda *sizes: self.splits == "one_shot"):
            return super().exchange(args)

    def problem(self, num_ranks: int, seed: int = 0) -> NormProblem:
        op, parts = ("matmul_reduce_scatter", num_ranks) if self.scatters else ("matmul_all_reduce", 1)
        rows, n = self.shape
        return NormProblem(PROGRAMS[op], MatmulSize(-(-rows // parts), K, n), num_ranks, seed, uneven=rows % parts > 0)

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
        given = {"residual": made(self.shape), "norm_weight": made(n), "eps": 0.0}
        if self.scatters:
            given["residual"] = given["residual"].chunk(num_ranks)[rank].contiguous()
        splits = Splits(rank=rank) if self.scatters and lead[0] % num_ranks else EVEN
        return Arguments(x, ws, [made(n)], num_ranks, "", splits, **given)


ONE_SHOT = NormCase("matmul_all_reduce_norm", (256, 192), splits="one_shot")  # in rounds
TWO_SHOT = NormCase("all_reduce_norm", (757, 191), splits="two_shot")
SCATTERED = NormCase("matmul_reduce_scatter_norm", (1536, 192))
OTHERS = [SCATTERED, TWO_SHOT, *(NormCase("matmul_all_reduce_norm", (0, 8), splits=way) for way in ("one_shot", "two_shot"))]
