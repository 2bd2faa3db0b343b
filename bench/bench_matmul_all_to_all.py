"""matmul_all_to_all against matmul, pack, all_to_all_single; and against the matmul alone. Options: bench/sweep.py.

y = x @ w               x [rows, K], w [K, N] on every rank
columns of y are scattered, rows gathered
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from bench import collectives, sweep
from bench.problem import Goals, OpBench, Size


class MatmulAllToAll(OpBench):
    op = "matmul_all_to_all"
    cut = "n"
    goals = Goals(mean=1.3, minimum=0.95, over_roof=1.10)

    def x_shape(self, size: Size, num_ranks: int) -> tuple[int, ...]:
        return (*size.lead, size.k)

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return x.ndim - 2, x.ndim - 1

    def baseline(self, x: Tensor, w: Tensor) -> Tensor:
        y = torch.matmul(x, w)
        return collectives.unpacked(collectives.all_to_all(collectives.packed(y, -1)), y.ndim - 2)

    def program(self, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
        blocks = [torch.matmul(x, w).chunk(len(xs), -1) for x, w in zip(xs, ws, strict=True)]
        return [torch.cat([each[rank] for each in blocks], -2) for rank in range(len(xs))]


BENCH = MatmulAllToAll()


def main(argv: Sequence[str] | None = None) -> int:
    return sweep.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
