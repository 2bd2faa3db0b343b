"""What a rank reports about a cell."""

from __future__ import annotations

from dataclasses import dataclass, field

RIGHT, WRONG, PEER_ERROR, INJECTED, OTHER_ERROR = "right", "wrong", "peer error", "injected", "other error"


@dataclass(frozen=True)
class CallOutcome:
    """What one call gave, or what it raised."""

    kind: str
    text: str = ""
    error: str = ""  # type of the error
    op: str = ""
    epoch: int = 0
    peers: tuple[int, ...] = ()
    called: str = ""  # the op that was called
    epoch_before: int = 0
    seconds: float = 0.0
    index: int = 0  # index of the call


@dataclass(frozen=True)
class RankReport:
    """What one rank reports. ``after``: the call after a reset; where a rank has died, what ``close`` gave."""

    rank: int
    outcomes: list[CallOutcome]
    reached: bool
    memory: list[str] = field(default_factory=list)
    after: CallOutcome | None = None
