"""Calls of the plain collectives, their inputs, and the expected results without any communication."""

from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.exact_problem import NormProblem
from fusedcomm.ops.table import OPS
from fusedcomm.ops.whole_group import PROGRAMS, MatmulSize
from fusedcomm.plan.geometry import norm
from fusedcomm.plan.geometry.cut import EVEN as EVEN_PARTS
from fusedcomm.plan.geometry.cut import Splits, chunk_parts
from fusedcomm.plan.geometry.exchange import Exchange

Parts = list[tuple[int, int]]


class Case(NamedTuple):
    """``shape``: the whole of x, whose ``gather_dim`` the ranks have in parts."""

    op: str
    shape: tuple[int, ...]
    gather_dim: int | None = None
    scatter_dim: int | None = None
    reduce_op: str = "sum"
    splits: str = ""  # how parts differ: "chunk", "given", "ranges"

    def parts(self, size: int, num_ranks: int, gathers: bool) -> Parts:
        """(start, size) of each rank's part of a dim."""
        if self.splits == "given" or (self.splits == "ranges" and gathers):
            sizes = [size - (num_ranks - 1) * (size // (num_ranks + 1)), *[size // (num_ranks + 1)] * (num_ranks - 1)]
            return [(sum(sizes[:rank]), sizes[rank]) for rank in range(num_ranks)]
        if self.splits == "ranges":  # they overlap, and one is empty
            return [*[(rank, size - rank) for rank in range(num_ranks - 1)], (0, 0)]
        return [*zip(*chunk_parts(size, num_ranks)[:2], strict=True)]

    def options(self, num_ranks: int) -> dict[str, Any]:
        found: dict[str, Any] = {"reduce_op": self.reduce_op} if "reduce" in self.op else {}
        if self.gather_dim is not None:
            found["gather_dim"] = self.gather_dim
            size = self.shape[self.gather_dim]
            if self.splits == "chunk":
                found["gather_size"] = size
            elif self.splits:
                found["gather_splits"] = [size for _, size in self.parts(size, num_ranks, True)]
        if self.scatter_dim is not None:
            found["scatter_dim"] = self.scatter_dim
            parts = self.parts(self.shape[self.scatter_dim], num_ranks, False)
            if self.splits == "given":
                found["scatter_splits"] = [size for _, size in parts]
            elif self.splits == "ranges":
                found["scatter_ranges"] = parts
        return found

    def cut(self, whole: Tensor, num_ranks: int) -> list[Tensor]:
        if self.gather_dim is None:
            return [whole + rank for rank in range(num_ranks)]
        parts = self.parts(self.shape[self.gather_dim], num_ranks, True)
        return [whole.narrow(self.gather_dim, *part) for part in parts]

    def results(self, xs: list[Tensor]) -> list[Tensor]:
        whole = sum(xs) if self.gather_dim is None else torch.cat(xs, self.gather_dim)
        assert isinstance(whole, Tensor)
        if self.reduce_op == "avg":
            whole = whole / len(xs)
        if self.scatter_dim is None:
            return [whole] * len(xs)
        parts = self.parts(self.shape[self.scatter_dim], len(xs), False)
        return [whole.narrow(self.scatter_dim, *part) for part in parts]

    def whole(self, dtype: torch.dtype, seed: int = 0) -> Tensor:
        """Multiples of 6, so that sums and averages of up to 3 are exact in bfloat16."""
        generator = torch.Generator().manual_seed(seed)
        return 6.0 * torch.randint(-8, 9, self.shape, generator=generator).to(dtype)

    def call(self, x: Tensor, group: Any = None) -> Tensor:
        options = self.options(dist.get_world_size(group))
        return getattr(fusedcomm, self.op)(x, group=group, **options)  # type: ignore[no-any-return]

    def arguments(self, rank: int, num_ranks: int, dtype: torch.dtype) -> Arguments:
        """The call of a rank, of meta tensors, where parts are even or given."""
        options = self.options(num_ranks)
        splits = Splits(options.pop("gather_splits", None), None, None, options.pop("scatter_splits", None), rank)
        x = self.cut(torch.empty(self.shape, dtype=dtype, device="meta"), num_ranks)[rank]
        return Arguments(
            x.contiguous(), [], [], num_ranks, "", splits.hashable if self.splits else EVEN_PARTS, **options
        )

    def exchange(self, args: Arguments) -> Exchange:
        return OPS[self.op].exchange_of(args)


EVEN = [
    Case("all_to_all", (12, 6, 5), 0, 1),
    Case("all_to_all", (2, 12, 6, 5), -2, 1),
    Case("all_to_all", (12, 6), -1, 0),
    Case("all_gather", (12,), 0),
    Case("all_gather", (5, 12, 3), 1),
    Case("reduce_scatter", (12,), None, 0),
    Case("reduce_scatter", (5, 12, 3), None, 1, "avg"),
    Case("reduce_scatter", (12, 3), None, 0),
    Case("all_reduce", (12, 5)),
    Case("all_reduce", (3, 4, 5), reduce_op="avg"),
    Case("all_reduce", (2, 12)),
    Case("all_reduce", (7,)),
    Case("all_reduce", (5, 7)),
    Case("all_to_all", (12, 6, 0), 0, 1),
    Case("all_reduce", (0, 3)),
]
UNEVEN = [
    Case("all_to_all", (13, 7, 5), 0, 1, splits="chunk"),
    Case("all_to_all", (13, 7), 1, 0, splits="given"),
    Case("all_to_all", (13, 4), 0, 1, splits="ranges"),
    Case("all_gather", (2, 13, 3), 1, splits="chunk"),
    Case("all_gather", (13,), 0, splits="given"),
    Case("reduce_scatter", (2, 13, 3), None, 1, splits="chunk"),
    Case("reduce_scatter", (13,), None, 0, "avg", splits="given"),
    Case("reduce_scatter", (4, 13), None, 1, splits="ranges"),
]
IN_ROUNDS = [  # for 2, 3, 4 and 8 ranks
    Case("all_to_all", (1536, 192), 0, 1),
    Case("all_gather", (1536, 64), 0),
    Case("reduce_scatter", (1536, 64), None, 0),
    Case("reduce_scatter", (512, 192), None, 1),
    Case("all_reduce", (1536, 64)),
    Case("all_reduce", (24, 6144)),
]
UNEVEN_IN_ROUNDS = [
    Case("all_to_all", (1537, 193), 0, 1, splits="given"),
    Case("all_gather", (1537, 64), 0, splits="given"),
    Case("reduce_scatter", (1537, 64), None, 0, splits="given"),
    Case("reduce_scatter", (513, 193), None, 1, splits="given"),
]


K = 5


class NormCase(Case):
    """``shape``: of the sum. ``splits``: one_shot or two_shot, of an all_reduce. A reduce_scatter may be uneven."""

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
        given: dict[str, Any] = {"residual": made(self.shape), "norm_weight": made(n), "eps": 0.0}
        if self.scatters:
            given["residual"] = given["residual"].chunk(num_ranks)[rank].contiguous()
        splits = Splits(rank=rank) if self.scatters and lead[0] % num_ranks else EVEN_PARTS
        return Arguments(x, ws, [made(n)], num_ranks, "", splits, **given)


ONE_SHOT = NormCase("matmul_all_reduce_norm", (256, 192), splits="one_shot")  # in rounds
TWO_SHOT = NormCase("all_reduce_norm", (756, 191), splits="two_shot")
SCATTERED = NormCase("matmul_reduce_scatter_norm", (1536, 192))
FEW_SCATTERED = NormCase("matmul_reduce_scatter_norm", (126, 192))
_NO_ROWS = [NormCase("matmul_all_reduce_norm", (0, 8), splits=way) for way in ("one_shot", "two_shot")]
OTHERS = [SCATTERED, TWO_SHOT, *_NO_ROWS]
