"""Errors between ranks, which name the peers. A bad argument of one rank is a ValueError or a TypeError.

`chunked` and `fused` calls raise them, and so do collectives of fusedcomm: the first call of a group, `reset`, `close`
and the agreements of `fusedcomm.compile.enable`. Every wait is bounded by ``FUSEDCOMM_TIMEOUT_S``.

Programs import them from `fusedcomm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusedcomm import env

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
        next_step: the advice in the last line of the text.
    """

    def __init__(
        self,
        message: str,
        *,
        peers: Sequence[int],
        op: str,
        epoch: int,
        differs: str | None = None,
        left: bool = False,
    ) -> None:
        """``differs``: the part of the call that differs between ranks, if known.

        ``left``: whether peers, or their store, are known to come no more.
        """
        super().__init__(message)
        self.peers = list(peers)
        self.op = op
        self.epoch = epoch
        self.next_step = _next_step(self, differs, left)

    def __str__(self) -> str:
        return f"{self.args[0]}\n{self.next_step}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args[0], self.__dict__)

    def again(self) -> PeerError:
        """The same error for a later call on the workspace that it broke."""
        return _rebuild(type(self), self.args[0], self.__dict__)

    def until_reset(self) -> PeerError:
        """The error as every call raises it until a reset: ranks that just tried again would meet in other calls."""
        return _rebuild(type(self), f"{self.args[0]}. {RESET_FIRST}", self.__dict__)


class PeerTimeoutError(PeerError):
    """A peer did not signal within ``FUSEDCOMM_TIMEOUT_S``: it died, is late, never called the op, or left it by an
    error.
    """


class PeerMismatchError(PeerError):
    """A peer called another op, or this one with other shapes, dtype or dims."""


def _next_step(error: PeerError, differs: str | None, left: bool) -> str:
    if isinstance(error, PeerTimeoutError) and not left:
        first = (
            "if a rank was only late, raise FUSEDCOMM_TIMEOUT_S on all ranks; if it was in a collective of "
            "torch.distributed, run that by fusedcomm, compiled with enable(), on all ranks or on none"
        )
    elif differs is not None:
        first = f"make {differs} the same on all ranks"
    elif isinstance(error, PeerMismatchError):
        first = (
            "set FUSEDCOMM_CHECK=1 on all ranks, and the error names what differs; if one rank alone has compiled "
            "again, compile on all"
        )
    else:
        first = "read what the other ranks have raised or logged"
    folder = env.dump_dir()
    if folder is None:
        return f"Next: {first}; with FUSEDCOMM_DUMP_DIR=DIR, `fusedcomm postmortem DIR` says what each rank did."
    return f"Next: {first}; `fusedcomm postmortem {folder}` says what each rank did."


def _rebuild(cls: type[PeerError], message: str, attributes: dict[str, Any]) -> PeerError:
    error = cls.__new__(cls, message)
    error.__dict__.update(attributes | {"peers": list(attributes["peers"])})
    return error


def text_of(error: BaseException) -> str:
    """The type and text of any exception; one of a user's own type may fail to make a text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which has no text"
