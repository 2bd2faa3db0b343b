"""Consent of a group's ranks to a change of their programs, which each rank compiles apart and maybe alone.

A ballot compares a digest of everything that must be equal for the change. Its number counts a rank's ballots on that
digest. The last rank to come answers yes. A rank that waits too long, or sees that a peer has come to something else,
answers no, by compare-and-set, and all take the answer that stands. A rank that compiles a program again, alone, takes
the earlier answer, as its peers still run that program: else they would have noted so at the ballot that agreed to it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from fusedcomm import env
from fusedcomm.memory import group as groups

YES, OTHER, ABSENT, ALONE = "yes", "other", "absent", "alone"
_PATIENCE, _SHORT = 1 / 5, 1 / 50  # of FUSEDCOMM_TIMEOUT_S; short: while programs differ
_MAX_PAUSE_S = 0.05
_consents: weakref.WeakKeyDictionary[ProcessGroup, Consent] = weakref.WeakKeyDictionary()
_num_lives: Counter[tuple[object, ...]] = Counter()  # by a group's name and ranks
_lock = threading.Lock()
Program = str | None  # a name for what a rank compiles, equal if it does so again; None: unknown


class Answer(NamedTuple):
    """YES; or OTHER or ABSENT, with the ranks that have other programs, or did not come."""

    kind: str
    peers: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()  # all that had not come to the ballot

    @staticmethod
    def of(text: str) -> Answer:
        kind, *ranks = text.split(":")
        return Answer(kind, *(tuple(map(int, each.split(","))) for each in ranks))

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.peers) > 1 else ''} {', '.join(map(str, self.peers))}"
        return f"{ranks} did not come to compile it in time" if self.kind == ABSENT else f"{ranks} compiled another one"


def of(pg: ProcessGroup) -> Consent | None:
    """This rank's part; None where there is nobody to ask."""
    if pg.size() == 1 or dist.get_backend(pg) == "fake":
        return None
    with _lock:
        if pg not in _consents:
            _consents[pg] = Consent(groups.store(pg, f"consent/{_life(pg)}"), pg.rank(), pg.size())
        return _consents[pg]


def _life(pg: ProcessGroup) -> int:
    """The next number of the groups of this name and these ranks: a later one can have the store of an earlier one.

    Ranks that have seen fewer of them get no answer.
    """
    key = pg.group_name, *dist.get_process_group_ranks(pg)
    _num_lives[key] += 1
    return _num_lives[key]


class Consent:
    """A rank's part in its group's ballots."""

    def __init__(self, store: Store, rank: int, group_size: int) -> None:
        self.store, self.rank, self.group_size = store, rank, group_size
        self.agreed: set[str] = set()
        self._lock = threading.RLock()
        self._count = 0  # programs that this rank has come to
        self._new = 0  # twice the ones on which it had not agreed before, less 1 while it asks about one
        self._ballots: dict[str, int] = {}  # by digest: how many this rank has come to
        self._answers: dict[tuple[str, Program], Answer] = {}  # by digest and program: the last one
        self._agreed_at: dict[Program, str] = {}  # the ballots that agreed to what all ranks run
        self._latest: list[str] = []  # the ballots of the last digest
        self._bases = [0] * group_size  # every rank's count when all had come to one ballot
        self._in_step = True

    def pass_by(self, program: Program = None) -> None:
        """Tell peers that this rank has come to a program and changes nothing in it."""
        with self._lock:
            agreed_at = self._agreed_at.pop(program, None)
            self._leave(agreed_at)
            self._count += 1
            self._new += 2 * (agreed_at is None)
            self._tell()

    def ask(
        self, digest: str, timeout_s: float | None = None, program: Program = None, is_first: bool = False
    ) -> Answer:
        """The group's answer. ``timeout_s``: the longest wait for a peer, by default a part of FUSEDCOMM_TIMEOUT_S.

        ``is_first``: the program of this name has not been compiled before, whatever was of that name.
        """
        with self._lock:
            if is_first:
                self._agreed_at.pop(program, None)
            # None: of the program as it came from Inductor's cache, in `same_moves`
            formers = [] if is_first else [self._answers.get((digest, each)) for each in (program, None)]
            former = next(filter(None, formers), None)
            patience = _PATIENCE if self._in_step or former == Answer(YES) else _SHORT
            deadline = time.monotonic() + (env.timeout_s() * patience if timeout_s is None else timeout_s)
            self._find_bases()
            self._count += 1
            alone, self._latest = f"{ALONE}:{self.rank}" if former else None, []
            agreed_at = self._agreed_at.pop(program, None)
            before = [self._told(r)[1] for r in range(self.group_size)]
            self._new += agreed_at is None
            while True:
                number = self._ballots.get(digest, 0)
                self._ballots[digest] = number + 1
                self._latest.append(f"{digest}/{number}")
                text = self._answer(self._latest[-1], deadline, alone, agreed_at, before)
                answer = Answer.of(text)
                if text == alone or not (answer.kind == ALONE or self.rank in answer.missing):
                    break
                # It was given without this rank, and peers may have come to the next ballot by now.
                if answer.kind != ALONE and agreed_at is None:
                    deadline, alone = time.monotonic() + env.timeout_s() * _SHORT, None
            if text == alone:
                self._count -= 1
                answer = former or answer
            if answer.kind != YES:
                self._leave(agreed_at)
            elif program is not None and (ballot := agreed_at if text == alone else self._latest[-1]):
                self._agreed_at[program] = ballot
            self._new += agreed_at is None
            self._tell()
            self._answers[digest, program], self._in_step = answer, answer.kind == YES
            if answer.kind == YES:
                self.agreed.add(digest)
            return answer

    def _tell(self) -> None:
        self.store.set(f"at/{self.rank}", f"{self._count} {self._new}")

    def _told(self, peer: int) -> tuple[int, int]:
        """A peer's `_count` and `_new`."""
        key = f"at/{peer}"
        count, new = map(int, self.store.get(key).split()) if self.store.check([key]) else (0, 0)
        return count, new

    def _leave(self, agreed_at: str | None) -> None:
        """Note that this rank may no longer run what all agreed to there."""
        if agreed_at is not None:
            self.store.set(f"{agreed_at}/left/{self.rank}", "1")

    def _answer(self, ballot: str, deadline: float, alone: str | None, agreed_at: str | None, before: list[int]) -> str:
        """The answer that stands, or this rank's, as soon as it has one.

        ``alone``: its answer if nobody comes. ``agreed_at``: the ballot that agreed to the program before, if one did.
        ``before``: the ranks' `_new` before this one came.
        """
        key, pause = f"{ballot}/answer", 0.0005
        missing = [r for r in range(self.group_size) if r != self.rank]
        self.store.set(f"{ballot}/{self.rank}", str(self._count))
        while not self.store.check([key]):
            # Only now: a peer that sees these, and not the mark above, takes this rank to be elsewhere.
            self._tell()
            self._leave(agreed_at)
            away = [r for r in missing if self._is_away(r, agreed_at, before[r])]
            missing = [r for r in missing if not self.store.check([f"{ballot}/{r}"])]
            elsewhere = [r for r in missing if r in away]
            if not missing or elsewhere or time.monotonic() > deadline:
                no = f"{OTHER}:{_joined(elsewhere)}:{_joined(missing)}"
                if not elsewhere:
                    no = alone or f"{ABSENT}:{_joined(missing)}:{_joined(missing)}"
                if no == alone and agreed_at is not None:  # before others know, who look for the note at once
                    self.store.delete_key(f"{agreed_at}/left/{self.rank}")
                return self.store.compare_set(key, "", no if missing else YES).decode()
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)
        return self.store.get(key).decode()

    def _is_away(self, peer: int, agreed_at: str | None, before: int) -> bool:
        """Whether a peer has come to another program, unless it has come to this ballot.

        A count says so unless this rank compiles again what all agreed to: peers may have come to more programs than it
        has. They go on with this one unless they have left it, or are, or come, where they have not agreed.
        """
        count, new = self._told(peer)
        if agreed_at is None:
            return count - self._bases[peer] >= self._count - self._bases[self.rank]
        return before % 2 == 1 or new != before or self.store.check([f"{agreed_at}/left/{peer}"])

    def _find_bases(self) -> None:
        """Count from a ballot that all have joined by now, with any answer."""
        for ballot in self._latest:
            keys = [f"{ballot}/{r}" for r in range(self.group_size)]
            if self.store.check(keys):
                self._bases = [int(self.store.get(key)) for key in keys]


def _joined(ranks: list[int]) -> str:
    return ",".join(map(str, ranks))
