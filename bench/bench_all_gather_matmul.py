"""all_gather_matmul against all_gather_into_tensor, matmul; and against the matmul alone. Options: bench/sweep.py.

y = gathered @ w        x [rows / R, K] on every rank, gathered [rows, K], w [K, N]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from bench import collectives, sweep
from bench.problem import Goals, OpBench, Size


class AllGatherMatmul(OpBench):
    op = "all_gather_matmul"
    cut = "rows"
    k = (2048, 4096)
    n = (256, 512, 1024, 2048)
    goals = Goals(mean=1.2)

    def x_shape(self, size: Size, num_ranks: int) -> tuple[int, ...]:
        *batch, rows = size.lead
        return (*batch, rows // num_ranks, size.k)

    def dims(self, x: Tensor) -> tuple[int, ...]:
        return (x.ndim - 2,)

    def baseline(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(collectives.unpacked(collectives.all_gather(x), x.ndim - 2), w)

    def program(self, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
        gathered = torch.cat(list(xs), -2)
        return [torch.matmul(gathered, w) for w in ws]


BENCH = AllGatherMatmul()


def main(argv: Sequence[str] | None = None) -> int:
    return sweep.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
