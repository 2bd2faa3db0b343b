"""An inference engine whose layers ask a kernel object before each call: can_run, should_run, apply, as vLLM's do.

torchrun --nproc-per-node 2 examples/engine_linear.py
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fusedcomm

HIDDEN, INNER, MAX_ROWS = 64, 256, 64


class FusedLinears:
    def __init__(self) -> None:
        self.ops: dict[nn.Module, fusedcomm.inference.Linear] = {}

    def can_run(self, linear: RowParallelLinear) -> bool:
        """All ranks ask for the same layers in the same order, when the weights are loaded."""
        op = fusedcomm.inference.Linear("matmul_all_reduce", linear.weight.mT, None, MAX_ROWS)
        if op.can_run():
            self.ops[linear] = op
            return True
        logging.warning("a linear stays plain: %s", op.reason)
        return False

    def should_run(self, x: Tensor, linear: RowParallelLinear) -> bool:
        return linear in self.ops and self.ops[linear].should_run(x.shape[0])

    def apply(self, x: Tensor, linear: RowParallelLinear) -> Any:
        return self.ops[linear].apply(x)

    def warm_up(self, rows: list[int]) -> None:
        for op in self.ops.values():
            op.warm_up(rows)


class RowParallelLinear(nn.Module):
    def __init__(self, weight: Tensor, kernel: FusedLinears | None) -> None:
        super().__init__()
        self.weight = weight.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
        self.kernel = kernel if kernel is not None and kernel.can_run(self) else None

    def forward(self, x: Tensor) -> Any:
        if self.kernel and self.kernel.should_run(x, self):
            return self.kernel.apply(x, self)
        y = F.linear(x, self.weight)
        dist.all_reduce(y)
        return y


@torch.no_grad()
def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group()
    torch.manual_seed(0)  # the same weights on every rank
    up, weight = torch.randint(-2, 3, (INNER, HIDDEN)).float(), torch.randint(-2, 3, (HIDDEN, INNER)).float()
    own_up, kernel = up.chunk(dist.get_world_size())[dist.get_rank()], FusedLinears()
    down = RowParallelLinear(weight, kernel)
    kernel.warm_up([1, 16, MAX_ROWS])
    for rows in (1, 16, MAX_ROWS, 2 * MAX_ROWS):
        x = torch.randint(-2, 3, (rows, HIDDEN)).float()
        assert torch.equal(down(F.relu(F.linear(x, own_up))), F.linear(F.relu(F.linear(x, up)), weight))
        if dist.get_rank() == 0:
            print(f"{rows} rows: {'fused' if kernel.should_run(x, down) else 'plain'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
