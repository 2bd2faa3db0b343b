"""A gated MLP under tensor and sequence parallelism, forward and backward. What is measured: bench/block.py.

gather tokens, gate and up projections (columns cut), silu, down projection (rows cut), reduce-scatter of tokens
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import fusedcomm
from fusedcomm.bench import baselines, block


@dataclass(frozen=True)
class TensorParallelMlp(block.Block):
    batch: int = 2
    tokens: int = 1024  # each rank's
    hidden: int = 1024
    intermediate: int = 4096  # over all ranks

    name = "tensor_parallel_mlp"
    goal = None

    def x_shape(self, num_ranks: int) -> tuple[int, ...]:
        return self.batch, self.tokens, self.hidden

    def bound_x_shape(self, num_ranks: int) -> tuple[int, ...]:
        return self.batch, self.tokens * num_ranks, self.hidden

    def weight_shapes(self, num_ranks: int) -> dict[str, tuple[int, ...]]:
        n = self.intermediate // num_ranks
        return {"w_gate": (n, self.hidden), "w_up": (n, self.hidden), "w_down": (self.hidden, n)}

    def baseline(self, x: Tensor, *weights: Tensor) -> Tensor:
        y = self.on_gathered(baselines.unpacked(baselines.all_gather(x), 1), *weights)
        return baselines.reduce_scatter(baselines.packed(y, 1))

    def ours(self, x: Tensor, *weights: Tensor) -> Tensor:
        w_gate, w_up, w_down = weights
        gate, up = fusedcomm.all_gather_matmul(x, [w_gate.mT, w_up.mT], 1)
        return fusedcomm.matmul_reduce_scatter(F.silu(gate) * up, w_down.mT, 1)

    def bound(self, meet: block.Meet, x: Tensor, *weights: Tensor) -> Tensor:
        return meet(self.on_gathered(meet(x), *weights))

    def on_gathered(self, x: Tensor, *weights: Tensor) -> Tensor:
        """The MLP on gathered tokens, which gives a partial sum."""
        w_gate, w_up, w_down = weights
        return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)

    def program(self, xs: Sequence[Tensor], weights: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        gathered = torch.cat(list(xs), 1)
        total = torch.stack([self.on_gathered(gathered, *each) for each in weights]).sum(0)
        return list(total.chunk(len(xs), 1))


def main(argv: Sequence[str] | None = None) -> int:
    return block.main(TensorParallelMlp, argv)


if __name__ == "__main__":
    sys.exit(main())
