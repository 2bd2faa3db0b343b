"""The hole that the model has found, in the kernels themselves (tests/test_protocol_model.py:HOLE)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedcomm.algorithms import launch
from fusedcomm.kernels.triton import copy
from fusedcomm.spans import Span
from tests import virtual_ranks as virtual

SPAN = Span(size=8, start=0, inner=8, outer_stride=0, peer_stride=8)


def pack(rank: virtual.VirtualRank, epoch: int) -> None:
    launch.pack(torch.full((16,), 100.0 * epoch + rank.rank), SPAN, rank, virtual.FINGERPRINT)


def unpack(rank: virtual.VirtualRank) -> Tensor:
    out = torch.zeros(16)
    launch.unpack(out, SPAN, rank, virtual.FINGERPRINT)
    return out


@pytest.mark.xfail(strict=True, reason="a peer that fails in round 2 goes on to push round 3 over what round 1 reads")
def test_a_peer_that_fails_one_round_later_does_not_spoil_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is late in its reads of round 1; rank 0 gives up on round 2, and has round 3 in its queue."""
    monkeypatch.setattr(virtual, "NUM_PROGRAMS", dict.fromkeys(virtual.NUM_PROGRAMS, 1))
    early, late = virtual.virtual_ranks(2, slot_bytes=2 * 8 * 4)
    early.word(early.layout.timeout)[0] = int(20e6)
    pack(early, 1)
    pack(late, 1)
    copy_chunk, chunks = copy._copy, 0

    def copy_late(*args: Any) -> Any:
        nonlocal chunks
        chunks += 1
        if chunks == 2:  # the late rank has waited for the early one, and is about to read
            monkeypatch.setattr(copy, "_copy", copy_chunk)
            torch.testing.assert_close(unpack(early), torch.tensor([100.0, 101.0]).repeat_interleave(8))
            pack(early, 2)
            assert unpack(early).isnan().all()
            pack(early, 3)
        return copy_chunk(*args)

    monkeypatch.setattr(copy, "_copy", copy_late)
    out = unpack(late)
    assert chunks == 2
    expected = torch.tensor([100.0, 101.0]).repeat_interleave(8)
    assert torch.equal(out, expected) or (out.isnan().all() and late.record[0] == 2), out
