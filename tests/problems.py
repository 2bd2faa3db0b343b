"""Calls of matmul_all_to_all that tests run, their inputs, and the expected result without any communication."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedcomm import geometry
from fusedcomm.exchange import Exchange


@dataclass(frozen=True)
class Problem:
    """x_shape is per rank; where a dim of y is scattered, its size is ``group_size`` times what stands here."""

    name: str
    x_shape: tuple[int, ...]
    n: int
    gather_dim: int
    scatter_dim: int
    out_shape: tuple[int, ...] | None = None
    batched: bool = False
    bias: bool = False
    transposed: bool = False  # w is stored as nn.Linear stores its weight

    def __str__(self) -> str:
        return self.name

    def sizes(self, group_size: int) -> tuple[list[int], list[int], list[int] | None]:
        """x's shape, w's shape and out_shape for a group, so that the scattered dim divides."""
        lead, columns = list(self.x_shape[:-1]), list(self.out_shape or (self.n,))
        y = lead + columns
        y[self.scatter_dim] *= group_size
        lead, columns = y[: len(lead)], y[len(lead) :]
        k, n = self.x_shape[-1], 1
        for size in columns:
            n *= size
        w = [*lead[:-1], k, n] if self.batched else [k, n]
        return [*lead, k], w, columns if self.out_shape else None

    def exchange(self, x: Tensor, w: Tensor, group_size: int) -> Exchange:
        return geometry.matmul_all_to_all(
            x.shape,
            w.shape,
            self.sizes(group_size)[2],
            self.gather_dim,
            self.scatter_dim,
            group_size,
        )


PROBLEMS = [
    Problem("rows-gathered", (6, 5), 7, 0, 1),
    Problem("columns-gathered", (6, 5), 7, 1, 0),
    Problem("batch-rows-to-columns", (2, 6, 5), 8, 1, 2),
    Problem("batch-columns-to-rows", (2, 6, 5), 8, 2, 1),
    Problem("batch-scattered", (2, 6, 5), 8, 1, 0),
    Problem("batch-gathered", (2, 6, 5), 8, 0, 2),
    Problem("heads", (2, 6, 5), 12, 1, -2, out_shape=(4, 3)),
    Problem("head-dim-scattered", (2, 6, 5), 12, 1, -1, out_shape=(4, 3)),
    Problem("packed-qkv", (2, 6, 5), 24, 1, 3, out_shape=(3, 2, 4), bias=True),
    Problem("packed-qkv-rows-scattered", (2, 6, 5), 24, 3, 1, out_shape=(3, 2, 4), bias=True),
    Problem("bias", (7, 5), 6, 0, 1, bias=True),
    Problem("transposed-w", (7, 5), 6, 0, 1, bias=True, transposed=True),
    Problem("batched-w", (3, 6, 5), 8, 1, 2, batched=True),
    Problem("batched-w-heads", (3, 6, 5), 8, 1, -2, out_shape=(4, 2), batched=True, bias=True),
    Problem("batched-w-rows-scattered", (3, 6, 5), 8, 0, 1, batched=True),
    Problem("batched-w-batch-scattered", (3, 6, 5), 8, 1, 0, batched=True),
    Problem("two-batch-dims", (2, 3, 4, 5), 6, 2, 1, batched=True),
    Problem("two-batch-dims-columns", (2, 3, 4, 5), 6, 0, 3, batched=True),
    Problem("three-lead-dims", (2, 3, 4, 5), 6, 1, 2),
    Problem("columns-to-columns", (4, 5), 12, 1, 2, out_shape=(4, 3)),
    Problem("one-row", (1, 29), 37, 0, 1),
    Problem("ragged", (37, 29), 50, 0, 1),
    Problem("zero-rows", (0, 5), 4, 0, 1),
    Problem("zero-k", (4, 0), 6, 0, 1, bias=True),
]


def integers(
    problem: Problem, rank: int, group_size: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Small integers: every product and sum is exact in every dtype. x differs by rank and seed."""
    x_shape, w_shape, _ = problem.sizes(group_size)
    x = _integers(x_shape, 1000 * seed + rank).to(dtype)
    w = _integers(w_shape, 1000 * seed + 100 + rank).to(dtype)
    if problem.transposed:
        w = w.mT.contiguous().mT
    bias = _integers(w_shape[-1:], 1000 * seed + 200 + rank).to(dtype) if problem.bias else None
    return x, w, bias


def _integers(shape: list[int], seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def product(problem: Problem, rank: int, group_size: int, seed: int = 0) -> Tensor:
    """y of one rank, in float64."""
    x, w, bias = integers(problem, rank, group_size, seed=seed)
    y = x.double() @ w.double()
    if bias is not None:
        y = y + bias
    columns = problem.sizes(group_size)[2]
    return y if columns is None else y.unflatten(-1, columns)


def expected(problem: Problem, group_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """The result of every rank: block p of every rank's y, concatenated in rank order."""
    blocks = [product(problem, r, group_size, seed).chunk(group_size, problem.scatter_dim) for r in range(group_size)]
    if group_size == 1:
        return [blocks[0][0].to(dtype)]
    return [torch.cat([b[rank] for b in blocks], problem.gather_dim).to(dtype) for rank in range(group_size)]
