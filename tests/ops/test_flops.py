"""FlopCounterMode counts for an op what it counts for the matmuls of the unfused program on this rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import ALL_PROBLEMS, NAMED
from tests.helpers.problems import Problem, flat, integers, unflat, whole_group


def counted(run: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@on_ranks(3)
@pytest.mark.parametrize("name", [str(problem) for problem in ALL_PROBLEMS])
def test_forward(rank: int, name: str) -> None:
    """The oracle counts the matmuls of all ranks in one process; they are alike."""
    problem = NAMED[name]
    size = dist.get_world_size()
    inputs = [flat(integers(problem, r, size)) for r in range(size)]
    got = counted(lambda: problem.call(unflat(problem, inputs[rank])))
    assert got == counted(lambda: whole_group(problem, inputs, size)) // size


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
