"""What calls and groups leave behind: file descriptors, mappings, threads and memory, back to where they were."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.testing.ranks import RankPool

Ranks = Callable[[int], RankPool]

PROC = Path("/proc/self")
LEEWAY_BYTES = 24 << 20  # of the allocators of C, torch and gloo


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
        return Held(
            self.descriptors - other.descriptors,
            self.segments - other.segments,
            self.threads - other.threads,
            self.resident_bytes - other.resident_bytes,
        )


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


def groups(rank: int, num_groups: int, close: bool, use: bool) -> Held:
    """Made, used (or not, to see what torch's own leave), closed and destroyed."""
    x, w = torch.ones(8, 16), torch.ones(16, 8)

    def once() -> None:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        if use:
            call(x, w, group)
            if close:
                fusedcomm.close(group)
        dist.barrier()  # gloo on one rank may still be connecting, or sending
        dist.destroy_process_group(group)

    for _ in range(3):
        once()
    before = Held.now()
    for _ in range(num_groups):
        once()
    return Held.now() - before


def check_back(growth: Held, torch_alone: Held | None = None) -> None:
    threads = torch_alone.threads if torch_alone else 0
    descriptors = torch_alone.descriptors if torch_alone else 0
    resident = torch_alone.resident_bytes if torch_alone else 0
    assert growth.descriptors <= max(descriptors, 0), growth
    assert growth.threads <= max(threads, 0), growth
    assert growth.segments <= 0, growth
    assert growth.resident_bytes <= max(resident, 0) + LEEWAY_BYTES, growth


def test_calls_leave_nothing_behind(ranks: Ranks) -> None:
    for growth in ranks(2).run(calls, 600):
        check_back(growth)


@pytest.mark.soak
def test_ten_thousand_calls_leave_nothing_behind(ranks: Ranks) -> None:
    for growth in ranks(2).run(calls, 10_000):
        check_back(growth)


def check_groups(ranks: Ranks, num_groups: int) -> None:
    alone = ranks(2).run(groups, num_groups, False, False)
    for growth, torch_alone in zip(ranks(2).run(groups, num_groups, True, True), alone, strict=True):
        check_back(growth, torch_alone)


def test_groups_leave_nothing_behind(ranks: Ranks) -> None:
    check_groups(ranks, 12)


@pytest.mark.soak
def test_two_hundred_groups_leave_nothing_behind(ranks: Ranks) -> None:
    check_groups(ranks, 200)


def leaking(rank: int) -> Held:
    before = Held.now()
    _kept.append(open(os.devnull))  # noqa: SIM115
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    growth = Held.now() - before
    ended.set()
    thread.join()
    _kept.pop().close()
    return growth


_kept: list = []  # type: ignore[type-arg]


def open_workspace(rank: int) -> tuple[Held, Held]:
    before, group = Held.now(), dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    call(torch.ones(8, 16), torch.ones(16, 8), group)
    used = Held.now() - before
    fusedcomm.close(group)
    dist.barrier()
    dist.destroy_process_group(group)
    return used, Held.now() - before


def test_a_workspace_is_seen_while_it_is_open(ranks: Ranks) -> None:
    for used, closed in ranks(2).run(open_workspace):
        assert used.segments >= 2 and closed.segments == 0  # this rank's and the peer's


def test_what_is_left_behind_is_seen(ranks: Ranks) -> None:
    for growth in ranks(2).run(leaking):
        assert growth.descriptors == 1 and growth.threads == 1
        with pytest.raises(AssertionError):
            check_back(growth)
