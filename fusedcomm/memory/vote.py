"""A collective on a store: every rank learns every rank's facts, or after a bounded time an error names the missing
ranks.

It needs no working communication between the ranks, only the store, so it can vote on abilities and rebuild after
failures. Posts of an attempt that failed, or of an earlier group with the same name, never count: an agreement is
reached when every rank has posted that it sees exactly the same attempts of all ranks: their digest.
"""

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, TypeVar

from torch.distributed import DistError, Store

from fusedcomm import env
from fusedcomm.memory import group
from fusedcomm.memory.departures import Departures
from fusedcomm.memory.errors import PeerError, PeerTimeoutError
from fusedcomm.memory.patience import Patience, on_thread

STORE_GRACE_S = 2.0  # how long the store may take to answer when the time is over
MAX_PAUSE_S = 0.02
LOOK_S = 0.01  # per rank, between two looks at who is missing: one asks the store for each key
STORE_THREAD = "fusedcomm-store"

T = TypeVar("T")


def agree(
    store: Store,
    rank: int,
    group_size: int,
    facts: dict[str, Any],
    *,
    what: str,
    names: Sequence[int] | None = None,
    departures: Departures | None = None,
    timeout_s: float | None = None,
) -> list[dict[str, Any]]:
    """Every rank's ``facts`` (JSON), by rank. The keys of ``facts`` are the same on all ranks.

    ``names``: the ranks' numbers in errors, if not 0, 1, ... ``departures``: of the ranks, if they have met before.
    Raises PeerTimeoutError after ``timeout_s``, by default FUSEDCOMM_TIMEOUT_S, or as soon as a rank is known to have
    left, and PeerError if the store has failed or a post is not a vote of this version of fusedcomm.
    """
    vote = _Vote(store, rank, names or range(group_size), what, timeout_s)
    group.refuse_forked(what, vote.name)
    attempt = uuid.uuid4().hex
    seen: str | None = None
    pause = 0.0005
    while True:
        looks = vote.looks()
        latest = vote.read(looks)
        latest[rank] = {"attempt": attempt, "seen": seen, "facts": facts}
        attempts = [post["attempt"] if post else None for post in latest]
        digest = "" if None in attempts else hashlib.sha256("".join(map(str, attempts)).encode()).hexdigest()[:16]
        if digest != seen:
            seen = digest
            latest[rank] = mine = {"attempt": attempt, "seen": seen, "facts": facts}
            vote.post(mine)
        elif None not in attempts and all(post and post["seen"] == seen for post in latest):
            break
        if looks:
            absent = [r for r, post in enumerate(latest) if not post]
            behind = [r for r, post in enumerate(latest) if post and post["seen"] != seen]
            if missing := absent or behind:  # otherwise all have seen the same, just now
                vote.still_waits(missing, vote.departed(missing, departures))
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)
    vote.leave_together(seen, departures)
    agreed = [post["facts"] for post in latest if post]
    for peer, found in enumerate(agreed):
        if found.keys() != facts.keys():
            raise vote.not_ours(peer, json.dumps(found))
    return agreed


class _Vote:
    """One rank's part in a vote: the latest post of every rank, and its errors, within a bounded time."""

    def __init__(
        self, store: Store, rank: int, names: Sequence[int], what: str, timeout_s: float | None = None
    ) -> None:
        self.store = store
        self.rank = rank
        self.names = names
        self.name = names[rank]
        self.keys = [f"post/{r}" for r in range(len(names))]
        self.what = what
        self.timeout = env.timeout_s() if timeout_s is None else timeout_s
        self.patience = Patience()
        self.deadline = self.patience.began + self.timeout
        self.next_look = self.patience.began + LOOK_S * len(names)

    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def post(self, post: dict[str, Any]) -> None:
        self._bounded(lambda: self.store.set(self.keys[self.rank], json.dumps(post)))

    def looks(self) -> bool:
        """Whether it is time to look who is missing."""
        now = time.monotonic()
        if now < min(self.next_look, self.deadline):
            return False
        self.next_look = now + LOOK_S * len(self.keys)
        return True

    def read(self, looks: bool) -> list[dict[str, Any] | None]:
        """The latest post of every rank, or None, by `values`. This never waits, and a post is never removed."""
        found = enumerate(self.values(self.keys, looks))
        return [None if post is None else self._parsed(rank, post) for rank, post in found]

    def values(self, keys: list[str], looks: bool) -> Sequence[bytes | None]:
        """Values by key, or None. While any key is missing all are None, unless the rank ``looks``."""

        def find() -> Sequence[bytes | None]:
            if self.store.check(keys):
                return self.store.multi_get(keys)
            return [self.store.get(key) if looks and self.store.check([key]) else None for key in keys]

        return self._bounded(find)

    def leave_together(self, token: str, departures: Departures | None) -> None:
        """Return when all ranks have agreed. One that returns may post again, and nobody may need its old post then."""
        done = [f"done/{r}" for r in range(len(self.keys))]  # overwritten in the next vote, when all have left this one
        left = json.dumps(token)
        self._bounded(lambda: self.store.set(done[self.rank], left))
        missing, departed = list(range(len(done))), dict[int, str]()
        pause = 0.0005
        while True:
            # A rank may end as soon as it is done, so who was seen to have departed is looked at once more.
            looks = self.looks() or bool(departed)
            found = zip(missing, self.values([done[r] for r in missing], looks), strict=True)
            missing = [r for r, value in found if value != left.encode()]
            if not missing:
                return
            if looks:
                self.still_waits(missing, {r: departed[r] for r in missing if r in departed})
                departed = self.departed(missing, departures)
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)

    def departed(self, ranks: list[int], departures: Departures | None) -> dict[int, str]:
        """{rank: reason} of ranks that have left for good."""
        return {} if departures is None else self._bounded(lambda: departures.last_words(ranks))

    def still_waits(self, missing: list[int], departed: dict[int, str]) -> None:
        """Raise if the time is over or missing ranks have departed. A long wait is logged once."""
        peers = [self.names[r] for r in missing]
        if departed:
            words = "; ".join(f"rank {self.names[r]} has left: {text}" for r, text in departed.items())
            text = f"{self.what}: rank {self.name} waited for ranks {peers}: {words}"
            raise PeerTimeoutError(text, peers=[self.names[r] for r in departed], op=self.what, epoch=0, left=True)
        if self.is_over():
            text = f"{self.what}: rank {self.name} waited {self.timeout:g} s for ranks {peers}, which did not come"
            raise PeerTimeoutError(text, peers=peers, op=self.what, epoch=0)
        if self.patience.is_over:
            self.patience.tell(peers, self.what)

    def not_ours(self, peer: int, found: str | bytes) -> PeerError:
        text = f"rank {self.names[peer]} posted no vote of this version of fusedcomm, but {found[:80]!r}"
        return PeerError(f"{self.what}: {text}", peers=[self.names[peer]], op=self.what, epoch=0)

    def _parsed(self, rank: int, found: bytes) -> dict[str, Any]:
        try:
            post = json.loads(found)
            types = {name: type(value) for name, value in post.items()}
        except (ValueError, AttributeError, RecursionError):
            raise self.not_ours(rank, found) from None
        if types != {"attempt": str, "seen": str, "facts": dict}:
            raise self.not_ours(rank, found)
        return post

    def _bounded(self, call: Callable[[], T]) -> T:
        """Run ``call`` on a thread of its own: without the store's host it blocks as long as TCP tries."""
        result = on_thread(call, STORE_THREAD)
        try:
            return result.result(max(0.0, self.deadline - time.monotonic()) + STORE_GRACE_S)
        except futures.TimeoutError:
            text = f"{self.what}: the store of the process group does not answer rank {self.name}: is its host cut off?"
            raise PeerTimeoutError(text, peers=[], op=self.what, epoch=0, left=True) from None
        except DistError as error:
            text = f"{self.what}: rank {self.name} has lost the store of the process group ({error})"
            raise PeerError(text, peers=[], op=self.what, epoch=0) from error
