"""all_to_all_matmul against all_to_all_single, unpack, matmul; and against the matmul alone. Options: bench/sweep.py.

y = exchanged @ w       x [R * rows, K / R] on every rank, exchanged [rows, K], w [K, N]
rows of x are scattered, columns gathered: the way back from attention in Ulysses
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from bench import collectives, sweep
from bench.problem import Goals, OpBench, Size


class AllToAllMatmul(OpBench):
    op = "all_to_all_matmul"
    cut = "k"
    k = (2048, 4096)
    n = (256, 512, 1024, 2048)
    goals = Goals(mean=1.2)

    def x_shape(self, size: Size, num_ranks: int) -> tuple[int, ...]:
        *batch, rows = size.lead
        return (*batch, rows * num_ranks, size.k // num_ranks)

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return x.ndim - 1, x.ndim - 2

    def baseline(self, x: Tensor, w: Tensor) -> Tensor:
        blocks = collectives.all_to_all(collectives.packed(x, -2))
        return torch.matmul(collectives.unpacked(blocks, x.ndim - 1), w)

    def program(self, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
        blocks = [x.chunk(len(xs), -2) for x in xs]
        exchanged = [torch.cat([each[rank] for each in blocks], -1) for rank in range(len(xs))]
        return [torch.matmul(x, w) for x, w in zip(exchanged, ws, strict=True)]


BENCH = AllToAllMatmul()


def main(argv: Sequence[str] | None = None) -> int:
    return sweep.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
