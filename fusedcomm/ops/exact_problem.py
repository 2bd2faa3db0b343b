"""Problems whose sums are exact in every dtype and order: all ranks' inputs, and what every rank must get."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedcomm.ops.whole_group import MatmulSize, WholeGroup


class ExactProblem:
    """An op, and all ranks' inputs: integers so small that every sum is exact, up to 32 ranks and a K of 128 of each.

    What the group divides is ``size`` times its ranks; the other sizes stay as odd as they are.
    """

    def __init__(self, program: WholeGroup, size: MatmulSize, num_ranks: int, seed: int, bias: bool = False) -> None:
        self.program, self.num_ranks, self.seed = program, num_ranks, seed
        size = _divisible(program, size, num_ranks)
        self.xs = [self.integers(program.x_shape(size, num_ranks), 0, rank) for rank in range(num_ranks)]
        self.ws = [self.integers((size.k, size.n), 1, rank) for rank in range(num_ranks)]
        same = program.same_grad_on_all_ranks
        self.biases = [self.integers((size.n,), 3, 0 if same else rank) for rank in range(num_ranks)] if bias else []

    def results(self) -> list[Tensor]:
        """Every rank's result, in float64, by the program of all ranks: no communication to trust."""
        xs, ws, biases = ([t.double() for t in ts] for ts in (self.xs, self.ws, self.biases))
        return self.program.program(xs, ws, biases)

    def integers(self, shape: tuple[int, ...], which: int, rank: int) -> Tensor:
        """From -1 to 1, equal in every process. ``which`` of a rank's tensors they are."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * rank + which)
        return torch.randint(-1, 2, tuple(shape), generator=generator, device="cpu")


def difference(result: Tensor, expected: Tensor) -> str | None:
    """Where the values differ, or None."""
    if result.shape != expected.shape:
        return f"shape {tuple(result.shape)}, must be {tuple(expected.shape)}"
    if result.dtype != expected.dtype:
        return f"{result.dtype}, must be {expected.dtype}"
    wrong = int((result != expected).sum())
    if wrong == 0:
        return None
    where = (result != expected).nonzero()[0].tolist()
    got, must = result[tuple(where)].item(), expected[tuple(where)].item()
    return f"{wrong} of {result.numel()} elements, first at {where}: {got}, must be {must}"


def _divisible(program: WholeGroup, size: MatmulSize, num_ranks: int) -> MatmulSize:
    rows, k, n = (each * (num_ranks if program.cut == cut else 1) for cut, each in _cuts(size))
    return MatmulSize(rows, k, n, size.batch)


def _cuts(size: MatmulSize) -> tuple[tuple[str, int], ...]:
    return ("rows", size.rows), ("k", size.k), ("n", size.n)
