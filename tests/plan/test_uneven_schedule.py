"""The work that `chunked` enqueues on GPUs for parts of different sizes, recorded without one, has no race."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from tests.helpers.schedule.blocked_waits import blocked_waits
from tests.helpers.schedule.happens_before import HappensBefore, races
from tests.helpers.schedule.programs import World, uneven_calls
from tests.helpers.uneven import Uneven

A2A, BACK = "matmul_all_to_all", "all_to_all_matmul"
GATHER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter"
CASES = [  # with backward each of them takes several rounds in slots of SLOT_BYTES for each rank
    Uneven(A2A, (2, 259, 7, 64), 2, gather_dim=1, scatter_dim=2, bias=True, other=128),
    Uneven(A2A, (2, 259, 3, 64), 2, gather_dim=1, scatter_dim=2, scatter=((0, 2), (1, 2)), other=128),
    Uneven(BACK, (2, 259, 7, 64), 2, gather_dim=2, scatter_dim=1, other=128),
    Uneven(BACK, (259, 258), 1, gather_dim=0, scatter_dim=1, gather=(0, 259), other=128),
    Uneven(GATHER, (259, 128), 1, gather_dim=0, gather=(259, 0), bias=True, other=128),
    Uneven(GATHER, (259, 129), 1, gather_dim=1, other=128),
    Uneven(REDUCE, (259, 128), 1, scatter_dim=0, scatter=(0, 259), other=128),
    Uneven(REDUCE, (259, 129), 1, scatter_dim=1, bias=True, other=128),
]
SLOT_BYTES = 1 << 15


def recorded(cases: Sequence[Uneven], dtype: torch.dtype = torch.bfloat16) -> HappensBefore:
    return HappensBefore(World(2, SLOT_BYTES * 2, "chunked").record(uneven_calls(cases, dtype)))


def test_nothing_races_and_no_wait_is_blocked() -> None:
    """Every op, forward and backward. The host waits for nothing."""
    order = recorded(CASES)
    assert not races(order) and not blocked_waits(order)
    assert not any(node.operation.host_waits for node in order.nodes)


@pytest.mark.thorough
def test_float32_and_batches_do_not_race() -> None:
    batched = Uneven(A2A, (3, 130, 67), gather_dim=1, scatter_dim=2, batched=True, other=64)
    assert not races(recorded([CASES[2], CASES[5]], torch.float32)) and not races(recorded([batched]))
