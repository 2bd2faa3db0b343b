"""The layout of a segment of symmetric memory: a header of flags and words, then slots. The record of a failed wait."""

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch

from fusedcomm.kernels.triton.bundles import SegmentLayout
from fusedcomm.memory.errors import RESET_FIRST, PeerError, PeerMismatchError, PeerTimeoutError

NUM_SLOTS = 2  # a single slot is a race; tests set 1 to see that it is caught
MOST_SLOT_BYTES = (1 << 32) - (1 << 13)  # kernels count its elements, and as many more as there are programs, in int32
FINGERPRINT_BITS = 24
FINGERPRINT = (1 << FINGERPRINT_BITS) - 1
TIMED_OUT, MISMATCHED, BROKEN_BY_PEER, ABANDONED, OVERRUN, ENDED = 1, 2, 3, 4, 5, 6
LAST_WORDS_BYTES = 256


@dataclass(frozen=True)
class HeaderLayout:
    """Byte offsets in a segment: [header | slot 0 | slot 1], the same on every rank. All words are int64.

    With guard bytes: [header | guard | slot 0 | guard | slot 1 | guard]; a slot has its guard at its end.
    """

    group_size: int
    epoch: int = 0  # rounds completed on this rank
    arrivals: int = 8  # finished programs of the kernel that ends a round; the last program resets it
    timeout: int = 16  # nanoseconds
    record: int = 24  # address of the error record
    claim: int = 32  # 1 once a program of this device fills the record
    guard_bytes: int = 0

    @cached_property
    def broken(self) -> int:
        """broken[src_rank]: kind | epoch << 8, not 0 once src_rank has given up on this workspace."""
        return 128

    @cached_property
    def tiles_done(self) -> int:
        """tiles_done[dst_rank]: how many parts the running push or pack kernel has stored."""
        return _aligned(self.broken + 8 * self.group_size)

    @cached_property
    def flags(self) -> int:
        """flags[slot][src_rank]: epoch << 24 | fingerprint."""
        return _aligned(self.tiles_done + 8 * self.group_size)

    @cached_property
    def header_bytes(self) -> int:
        return self.last_words(self.group_size) + self.guard_bytes

    def last_words(self, src_rank: int) -> int:
        """last_words[src_rank]: why a rank has ended, in UTF-8, padded with zeros."""
        return _aligned(self.flags + 8 * NUM_SLOTS * self.group_size) + LAST_WORDS_BYTES * src_rank

    def flag(self, epoch: int, src_rank: int) -> int:
        return self.flags + 8 * (epoch % NUM_SLOTS * self.group_size + src_rank)

    @property
    def for_kernels(self) -> SegmentLayout:
        return SegmentLayout(self.group_size, NUM_SLOTS, self.tiles_done, self.flags, self.header_bytes)

    def segment_bytes(self, slot_bytes: int) -> int:
        """The size of a segment with slots of ``slot_bytes`` beside their guards."""
        return self.header_bytes + NUM_SLOTS * _aligned(slot_bytes + self.guard_bytes)

    def slot(self, epoch: int, slot_bytes: int) -> int:
        return self.header_bytes + epoch % NUM_SLOTS * slot_bytes

    def slot_bytes(self, segment_bytes: int) -> int:
        """The distance from one slot to the next."""
        return (segment_bytes - self.header_bytes) // NUM_SLOTS // 128 * 128

    def guards(self, slot_bytes: int) -> list[int]:
        """The offsets where guards begin."""
        return [self.header_bytes - self.guard_bytes + i * slot_bytes for i in range(NUM_SLOTS + 1)]


def _aligned(offset: int) -> int:
    return -(-offset // 128) * 128


def slot_bytes_within(workspace_bytes: int, group_size: int, guard_bytes: int = 0) -> int:
    """The largest slot, without its guard, of a workspace that holds at most ``workspace_bytes``."""
    header_bytes = HeaderLayout(group_size, guard_bytes=guard_bytes).header_bytes
    slot_bytes = (workspace_bytes - header_bytes) // NUM_SLOTS // 128 * 128 - guard_bytes
    return min(max(0, slot_bytes), MOST_SLOT_BYTES)


class ErrorRecord:
    """The first failed wait: host-visible memory that kernels can write."""

    WORDS = 8

    def __init__(self, group_size: int, device: torch.device) -> None:
        self.group_size = group_size
        num_words, pinned = self.WORDS + 2 * group_size, device.type == "cuda"
        self.words = torch.zeros(num_words, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._state = ctypes.c_int64.from_address(self.words.data_ptr())  # read twice in each call, in no time

    @property
    def filled(self) -> bool:
        return self._state.value == 2

    def mark_dead(self) -> None:
        """Tell plans of the native part, which look at the state alone, that the workspace is dead."""
        self._state.value = self._state.value or 1

    @property
    def epoch(self) -> int:
        return int(self.words[2])

    @property
    def fingerprint(self) -> int:
        """The fingerprint of the call that failed."""
        return int(self.words[4])

    def fill(self, kind: int, epoch: int, rank: int, fingerprint: int, flags: list[int], bad: list[int]) -> None:
        self.words[self.WORDS : self.WORDS + self.group_size] = torch.tensor(flags, device="cpu")
        self.words[self.WORDS + self.group_size + torch.tensor(bad, dtype=torch.int64, device="cpu")] = 1
        self.words[1:5] = torch.tensor([kind, epoch, rank, fingerprint], dtype=torch.int64, device="cpu")
        self.words[0] = 2

    def error(
        self, op: str, group_name: str, timeout_s: float, breakers: dict[int, int], last_words: dict[int, str]
    ) -> PeerError:
        """The record as an exception. ``breakers``: {rank that gave up: cause}."""
        words = self.words.tolist()
        kind, epoch, rank = words[1:4]
        flags = words[self.WORDS : self.WORDS + self.group_size]
        peers = [r for r, bad in enumerate(words[self.WORDS + self.group_size :]) if bad]
        found = [r for r, what in breakers.items() if what == MISMATCHED and r != rank]
        if kind == BROKEN_BY_PEER:  # a kernel may have seen the word of a peer before that of the peer's cause
            peers = [r for r, what in breakers.items() if what in (ABANDONED, ENDED) and r != rank] or peers
        left = [r for r in peers if breakers.get(r) == ABANDONED]
        ended = [f"rank {r} has left: {last_words[r]}" for r in peers if breakers.get(r) == ENDED]
        seen = ", ".join(f"{r}: {flag >> FINGERPRINT_BITS}" for r, flag in enumerate(flags) if r != rank)
        where = f"{op} on group {group_name!r}, rank {rank}, round {epoch}"
        after = f"(rounds seen by rank: {seen}). {RESET_FIRST}"
        error: type[PeerError] = PeerTimeoutError
        if kind == MISMATCHED:
            error = PeerMismatchError
            text = f"ranks {peers} called another op, or this one with other shapes, dtype or dims"
        elif left:
            text = f"ranks {left} left their call half way, by an exception there"
        elif ended:
            text = "; ".join(ended)
        elif found:
            error = PeerMismatchError
            text = f"ranks {found} met another op, or this one with other shapes, dtype or dims"
        elif kind == TIMED_OUT:
            text = f"ranks {peers} did not signal within {timeout_s:g} s"
        else:
            text = f"ranks {peers} gave up on the workspace" if peers else f"the wait was over after {timeout_s:g} s"
        return error(f"{where}: {text} {after}", peers=peers, op=op, epoch=epoch, left=bool(left or ended))
