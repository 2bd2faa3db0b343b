"""Guard bytes around slots: what is written past one, by how little, is found, named, and told to all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.memory import canaries
from fusedcomm.memory.canaries import GUARD_BYTES
from fusedcomm.memory.segment import MOST_SLOT_BYTES, NUM_SLOTS, HeaderLayout
from fusedcomm.memory.workspace import Workspace
from tests.helpers.groups import call, check, fresh_group
from tests.helpers.problems import HEADS
from tests.helpers.virtual_ranks import sparse

SLOT_BYTES = 1 << 12


def guarded() -> Workspace:
    size = Workspace.num_bytes(2, SLOT_BYTES, GUARD_BYTES)
    segments = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    for segment in segments:
        Workspace.initialise(segment, 2, GUARD_BYTES)
    return Workspace(0, segments, "plain", None, GUARD_BYTES)


def slot(workspace: Workspace, i: int) -> tuple[int, int]:
    start = workspace.layout.slot(i, workspace.slot_bytes)
    return start, start + workspace.usable_bytes


def damage(workspace: Workspace) -> str | None:
    return canaries.damage(workspace.buffers[0], workspace.layout, workspace.slot_bytes, 0)


@pytest.mark.parametrize("num_bytes", [1, 7, GUARD_BYTES])
@pytest.mark.parametrize(("side", "i"), [("before", 0), ("behind", NUM_SLOTS - 1)])
def test_an_overrun_is_found_and_named(side: str, i: int, num_bytes: int) -> None:
    workspace = guarded()
    start, end = slot(workspace, i)
    where = slice(start - num_bytes, start) if side == "before" else slice(end, end + num_bytes)
    workspace.buffers[0][where] = 0
    text = damage(workspace)
    assert text is not None and text.startswith("guard bytes of rank 0's segment must stay as they are")
    offset = num_bytes if side == "before" else 0
    if num_bytes < GUARD_BYTES:  # else it is as near to the other slot
        assert f"{num_bytes} bytes from {offset} bytes {side} slot {i} on are now 00" in text


def test_an_overrun_of_the_largest_slots_is_found() -> None:
    """The guard lies near 2^33."""
    i = NUM_SLOTS - 1
    layout, size = HeaderLayout(2, guard_bytes=GUARD_BYTES), Workspace.num_bytes(2, MOST_SLOT_BYTES, GUARD_BYTES)
    segment, slot_bytes = sparse(size, torch.uint8), layout.slot_bytes(size)
    assert slot_bytes == MOST_SLOT_BYTES + GUARD_BYTES
    Workspace.initialise(segment, 2, GUARD_BYTES)
    assert canaries.damage(segment, layout, slot_bytes, 0) is None
    segment[layout.header_bytes + i * slot_bytes + MOST_SLOT_BYTES] = 0
    text = canaries.damage(segment, layout, slot_bytes, 0)
    assert text is not None and f"1 bytes from 0 bytes behind slot {i} on are now 00" in text


def check_overrun(rank: int) -> str:
    """Rank 1 writes into rank 0's segment, in the middle of a call. All ranks hear of it, and go on after a reset."""
    signal = Workspace.signal

    def overrun(self: Workspace, dst_rank: int, epoch: int, fingerprint: int) -> None:
        if dst_rank == 0:
            _, end = slot(self, epoch)
            self.buffers[0][end] = 0
        signal(self, dst_rank, epoch, fingerprint)

    with fresh_group(CHECK="1", TIMEOUT_S="20") as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, HEADS, call(group, HEADS))
        dist.barrier(group)  # rank 0 has looked at its guards
        text = ""
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(Workspace, "signal", overrun)
            dist.barrier(group)
            try:
                call(group, HEADS, 1)
            except fusedcomm.PeerError as error:
                text = str(error)
        dist.barrier(group)
        with pytest.raises(fusedcomm.PeerError):
            call(group, HEADS, 2)
        dist.barrier(group)
        fusedcomm.reset(group)
        check(group, HEADS, call(group, HEADS, 3), 3)
        return text


def test_an_overrun_of_a_peer_is_told_to_all_ranks(ranks: Any) -> None:
    texts = ranks(3).run(check_overrun)
    assert "guard bytes of rank 0's segment must stay as they are, but 1 bytes from 0 bytes behind slot" in texts[0]
