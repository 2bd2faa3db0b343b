"""Virtual groups on one GPU, as far as a CPU can tell."""

import threading
from collections import Counter

import pytest
import torch

from fusedcomm.bench import virtual
from fusedcomm.bench.virtual import VirtualGroup, answer_later_rounds
from fusedcomm.memory import beside_kernels
from fusedcomm.memory import workspace as workspaces
from fusedcomm.memory.segment import FINGERPRINT_BITS

FINGERPRINT, NUM_ROUNDS = 7, 6


def test_later_rounds_are_answered_when_their_slot_is_read() -> None:
    """A thread stands for the device: it ends a round when it finds all of its flags, and exactly those."""
    workspace = VirtualGroup(3, 1024, "cpu").workspaces[1]
    words = workspace.buffers[1][: workspace.layout.header_bytes].view(torch.int64)
    flags = [workspace.layout.flag(epoch, 0) // 8 for epoch in range(NUM_ROUNDS + 1)]
    seen: list[int] = []

    def device() -> None:
        for epoch in range(3, NUM_ROUNDS + 1):
            words[workspace.layout.epoch // 8] = epoch - 2
            while int(words[flags[epoch]]) >> FINGERPRINT_BITS < epoch:
                pass
            later = (epoch + 1) % 2 * 3
            seen.append(int(words[workspace.layout.flags // 8 + later]) >> FINGERPRINT_BITS)

    workspace.epoch = NUM_ROUNDS
    running = threading.Thread(target=device, daemon=True)
    running.start()
    answer_later_rounds(workspace, FINGERPRINT)
    running.join(10)
    assert seen == [0, 3, 4, 5]  # what the other slot's flag held: that of the round before, not of the one after
    assert words[flags[NUM_ROUNDS]].item() == NUM_ROUNDS << FINGERPRINT_BITS | FINGERPRINT


def test_a_round_that_does_not_end_is_an_error() -> None:
    workspace = VirtualGroup(2, 1024, "cpu").workspaces[0]
    workspace.epoch = 3
    with pytest.raises(RuntimeError, match=r"round 1 must end within 0\.01 s"):
        answer_later_rounds(workspace, FINGERPRINT, patience_s=0.01)


def test_ranks_and_the_host_have_the_same_streams_in_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's pool has 32 of a priority and begins again: the host's stream must not become one that waits. What other
    threads send beside a capture is not in its graph.
    """
    made: list[int] = []  # priorities
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: made.append(priority))
    device, caches = torch.device("cuda", 0), (virtual._stream, workspaces._streams, beside_kernels._stream)
    for cached in caches:
        cached.cache_clear()
    for captured in [False] * 32 + [True]:
        monkeypatch.setattr(workspaces, "is_capturing", lambda device, captured=captured: captured)
        for each in VirtualGroup(8, 1024, "cpu").workspaces:
            each.device = device
            assert len(each.streams) == 2
            virtual._stream(device, each.rank)
        beside_kernels._stream(device)
    for cached in caches:
        cached.cache_clear()
    assert Counter(made) == {0: 8, -1: 32, -2: 1}
