"""The schedules of `chunked` for parts of different sizes have no race."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from fusedcomm.plan.builder import Device
from tests.helpers.plain_cases import UNEVEN_IN_ROUNDS, Case
from tests.helpers.schedule.blocked_waits import blocked_waits
from tests.helpers.schedule.happens_before import HappensBefore, races
from tests.helpers.schedule.programs import BF16, CPU, CPU_WITH_HEAP, GPU, World, calls
from tests.helpers.uneven import Uneven

A2A, BACK = "matmul_all_to_all", "all_to_all_matmul"
GATHER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter"
CASES = [  # each of them takes several rounds in slots of SLOT_BYTES for each rank
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


def order_of(cases: Sequence[Uneven | Case], device: Device = GPU, dtype: torch.dtype = BF16) -> HappensBefore:
    return HappensBefore(World(2, SLOT_BYTES * 2, "chunked", device=device).enqueue(calls(cases, dtype)))


@pytest.mark.parametrize("device", [GPU, CPU, CPU_WITH_HEAP], ids=["GPU", "CPU", "in place"])
def test_nothing_races_and_no_wait_is_blocked(device: Device) -> None:
    order = order_of([*CASES, *UNEVEN_IN_ROUNDS], device)
    assert not races(order) and not blocked_waits(order)


def test_float32_and_batches_do_not_race() -> None:
    batched = Uneven(A2A, (3, 130, 67), gather_dim=1, scatter_dim=2, batched=True, other=64)
    assert not races(order_of([CASES[2], CASES[5]], dtype=torch.float32)) and not races(order_of([batched]))
