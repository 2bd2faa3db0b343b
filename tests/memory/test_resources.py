"""Calls and groups leave nothing behind: file descriptors, mappings, threads and memory are back to where they were."""

from __future__ import annotations

import gc
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.launch.ranks import RankPool
from fusedcomm.memory import group_member, members
from tests.helpers.groups import call as run_call
from tests.helpers.groups import check, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import HEADS
from tests.helpers.symmetric_memory import CPU, footprint
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


# A rank that reaches a limit of the system: all ranks of its group do the same, and nothing is left behind.
MIB = 1 << 20


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """This process can open as many files more. What is below its highest descriptor is taken."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    with limited(resource.RLIMIT_NOFILE, highest + 2 + number), open(os.devnull) as null:
        taken = []
        with suppress(OSError):
            while True:
                taken.append(os.dup(null.fileno()))
        for fd in taken[:number]:
            os.close(fd)
        try:
            yield
        finally:
            for fd in taken[number:]:
                os.close(fd)


def check_all_alike(group: Any, found: str, before: tuple[int, int]) -> None:
    """All ranks say the same of why they run unfused, hold nothing after a close, and do not run so after a reset."""
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, member_of(group).no_workspace)
    assert len(set(reasons)) == 1, reasons
    assert found in reasons[0], reasons
    fusedcomm.close(group)
    assert footprint() == before
    fusedcomm.reset(group)
    check(group, HEADS, run_call(group, HEADS, 1), 1)
    assert member_of(group).no_workspace is None


# A workspace takes one descriptor. Its rendezvous needs a second one for the signals and a third one for /proc.
WITHOUT_DESCRIPTORS = ["rank 1: it cannot find out what", "rank 1 has nothing to offer: memfd", "nothing to offer"]


@on_ranks(2)
@pytest.mark.parametrize(("left", "found"), list(enumerate(WITHOUT_DESCRIPTORS)))
def test_a_rank_without_descriptors(rank: int, left: int, found: str) -> None:
    with fresh_group(TIMEOUT_S="5") as group:
        with fusedcomm.force_algorithm("unfused"):
            check(dist.group.WORLD, HEADS, run_call(dist.group.WORLD, HEADS))  # torch has loaded what it uses
        before = footprint()
        dist.barrier(group)
        with descriptors_left(left) if rank == 1 else nullcontext():
            check(group, HEADS, run_call(group, HEADS))
        check_all_alike(group, found, before)


SLOT_BYTES = 16 * MIB  # two are a segment, so that what else a rank allocates does not matter


@on_ranks(2)
@pytest.mark.parametrize(
    ("left", "found"),
    [(MIB, "cannot allocate a workspace"), (3 * SLOT_BYTES, "rank 1 cannot use the memory of rank 0")],
)
def test_a_rank_without_address_space(rank: int, left: int, found: str) -> None:
    with fresh_group(TIMEOUT_S="5") as group, pytest.MonkeyPatch.context() as patch:
        members.member(group.group_name, CPU)
        before = footprint()
        patch.setattr(group_member, "_MIN_SLOT_BYTES", SLOT_BYTES)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        with limited(resource.RLIMIT_AS, used + left + 8 * MIB) if rank == 1 else nullcontext():
            check(group, HEADS, run_call(group, HEADS))
        check_all_alike(group, found, before)


@on_ranks(2)
def test_a_rank_whose_files_must_be_small(rank: int) -> None:
    """RLIMIT_FSIZE, which ends a process by SIGXFSZ unless it ignores that, as Python does."""
    with fresh_group(TIMEOUT_S="5") as group:
        members.member(group.group_name, CPU)
        before = footprint()
        with limited(resource.RLIMIT_FSIZE, MIB) if rank == 1 else nullcontext():
            check(group, HEADS, run_call(group, HEADS))
        check_all_alike(group, "File too large", before)


@on_ranks(2)
def test_a_dump_that_does_not_fit_hides_no_error(rank: int, tmp_path: Path) -> None:
    """The old dump stays whole, and nothing lies beside it."""
    with fresh_group(TIMEOUT_S="5", DUMP_DIR=str(tmp_path)) as group:
        file = tmp_path / f"rank{rank}.json"
        file.write_text("{}")
        with limited(resource.RLIMIT_FSIZE, 1024), pytest.raises(fusedcomm.PeerMismatchError):
            (fusedcomm.close if rank else fusedcomm.reset)(group)
        dist.barrier(group)
        assert json.loads(file.read_text()) == {}
        assert {each.name for each in tmp_path.iterdir()} == {"rank0.json", "rank1.json"}
