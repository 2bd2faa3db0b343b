"""matmul_all_reduce against matmul, all_reduce in place; and against the matmul alone. Options: bench/sweep.py.

y = sum of every rank's x @ w       x [rows, K], w [K, N] on every rank, y [rows, N]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from bench import collectives, sweep
from bench.problem import Goals, OpBench, Size


class MatmulAllReduce(OpBench):
    op = "matmul_all_reduce"
    cut = None
    goals = Goals(mean=1.1)
    same_grad_on_all_ranks = True

    def x_shape(self, size: Size, num_ranks: int) -> tuple[int, ...]:
        return (*size.lead, size.k)

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return ()

    def baseline(self, x: Tensor, w: Tensor) -> Tensor:
        return collectives.all_reduce(torch.matmul(x, w))

    def program(self, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
        total = torch.stack([torch.matmul(x, w) for x, w in zip(xs, ws, strict=True)]).sum(0)
        return [total] * len(xs)


BENCH = MatmulAllReduce()


def main(argv: Sequence[str] | None = None) -> int:
    return sweep.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
