"""A rank that reaches a limit of the system: all ranks of its group do the same, and nothing is left behind."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import fusedcomm
from fusedcomm.launch.ranks import RankPool
from fusedcomm.runtime import group_member, members
from tests.helpers.groups import call, check, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import PROBLEMS
from tests.helpers.symmetric_memory import CPU, error_of, footprint, rendezvous

PROBLEM = next(problem for problem in PROBLEMS if problem.name == "heads")
NOBODY = 65534
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


def check_all_alike(group: Any, found: str | None, before: tuple[int, int]) -> None:
    """All ranks say the same of why they run unfused, hold nothing after a close, and do not run so after a reset."""
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, member_of(group).no_workspace)
    assert len(set(reasons)) == 1, reasons
    assert (reasons[0] is None) if found is None else (found in reasons[0]), reasons
    fusedcomm.close(group)
    assert footprint() == before
    fusedcomm.reset(group)
    check(group, PROBLEM, call(group, PROBLEM, 1), 1)
    assert member_of(group).no_workspace is None


# A workspace takes one descriptor. Its rendezvous needs a second one for the signals and a third one for /proc.
WITHOUT_DESCRIPTORS = [
    "rank 1: it cannot find out what",
    "rank 1 has nothing to offer: memfd",
    "nothing to offer",
    None,
]


@on_ranks(2)
@pytest.mark.parametrize(("left", "found"), list(enumerate(WITHOUT_DESCRIPTORS)))
def test_a_rank_without_descriptors(rank: int, left: int, found: str | None) -> None:
    with fresh_group(TIMEOUT_S="5") as group:
        with fusedcomm.force_algorithm("unfused"):
            check(dist.group.WORLD, PROBLEM, call(dist.group.WORLD, PROBLEM))  # torch has loaded what it uses
        before = footprint()
        dist.barrier(group)
        with descriptors_left(left) if rank == 1 else nullcontext():
            check(group, PROBLEM, call(group, PROBLEM))
        check_all_alike(group, found, before)


@on_ranks(2)
@pytest.mark.parametrize(("left", "found"), [(0, "memfd_create"), (1, "cannot open /proc"), (2, None)])
def test_a_tensor_of_a_rank_without_descriptors(rank: int, left: int, found: str | None) -> None:
    """torch's own rendezvous: the same error on all ranks at once, and the next one succeeds."""
    t = symm_mem.empty(8, device=CPU)
    before = footprint()
    with descriptors_left(left) if rank == 1 else nullcontext():
        error = error_of(lambda: rendezvous(t))
    if found is None:
        assert error == "no error"
    else:
        assert footprint() == before
        assert f"rank 1 has nothing to offer: {found}" in error and "Too many open files" in error
    assert rendezvous(t).world_size == 2


SLOT_BYTES = 16 * MIB  # two are a segment, so that what else a rank allocates does not matter


@on_ranks(2)
@pytest.mark.parametrize(
    ("left", "found"),
    [(MIB, "cannot allocate a workspace"), (3 * SLOT_BYTES, "rank 1 cannot use the memory of rank 0"), (None, None)],
)
def test_a_rank_without_address_space(rank: int, left: int | None, found: str | None) -> None:
    with fresh_group(TIMEOUT_S="5") as group, pytest.MonkeyPatch.context() as patch:
        members.member(group.group_name, CPU)
        before = footprint()
        patch.setattr(group_member, "_MIN_SLOT_BYTES", SLOT_BYTES)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        few = rank == 1 and left is not None
        with limited(resource.RLIMIT_AS, used + (left or 0) + 8 * MIB) if few else nullcontext():
            check(group, PROBLEM, call(group, PROBLEM))
        check_all_alike(group, found, before)


@on_ranks(2)
def test_a_rank_whose_files_must_be_small(rank: int) -> None:
    """RLIMIT_FSIZE, which ends a process by SIGXFSZ unless it ignores that, as Python does."""
    with fresh_group(TIMEOUT_S="5") as group:
        members.member(group.group_name, CPU)
        before = footprint()
        with limited(resource.RLIMIT_FSIZE, MIB) if rank == 1 else nullcontext():
            check(group, PROBLEM, call(group, PROBLEM))
        check_all_alike(group, "File too large", before)


@on_ranks(2)
@pytest.mark.parametrize("folder", ["full", "with a limit"])
def test_a_dump_that_does_not_fit_hides_no_error(rank: int, folder: str, tmp_path: Path) -> None:
    """The old dump stays whole, and nothing lies beside it."""
    limit = limited(resource.RLIMIT_FSIZE, 1024) if folder == "with a limit" else nullcontext()
    with fresh_group(TIMEOUT_S="5", DUMP_DIR=str(tmp_path)) as group:
        mounted = folder == "full" and rank == 0 and mount(tmp_path)
        tried = [mounted]
        dist.broadcast_object_list(tried, 0)
        if folder == "full" and not tried[0]:
            pytest.skip("no tmpfs can be mounted here")
        try:
            dist.barrier(group)
            file = tmp_path / f"rank{rank}.json"
            file.write_text("{}")
            with limit, pytest.raises(fusedcomm.PeerMismatchError):
                (fusedcomm.close if rank else fusedcomm.reset)(group)
            dist.barrier(group)
            assert json.loads(file.read_text()) == {}
            assert {each.name for each in tmp_path.iterdir()} == {"rank0.json", "rank1.json"}
        finally:
            dist.barrier(group)
            if mounted:
                subprocess.run(["umount", str(tmp_path)], check=True)


def mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def as_another_user(rank: int) -> tuple[str, str, str]:
    """A first call, a second one after a reset, and torch's rendezvous, while rank 0 is the user nobody."""
    group = dist.group.WORLD
    with fresh_group() as other:
        check(other, PROBLEM, call(other, PROBLEM))  # all modules are loaded, which the other one may not be able to
    if rank == 0:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    check(group, PROBLEM, call(group, PROBLEM))
    reason = str(member_of(group).no_workspace)
    fusedcomm.reset()
    check(group, PROBLEM, call(group, PROBLEM, 1), 1)
    t = symm_mem.empty(8, device=CPU)
    return reason, str(member_of(group).no_workspace), error_of(lambda: rendezvous(t))


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_rank_of_another_user_makes_all_run_unfused() -> None:
    with RankPool(2, env={"FUSEDCOMM_TIMEOUT_S": "20"}) as pool:
        first, second = pool.run(as_another_user)
    assert first[:2] == second[:2]
    for text in (*first, *second):
        assert "rank 0 cannot use the memory of rank 1: cannot " in text and "Permission denied" in text
        assert "the processes must run on one host, in one pid namespace, as one user, and be alive" in text
