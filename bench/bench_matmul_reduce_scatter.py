"""matmul_reduce_scatter against matmul, reduce_scatter_tensor; and against the matmul alone. Options: bench/sweep.py.

y = sum of every rank's x @ w       x [rows, K], w [K, N] on every rank, y [rows / R, N]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from bench import collectives, sweep
from bench.problem import Goals, OpBench, Size


class MatmulReduceScatter(OpBench):
    op = "matmul_reduce_scatter"
    cut = "rows"
    goals = Goals(mean=1.1)

    def x_shape(self, size: Size, num_ranks: int) -> tuple[int, ...]:
        return (*size.lead, size.k)

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return (x.ndim - 2,)

    def baseline(self, x: Tensor, w: Tensor) -> Tensor:
        return collectives.reduce_scatter(collectives.packed(torch.matmul(x, w), -2))

    def program(self, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
        total = torch.stack([torch.matmul(x, w) for x, w in zip(xs, ws, strict=True)]).sum(0)
        return list(total.chunk(len(xs), -2))


BENCH = MatmulReduceScatter()


def main(argv: Sequence[str] | None = None) -> int:
    return sweep.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
