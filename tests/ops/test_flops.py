"""FlopCounterMode counts for an op what it counts for the matmuls of the unfused program on this rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import TABLES
from tests.helpers.problems import OPS, Problem, flat, integers, unflat, whole_group


def counted(run: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@on_ranks(3)
@pytest.mark.parametrize("op", OPS)
def test_forward(rank: int, op: str) -> None:
    size = dist.get_world_size()
    for problem in TABLES[op]:
        inputs = [flat(integers(problem, r, size)) for r in range(size)]
        got = counted(lambda problem=problem, mine=inputs[rank]: problem.call(unflat(problem, mine)))
        assert got == counted(lambda problem=problem, all_=inputs: whole_group(problem, all_, size)) // size, problem


@on_ranks(2)
def test_backward_counts_twice_the_forward(rank: int) -> None:
    problem = Problem("heads", (2, 6, 5), 12, 1, -2, out_shape=(4, 3))
    x, w, _ = integers(problem, rank, 2)
    x.requires_grad_()
    w.requires_grad_()
    forward = 2 * math.prod(x.shape) * w.shape[-1]
    assert counted(lambda: problem.call((x, w, None)).sum().backward()) == 3 * forward
    meta = torch.empty(x.shape, device="meta")
    assert counted(lambda: problem.call((meta, w.to("meta"), None))) == forward
