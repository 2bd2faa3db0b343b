"""A rank that reaches a limit of the system: all ranks of its group do the same, and nothing is left behind."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fusedcomm
from fusedcomm.memory import group_member, members
from tests.helpers.groups import call, check, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import HEADS
from tests.helpers.symmetric_memory import CPU, footprint

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
    check(group, HEADS, call(group, HEADS, 1), 1)
    assert member_of(group).no_workspace is None


# A workspace takes one descriptor. Its rendezvous needs a second one for the signals and a third one for /proc.
WITHOUT_DESCRIPTORS = ["rank 1: it cannot find out what", "rank 1 has nothing to offer: memfd", "nothing to offer"]


@on_ranks(2)
@pytest.mark.parametrize(("left", "found"), list(enumerate(WITHOUT_DESCRIPTORS)))
def test_a_rank_without_descriptors(rank: int, left: int, found: str) -> None:
    with fresh_group(TIMEOUT_S="5") as group:
        with fusedcomm.force_algorithm("unfused"):
            check(dist.group.WORLD, HEADS, call(dist.group.WORLD, HEADS))  # torch has loaded what it uses
        before = footprint()
        dist.barrier(group)
        with descriptors_left(left) if rank == 1 else nullcontext():
            check(group, HEADS, call(group, HEADS))
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
            check(group, HEADS, call(group, HEADS))
        check_all_alike(group, found, before)


@on_ranks(2)
def test_a_rank_whose_files_must_be_small(rank: int) -> None:
    """RLIMIT_FSIZE, which ends a process by SIGXFSZ unless it ignores that, as Python does."""
    with fresh_group(TIMEOUT_S="5") as group:
        members.member(group.group_name, CPU)
        before = footprint()
        with limited(resource.RLIMIT_FSIZE, MIB) if rank == 1 else nullcontext():
            check(group, HEADS, call(group, HEADS))
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
