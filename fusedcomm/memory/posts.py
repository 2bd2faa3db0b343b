"""The headers' words on results in place: where a rank takes its result, and whether a peer has written there.

`fusedcomm.memory.segment.HeaderLayout` says where they are. A stamp is epoch << 24 | (fingerprint ^ layout).
"""

from __future__ import annotations

from fusedcomm.kernels.native_part import loaded
from fusedcomm.memory.segment import FINGERPRINT_BITS, HeaderLayout

_WORD = 8


class Posts:
    """``addresses``: of every rank's segment."""

    def __init__(self, rank: int, addresses: list[int], layout: HeaderLayout) -> None:
        self._rank, self._addresses, self._layout = rank, addresses, layout

    def post(self, peer: int, place: int, num_bytes: int, stamp: int) -> None:
        """Tell a peer where this rank's result is in its heap. The stamp comes last (release)."""
        address = self._addresses[peer] + self._layout.post(self._rank)
        loaded().signal(address, place)
        loaded().signal(address + _WORD, num_bytes)
        loaded().signal(address + 2 * _WORD, stamp)

    def has_come(self, peer: int, epoch: int) -> bool:
        """Whether the peer's post for this round is here, of any layout."""
        return self._stamp(peer) >> FINGERPRINT_BITS == epoch

    def find(self, peer: int, num_bytes: int, stamp: int) -> int | None:
        """The place of the peer's result of this size in its heap, or None without a post with this stamp.

        Everything is compared before the first store: a post of another round or call names memory that may be another
        tensor by now, one of another layout a result whose elements are elsewhere.
        """
        if self._stamp(peer) != stamp:
            return None
        address = self._addresses[self._rank] + self._layout.post(peer)
        place, size = loaded().load(address), loaded().load(address + _WORD)
        return int(place) if size == num_bytes else None

    def _stamp(self, peer: int) -> int:
        """The last word of the peer's post (acquire)."""
        return int(loaded().load(self._addresses[self._rank] + self._layout.post(peer) + 2 * _WORD))

    def mark(self, dst_rank: int, epoch: int) -> None:
        loaded().signal(self._addresses[dst_rank] + self._layout.mark(epoch, self._rank), epoch)

    def is_marked(self, src_rank: int, epoch: int) -> bool:
        return bool(loaded().load(self._addresses[self._rank] + self._layout.mark(epoch, src_rank)) == epoch)
