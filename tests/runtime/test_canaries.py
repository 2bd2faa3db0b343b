"""Guard bytes around slots and results: what is written past one, by how little, is found, named, and told to all."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.runtime import canaries
from fusedcomm.runtime.canaries import GUARD_BYTES
from fusedcomm.runtime.segment import MOST_SLOT_BYTES, NUM_SLOTS, HeaderLayout, slot_bytes_within
from fusedcomm.runtime.workspace import Round, Workspace
from tests.helpers.groups import call, check, fresh_group, member_of
from tests.helpers.in_place import TO_ALL, assert_exact, results_of, wanted
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import PROBLEMS
from tests.helpers.sparse import sparse

HEADS = next(problem for problem in PROBLEMS if problem.name == "heads")
SLOT_BYTES = 1 << 12


def guarded() -> Workspace:
    """The workspace of rank 0 of two, in plain memory."""
    size = Workspace.num_bytes(2, SLOT_BYTES, GUARD_BYTES)
    segments = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    for segment in segments:
        Workspace.initialise(segment, 2, GUARD_BYTES)
    return Workspace(0, segments, "plain", None, GUARD_BYTES)


def slot(workspace: Workspace, i: int) -> tuple[int, int]:
    start = workspace.layout.slot(i, workspace.slot_bytes)
    return start, start + workspace.usable_bytes


def test_the_layout_has_a_guard_on_either_side_of_each_slot() -> None:
    workspace = guarded()
    assert workspace.usable_bytes == SLOT_BYTES
    starts = workspace.layout.guards(workspace.slot_bytes)
    ends = [start + GUARD_BYTES for start in starts]
    slots = [slot(workspace, i) for i in range(NUM_SLOTS)]
    assert ends[:-1] == [start for start, _ in slots]
    assert starts[1:] == [end for _, end in slots]
    assert starts[0] == HeaderLayout(2).header_bytes
    assert ends[-1] == workspace.buffers[0].numel()
    assert all(start % 128 == 0 for start in starts)


@pytest.mark.parametrize("cap", [100_000, 1 << 20])
def test_slots_with_guards_keep_within_the_cap(cap: int) -> None:
    usable = slot_bytes_within(cap, 4, GUARD_BYTES)
    size = Workspace.num_bytes(4, usable, GUARD_BYTES)
    assert cap - 2 * 128 * NUM_SLOTS < size <= cap


def damage(workspace: Workspace) -> str | None:
    return canaries.damage(workspace.buffers[0], workspace.layout, workspace.slot_bytes, 0)


def test_slots_that_are_full_harm_no_guard() -> None:
    """Negative control: slots that are full harm no guard."""
    workspace = guarded()
    for i in range(NUM_SLOTS):
        start, end = slot(workspace, i)
        workspace.buffers[0][start:end] = 255
    workspace.buffers[0][: HeaderLayout(2).header_bytes] = 255
    assert damage(workspace) is None


@pytest.mark.parametrize("num_bytes", [1, 2, 7, GUARD_BYTES])
@pytest.mark.parametrize("i", range(NUM_SLOTS))
@pytest.mark.parametrize("side", ["before", "behind"])
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


@pytest.mark.parametrize("i", range(NUM_SLOTS))
def test_an_overrun_of_the_largest_slots_is_found(i: int) -> None:
    """The guards lie around 2^32 and 2^33."""
    layout, size = HeaderLayout(2, guard_bytes=GUARD_BYTES), Workspace.num_bytes(2, MOST_SLOT_BYTES, GUARD_BYTES)
    segment, slot_bytes = sparse(size, torch.uint8), layout.slot_bytes(size)
    assert slot_bytes == MOST_SLOT_BYTES + GUARD_BYTES
    Workspace.initialise(segment, 2, GUARD_BYTES)
    assert canaries.damage(segment, layout, slot_bytes, 0) is None
    segment[layout.header_bytes + i * slot_bytes + MOST_SLOT_BYTES] = 0
    text = canaries.damage(segment, layout, slot_bytes, 0)
    assert text is not None and f"1 bytes from 0 bytes behind slot {i} on are now 00" in text


def test_no_constant_can_hide_behind_the_pattern() -> None:
    pattern = canaries._pattern(GUARD_BYTES)
    assert (pattern != 0).all()
    assert (pattern[1:] != pattern[:-1]).all()


def write_past(workspace: Workspace, victim: int, side: str, num_bytes: int) -> None:
    """Write past the slot of the next round."""
    start, end = slot(workspace, workspace.epoch + 1)
    where = slice(start - num_bytes, start) if side == "before" else slice(end, end + num_bytes)
    workspace.buffers[victim][where] = 0


def check_overrun(rank: int, algorithm: str, side: str, num_bytes: int) -> str:
    """Rank 1 writes into rank 0's segment, in the middle of a call. All ranks hear of it, and go on after a reset."""
    part = Round.part

    def overrun(self: Round, dst_rank: int) -> torch.Tensor:
        if dst_rank == 0:
            write_past(self.workspace, 0, side, num_bytes)
        return part(self, dst_rank)

    with fresh_group(CHECK="1", TIMEOUT_S="20") as group, fusedcomm.force_algorithm(algorithm, strict=True):
        check(group, HEADS, call(group, HEADS))
        dist.barrier(group)  # rank 0 has looked at its guards
        text = ""
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and algorithm == "chunked":
                patch.setattr(Round, "part", overrun)
            elif rank == 1:
                write_past(member_of(group).workspace, 0, side, num_bytes)
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


@pytest.mark.parametrize(
    "algorithm, side, num_bytes",
    [("chunked", "behind", 1), ("chunked", "before", 8), pytest.param("fused", "before", 8, marks=pytest.mark.nightly)],
)
def test_an_overrun_of_a_peer_is_told_to_all_ranks(ranks: Any, algorithm: str, side: str, num_bytes: int) -> None:
    texts = ranks(3).run(check_overrun, algorithm, side, num_bytes)
    assert "guard bytes of rank 0's segment must stay as they are, but " in texts[0]
    assert f"{num_bytes} bytes from {num_bytes if side == 'before' else 0} bytes {side} slot" in texts[0]


@on_ranks(2)
def test_without_the_setting_an_overrun_goes_unnoticed(rank: int) -> None:
    """Negative control: without FUSEDCOMM_CHECK there are no guards, and nobody notices."""
    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, HEADS, call(group, HEADS))
        workspace = member_of(group).workspace
        assert workspace.usable_bytes == workspace.slot_bytes
        dist.barrier(group)
        if rank == 1:
            end = workspace.layout.slot(0, workspace.slot_bytes) + workspace.slot_bytes
            workspace.buffers[0][end : end + 1] = 0
        dist.barrier(group)
        check(group, HEADS, call(group, HEADS, 1), 1)


# results


@pytest.mark.parametrize("num_bytes", [1, 2, 7, GUARD_BYTES])
@pytest.mark.parametrize("side", ["before", "behind"])
def test_a_write_past_a_result_is_found_and_named(side: str, num_bytes: int) -> None:
    block = torch.zeros(100 + 2 * GUARD_BYTES, dtype=torch.uint8)
    result = canaries.paint_around(block).view(torch.float32).view(5, 5).fill_(3)
    assert canaries.damage_around(result, 0) is None
    start = GUARD_BYTES - num_bytes if side == "before" else GUARD_BYTES + 100
    block[start : start + num_bytes] = 0
    text = canaries.damage_around(result, 4)
    assert text is not None and text.startswith("guard bytes of rank 4's result must stay as they are")
    assert f"{num_bytes} bytes from {num_bytes if side == 'before' else 0} bytes {side} it on are now 00" in text


def check_overrun_of_a_result(rank: int, side: str, num_bytes: int) -> str:
    """Rank 1 comes late, finds rank 0's post, and writes past its result."""
    post, posted = Round.post, Round.posted

    def late(self: Round, result: torch.Tensor) -> None:
        time.sleep(0.1)
        post(self, result)

    def overrun(self: Round, dst_rank: int, size: int) -> torch.Tensor | None:
        place = posted(self, dst_rank, size)
        assert place is not None and self.workspace.results is not None
        begin = place.storage_offset() * place.itemsize
        start = begin - num_bytes if side == "before" else begin + size
        self.workspace.results.buffers[dst_rank][start : start + num_bytes] = 0
        return place

    text = ""
    with fresh_group(CHECK="1", TIMEOUT_S="20") as group, fusedcomm.force_algorithm("chunked", strict=True):
        for seed in range(6):
            assert_exact(results_of(group, TO_ALL, seed), wanted(group, TO_ALL, seed))
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(Round, "post", late)
                patch.setattr(Round, "posted", overrun)
            try:
                results_of(group, TO_ALL)
            except fusedcomm.PeerError as error:
                text = str(error)
        dist.barrier(group)
        with pytest.raises(fusedcomm.PeerError):
            results_of(group, TO_ALL)
        dist.barrier(group)
        fusedcomm.reset(group)
        assert_exact(results_of(group, TO_ALL), wanted(group, TO_ALL))
    return text


@pytest.mark.parametrize("side, num_bytes", [("behind", 1), ("before", 8)])
def test_a_write_past_a_result_is_told_to_all_ranks(ranks: Any, side: str, num_bytes: int) -> None:
    texts = ranks(2).run(check_overrun_of_a_result, side, num_bytes)
    assert "guard bytes of rank 0's result must stay as they are, but " in texts[0]
    assert f"{num_bytes} bytes from {num_bytes if side == 'before' else 0} bytes {side} it" in texts[0]
