"""A peer that has failed goes on with what is queued: its next push overwrites what is still read, and it says so."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedcomm.bench import launch_now
from fusedcomm.kernels.triton import copy, primitives, token_rows
from fusedcomm.kernels.triton.bundles import Span
from fusedcomm.plan.geometry.spans import RoundSpans
from fusedcomm.plan.routing import ROWS
from tests.helpers import virtual_ranks as virtual
from tests.helpers.token_rows import routings
from tests.kernels import test_failed_waits
from tests.kernels.test_failed_waits import of_rows

SPANS = RoundSpans(*[Span(size=8, start=0, inner=8, outer_stride=0, peer_stride=8)] * 5)
EMPTY = RoundSpans(*[Span(size=0, start=0, inner=1, outer_stride=0, peer_stride=0)] * 5)
RIGHT = torch.tensor([100.0, 101.0]).repeat_interleave(8)  # what ranks 0 and 1 send in round 1
Push = Callable[[virtual.VirtualRank, int], None]
Ranks = tuple[virtual.VirtualRank, virtual.VirtualRank]


def sent(rank: virtual.VirtualRank, epoch: int) -> Tensor:
    return torch.full((16,), 100.0 * epoch + rank.rank)


def pack(rank: virtual.VirtualRank, epoch: int) -> None:
    launch_now.pack(sent(rank, epoch), SPANS, rank, virtual.FINGERPRINT)


def copy_engine(rank: virtual.VirtualRank, epoch: int) -> None:
    """Pushes as chunked makes them: the host has queued the copies, and knows nothing of a failure."""
    launch_now.begin_push(rank)
    slot = rank.layout.slot(epoch, rank.slot_bytes) + rank.rank * 32
    for segment in rank.buffers:
        segment[slot : slot + 32].view(torch.float32).copy_(sent(rank, epoch)[:8])
    launch_now.signal(rank, None, virtual.FINGERPRINT)


def unpack(rank: virtual.VirtualRank) -> Tensor:
    out = torch.zeros(16)
    launch_now.unpack(out, SPANS, rank, virtual.FINGERPRINT)
    return out


def go_on(rank: virtual.VirtualRank, push: Push) -> None:
    push(rank, 3)


def go_on_after_an_empty_round(rank: virtual.VirtualRank, push: Push) -> None:
    """An empty round pushes nothing and only signals: round 4 goes to the other slot, round 5 to where round 1 was."""
    nothing = torch.empty(0)
    launch_now.pack(nothing, EMPTY, rank, virtual.FINGERPRINT)
    launch_now.unpack(nothing, EMPTY, rank, virtual.FINGERPRINT)
    push(rank, 4)
    unpack(rank)
    push(rank, 5)


def read_beside_a_failed_peer(
    monkeypatch: pytest.MonkeyPatch, push: Push, queued: Callable[[virtual.VirtualRank, Push], None] = go_on
) -> tuple[Tensor, Ranks]:
    """Rank 1 is late in its reads of round 1; rank 0 gives up on round 2, and has more in its queue."""
    monkeypatch.setattr(virtual, "NUM_PROGRAMS", dict.fromkeys(virtual.NUM_PROGRAMS, 1))
    early, late = virtual.virtual_ranks(2, slot_bytes=2 * 8 * 4)
    early.word(early.layout.timeout)[0] = int(20e6)
    push(early, 1)
    push(late, 1)
    copy_chunk, chunks = copy._copy, 0

    def copy_late(*args: Any) -> Any:
        nonlocal chunks
        chunks += 1
        if chunks == 2:  # the late rank has waited for the early one, and is about to read
            monkeypatch.setattr(copy, "_copy", copy_chunk)
            assert torch.equal(unpack(early), RIGHT)
            push(early, 2)
            assert unpack(early).isnan().all()
            assert late.broken[0] >> 8 == 2  # round 1 is good until rank 0 goes on
            queued(early, push)
        return copy_chunk(*args)

    monkeypatch.setattr(copy, "_copy", copy_late)
    out = unpack(late)
    assert chunks >= 2
    return out, (early, late)


@pytest.mark.parametrize(("push", "queued"), [(pack, go_on_after_an_empty_round), (copy_engine, go_on)])
def test_who_still_reads_is_told(monkeypatch: pytest.MonkeyPatch, push: Push, queued: Any) -> None:
    out, (_, late) = read_beside_a_failed_peer(monkeypatch, push, queued)
    assert out.isnan().all()
    kind, epoch, rank = late.record[1:4].tolist()
    assert (kind, epoch, rank) == (3, 1, 1) and late.record[-2:].tolist() == [1, 0]  # rank 0 gave up
    assert late.broken[0] >> 8 == 1


def test_a_failure_in_an_earlier_round_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushes of later rounds write where a reader finds the word of round 2, or of round 1, as it is."""
    _, (early, late) = read_beside_a_failed_peer(monkeypatch, pack)
    unpack(early)
    pack(early, 4)
    assert late.broken[0] >> 8 == 1 and early.broken[0] >> 8 == 2


def in_own_slots(*args: Any) -> list[Tensor]:
    """Routings as if a rank had more rows than fit."""
    found = routings(*args)
    for packed in found:
        packed[ROWS.returned] += 1000
    return found


@pytest.mark.parametrize("tells", [True, False])
def test_who_still_reads_the_slot_of_a_failed_peer_is_told(monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    """Rows of a combine that do not fit stay in their own slot. The control reads those of round 3 in round 1."""
    monkeypatch.setattr(test_failed_waits, "routings", in_own_slots)
    monkeypatch.setattr(virtual, "NUM_PROGRAMS", dict.fromkeys(virtual.NUM_PROGRAMS, 1))
    early, late = virtual.virtual_ranks(2, slot_bytes=12 * 8 * 4)
    early.word(early.layout.timeout)[0] = int(20e6)
    show, add = (partial(of_rows, name, fingerprint=virtual.FINGERPRINT) for name in ("return_rows", "add_rows"))
    place, tell = token_rows._place, primitives.give_up_earlier

    def place_late(*args: Any) -> Any:  # the late rank has waited for the early one, and is about to read
        monkeypatch.setattr(token_rows, "_place", place)
        assert (add(early, 0) == 2).all()
        show(early, 2)
        assert add(early, 0).isnan().all()
        monkeypatch.setattr(primitives, "give_up_earlier", tell if tells else lambda *args: None)
        show(early, 3)
        return place(*args)

    for rank in (early, late):
        show(rank, 1)
    monkeypatch.setattr(token_rows, "_place", place_late)
    out = add(late, 0)
    assert out.isnan().all() if tells else (out == 1 + 3).all()
    assert late.broken[0] >> 8 == (1 if tells else 2)
