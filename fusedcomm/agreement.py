"""One collective on a store: everybody learns everybody's facts, or a bounded time passes and the missing are named.

It needs no working communication between the ranks, only the store, so it can vote on what works and rebuild what
broke. Posts of an attempt that failed, or of a group that had the same name, never count: an agreement is reached when
every rank has posted that it sees exactly the same attempts of all ranks.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from typing import Any

from torch.distributed import Store

from fusedcomm import env
from fusedcomm.errors import PeerTimeoutError


def agree(store: Store, rank: int, group_size: int, facts: dict[str, Any], *, what: str) -> list[dict[str, Any]]:
    """Every rank's ``facts`` (JSON), by rank. Raises PeerTimeoutError after FUSEDCOMM_TIMEOUT_S."""
    timeout = env.timeout_s()
    deadline = time.monotonic() + timeout
    attempt = uuid.uuid4().hex
    posts = _Posts(store, group_size)
    seen: list[str | None] = []
    pause = 0.0005
    while True:
        latest = posts.read()
        latest[rank] = {"attempt": attempt, "seen": seen, "facts": facts}
        attempts = [post["attempt"] if post else None for post in latest]
        if attempts != seen:
            seen = attempts
            posts.write(rank, {"attempt": attempt, "seen": seen, "facts": facts})
        elif None not in attempts and all(post and post["seen"] == seen for post in latest):
            break
        if time.monotonic() > deadline:
            absent = [r for r, post in enumerate(latest) if not post]
            stale = [r for r, post in enumerate(latest) if post and attempt not in post["seen"]]
            behind = [r for r, post in enumerate(latest) if post and post["seen"] != seen]
            raise _timed_out(what, rank, absent or stale or behind, timeout)
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    token = hashlib.sha256("".join(map(str, seen)).encode()).hexdigest()[:16]
    _leave_together(store, rank, group_size, token, deadline, timeout, what)
    return [post["facts"] for post in latest if post]


class _Posts:
    """The latest post of every rank."""

    def __init__(self, store: Store, group_size: int) -> None:
        self.store = store
        self.keys = [f"post/{r}" for r in range(group_size)]

    def read(self) -> list[dict[str, Any] | None]:
        return [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in self.keys]

    def write(self, rank: int, post: dict[str, Any]) -> None:
        self.store.set(self.keys[rank], json.dumps(post))


def _leave_together(
    store: Store, rank: int, group_size: int, token: str, deadline: float, timeout: float, what: str
) -> None:
    """A rank that has agreed may post again at once; nobody may still be looking for its old post then."""
    store.set(f"done/{token}/{rank}", "1")
    missing = list(range(group_size))
    while missing := [r for r in missing if not store.check([f"done/{token}/{r}"])]:
        if time.monotonic() > deadline:
            raise _timed_out(what, rank, missing, timeout)
        time.sleep(0.0005)


def _timed_out(what: str, rank: int, missing: list[int], timeout: float) -> PeerTimeoutError:
    return PeerTimeoutError(
        f"{what}: rank {rank} waited {timeout:g} s for ranks {missing}, which did not come",
        peers=missing,
        op=what,
        epoch=0,
    )
