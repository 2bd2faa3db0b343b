"""What goes wrong between ranks. Bad arguments of one rank are ValueError; everything here names the peers."""

from __future__ import annotations

from collections.abc import Sequence

RESET_FIRST = "Call fusedcomm.reset(group) on every rank before the next call"


class PeerError(RuntimeError):
    """A call could not be completed with its peers; the workspace is unusable until ``fusedcomm.reset(group)``.

    ``peers`` are ranks in the group, ``op`` the op's name and ``epoch`` the round that failed (0: before the first).
    """

    def __init__(self, message: str, *, peers: Sequence[int], op: str, epoch: int) -> None:
        super().__init__(message)
        self.peers = list(peers)
        self.op = op
        self.epoch = epoch

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), self.peers, self.op, self.epoch)

    def again(self) -> PeerError:
        """The same error for a later call on the workspace that it broke."""
        return type(self)(str(self), peers=self.peers, op=self.op, epoch=self.epoch)


class PeerTimeoutError(PeerError):
    """A peer did not signal within ``FUSEDCOMM_TIMEOUT_S``: dead, late, never called the op, or left it."""


class PeerMismatchError(PeerError):
    """A peer called another op, or this op with other shapes, dtype or dims."""


def _rebuild(cls: type[PeerError], message: str, peers: list[int], op: str, epoch: int) -> PeerError:
    return cls(message, peers=peers, op=op, epoch=epoch)
