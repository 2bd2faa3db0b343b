"""Calls and groups leave nothing behind: file descriptors, mappings, threads and memory are back to where they were."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.launch.ranks import RankPool
from tests.helpers.tiers import nightly_but

Ranks = Callable[[int], RankPool]

PROC = Path("/proc/self")
LEEWAY_BYTES = 4 << 20  # what the allocators of C, torch and gloo may keep


@dataclass(frozen=True)
class Held:
    descriptors: int
    segments: int  # mappings of symmetric memory
    threads: int
    resident_bytes: int

    @staticmethod
    def now() -> Held:
        gc.collect()
        return Held(
            len(os.listdir(PROC / "fd")),
            sum("memfd:" in line for line in (PROC / "maps").read_text().splitlines()),
            len(os.listdir(PROC / "task")),
            int((PROC / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        )

    def __sub__(self, other: Held) -> Held:
        return Held(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


NOTHING = Held(0, 0, 0, 0)


def call(x: Tensor, w: Tensor, group: dist.ProcessGroup | None = None) -> None:
    y = fusedcomm.matmul_all_to_all(x, w, 0, 1, group)
    fusedcomm.all_gather_matmul(x, w, 0, group)
    fusedcomm.matmul_all_reduce(x, w, group)
    assert y.shape == (x.shape[0] * dist.get_world_size(), w.shape[1] // dist.get_world_size())


def calls(rank: int, num_calls: int) -> Held:
    x, w = torch.ones(8, 16), torch.ones(16, 8)
    for _ in range(20):
        call(x, w)
    before = Held.now()
    for _ in range(num_calls // 3):
        call(x, w)
    return Held.now() - before


def unused(group: dist.ProcessGroup) -> None:
    """Only torch's own groups: what these leave behind is allowed."""


def left_open(group: dist.ProcessGroup) -> None:
    call(torch.ones(8, 16), torch.ones(16, 8), group)


def closed(group: dist.ProcessGroup) -> None:
    left_open(group)
    fusedcomm.close(group)


def groups(rank: int, num_groups: int, use: Callable[[dist.ProcessGroup], None]) -> Held:
    def once() -> None:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        use(group)
        dist.barrier()  # gloo on one rank may still be connecting, or sending
        dist.destroy_process_group(group)

    for _ in range(3):
        once()
    before = Held.now()
    for _ in range(num_groups):
        once()
    return Held.now() - before


def check_back(growth: Held, torch_alone: Held = NOTHING) -> None:
    assert growth.descriptors <= max(torch_alone.descriptors, 0), growth
    assert growth.threads <= max(torch_alone.threads, 0), growth
    assert growth.segments <= 0, growth
    assert growth.resident_bytes <= max(torch_alone.resident_bytes, 0) + LEEWAY_BYTES, growth


@pytest.mark.parametrize("num_calls", nightly_but([600], [600, 10_000]))
def test_calls_leave_nothing_behind(ranks: Ranks, num_calls: int) -> None:
    for growth in ranks(2).run(calls, num_calls):
        check_back(growth)


@pytest.mark.thorough
@pytest.mark.parametrize("num_groups", nightly_but([6], [6, 200]))
def test_groups_leave_nothing_behind(ranks: Ranks, num_groups: int) -> None:
    alone = ranks(2).run(groups, num_groups, unused)
    for use in (left_open, closed):
        for growth, torch_alone in zip(ranks(2).run(groups, num_groups, use), alone, strict=True):
            check_back(growth, torch_alone)
