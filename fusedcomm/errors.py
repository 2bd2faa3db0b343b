"""Errors between ranks, which name the peers. A bad argument of one rank is a ValueError.

`chunked` and `fused` calls raise them, and so does what ranks do together: the first call of a group, `reset`, `close`
and the agreements of `fusedcomm.compile.enable`. Every wait is bounded by ``FUSEDCOMM_TIMEOUT_S``.

Programs import them from `fusedcomm`.
"""

from __future__ import annotations

from collections.abc import Sequence

RESET_FIRST = "Call fusedcomm.reset(group) on every rank before the next call"


class PeerError(RuntimeError):
    """A call could not be completed with its peers.

    The group's memory is unusable from then on: every later call that would use it raises the error again, until all
    ranks have called `reset`. With ``FUSEDCOMM_CHECK=1`` a mismatch is found before anything is sent, and the group can
    go on.

    Attributes:
        peers: the ranks in the group that did not come or made another call; empty where that is not known.
        op: the name of the op or function that failed on this rank.
        epoch: the number of the round that failed, counted since the group's workspace was made; 0 where ranks failed
            to come together outside of a round.
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
    """A peer did not signal within ``FUSEDCOMM_TIMEOUT_S``: it died, is late, never called the op, or left it by an
    error.
    """


class PeerMismatchError(PeerError):
    """A peer called another op, or this one with other shapes, dtype or dims."""


def _rebuild(cls: type[PeerError], message: str, peers: list[int], op: str, epoch: int) -> PeerError:
    return cls(message, peers=peers, op=op, epoch=epoch)
