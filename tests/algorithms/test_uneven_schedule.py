"""What `chunked` and `fused` enqueue on GPUs for parts of different sizes, recorded without one, has no race.

Their tables are made, copied and read on one stream, and planted ones that are not are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusedcomm.algorithms import kernel_launch, part_table
from fusedcomm.kernels.triton.bundles import Part
from fusedcomm.runtime.workspace import Workspace
from tests.helpers.schedule.blocked_waits import blocked_waits
from tests.helpers.schedule.happens_before import HappensBefore, races
from tests.helpers.schedule.operations import Kind
from tests.helpers.schedule.programs import World, uneven_calls
from tests.helpers.uneven import Uneven

ALGORITHMS = ("chunked", "fused")
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


def recorded(algorithm: str, cases: Sequence[Uneven], backward: bool = True) -> HappensBefore:
    return HappensBefore(World(2, SLOT_BYTES * 2, algorithm).record(uneven_calls(cases, backward=backward)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_races_and_no_wait_is_blocked(algorithm: str) -> None:
    """Every op, forward and backward: tables too are neither written again nor freed before they are read."""
    order = recorded(algorithm, CASES)
    assert not races(order) and not blocked_waits(order)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_float32_and_batches_do_not_race(algorithm: str) -> None:
    batched = Uneven(A2A, (3, 130, 67), gather_dim=1, scatter_dim=2, batched=True, other=64)
    for cases, dtype in (([CASES[2], CASES[5]], torch.float32), ([batched], torch.bfloat16)):
        order = HappensBefore(World(2, SLOT_BYTES * 2, algorithm).record(uneven_calls(cases, dtype)))
        assert not races(order)


@pytest.mark.parametrize("by_copy", [True, False], ids=["copies", "pack"])
def test_gathers_do_not_race_whoever_sends(by_copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workspace, "least_copied", 0 if by_copy else 1 << 62)
    order = recorded("fused", CASES[2:6])
    assert not races(order)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_host_does_not_wait_for_tables(algorithm: str) -> None:
    world = World(2, SLOT_BYTES * 2, algorithm)
    operations = world.record(uneven_calls(CASES, backward=False))[0].operations
    from_host = [each for each in operations if each.kind is Kind.MEMCPY and not any(s.reads for s in each.steps)]
    assert len(from_host) >= 4 and not any(each.host_waits for each in operations)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_table_of_another_stream_is_found(algorithm: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read before it has come, or, if the kernel's stream waits for it, its memory is used again too early."""

    def elsewhere(parts: Sequence[Part], device: torch.device) -> Tensor:
        kernels, other = torch.cuda.current_stream(), torch.cuda.Stream()
        with torch.cuda.stream(other):
            table = part_table.upload(parts, device)
        if when == "after":
            kernels.wait_stream(other)
        return table

    monkeypatch.setattr(kernel_launch, "upload", elsewhere)
    texts = races(recorded(algorithm, CASES[:1], backward=False))
    assert any("too early" in text if when == "after" else "race" in text for text in texts), texts


def test_the_smallest_run_decides_whether_copy_engines_send() -> None:
    """A copy of a shorter run would be a kernel, which finds no room beside a gather on all SMs."""
    case: Any = Uneven(BACK, (64, 2048, 512), 2, gather_dim=0, scatter_dim=1, scatter=(2047, 1), gather=(32, 32))
    x, w = torch.empty(32, 2048, 512, device="meta"), torch.empty(2047 * 512, 8, device="meta")
    exchange = case.exchange(x, w, 0, 2)
    assert exchange.sent_run == 512 and exchange.for_all.sent_run == 2047 * 512
