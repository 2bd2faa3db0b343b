"""The dumps of all ranks, side by side: who is behind, in which op, and who waits for whom. `dumps` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fusedcomm.doctor.findings import ranks_text
from fusedcomm.runtime.dumps import ENDED, SCHEMA, SIGUSR1
from fusedcomm.runtime.flight_recorder import CHECKING, DONE, FAILED, RUNNING, VOTING
from fusedcomm.runtime.workspace import LOOK_S

STATES = (VOTING, CHECKING, RUNNING, DONE, FAILED)
GroupKey = tuple[str, tuple[int, ...], str]  # name, ranks, device type
Place = tuple[int, int]  # where a call is in its group: resets, number


@dataclass(frozen=True)
class RecordedCall:
    """A call as `dumps` writes it."""

    op: str
    group: str
    ranks: list[int]
    device: str
    resets: int
    number: int
    arguments: dict[str, Any]
    dtype: str | None
    algorithm: str | None
    state: str
    error: str | None
    peers: list[int]  # the ranks that the error names
    rounds: list[int] | None
    started: float
    seconds: float
    waiting_for: int | None
    waiting_s: float | None

    @property
    def place(self) -> Place:
        return self.resets, self.number

    @property
    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        return {"op": self.op, **self.arguments, "dtype": self.dtype}

    @property
    def is_open(self) -> bool:
        return self.state in (VOTING, CHECKING, RUNNING)

    @property
    def ended(self) -> float:
        return self.started + self.seconds

    def __str__(self) -> str:
        if self.op.startswith("fusedcomm."):  # a reset, a close
            return self.op
        return f"call {self.number} ({self.op})" if self.number else f"its first call ({self.op})"


@dataclass(frozen=True)
class Dump:
    rank: int
    world_size: int
    why: str
    time: float
    calls: list[RecordedCall]
    stacks: dict[str, list[str]]

    @property
    def at(self) -> str:
        """Where the main thread was. This is unknown in a dump of a call that failed: there it was writing the dump."""
        known = self.stacks.get("MainThread", []) if self.why == SIGUSR1 else []
        return next(iter(known[-1:]), "an unknown line")

    @property
    def has_ended(self) -> bool:
        return self.why.startswith(ENDED)

    @property
    def is_outside(self) -> bool:
        return not self.has_ended and not any(call.is_open for call in self.calls)


@dataclass(frozen=True)
class Wait:
    """A rank that waits for another, in one call of one group."""

    waiter: int
    awaited: int
    call: RecordedCall

    def __str__(self) -> str:
        return f"rank {self.waiter} waits in group {self.call.group!r}, {self.call}, for rank {self.awaited}"


@dataclass
class GroupReport:
    key: GroupKey
    last: dict[int, RecordedCall]  # by rank
    verdicts: list[str] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.key[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.key[1]


@dataclass(frozen=True)
class Postmortem:
    dumps: list[Dump]
    silent: list[int]  # ranks without a dump
    groups: list[GroupReport]
    verdicts: list[str]


def read(folder: Path) -> tuple[list[Dump], list[str]]:
    """The dumps by rank, and why files beside them are none. Raises OSError."""
    dumps: dict[int, Dump] = {}
    problems = []
    for file in sorted(each for each in folder.iterdir() if each.suffix == ".json" and not each.name.startswith(".")):
        try:
            dump = _parsed(json.loads(file.read_text()))
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{file.name}: {error}")
            continue
        if dump.rank in dumps:
            problems.append(f"{file.name}: another file is of rank {dump.rank} too")
        dumps.setdefault(dump.rank, dump)
    return [dumps[rank] for rank in sorted(dumps)], problems


def judge(dumps: Sequence[Dump]) -> Postmortem:
    """The verdicts, from the dumps of at least one rank."""
    world = max(dump.world_size for dump in dumps)
    by_rank = {dump.rank: dump for dump in dumps}
    silent = [rank for rank in range(world) if rank not in by_rank]
    groups = [_judge_group(key, by_rank) for key in _groups(dumps)]
    waits = [wait for group in groups for wait in group.waits]
    verdicts = [f"group {group.name!r}: {text}" for group in groups for text in group.verdicts]
    verdicts += _circle(waits) or _chain(waits, by_rank)
    return Postmortem(list(dumps), silent, groups, verdicts or ["no rank waits for another"])


def _parsed(raw: Any) -> Dump:
    """The dump that a JSON value holds. Raises ValueError if it is none."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError(f"it must be a dump of schema {SCHEMA}")
    calls = _field(raw, "calls", list)
    for call in calls:
        if not isinstance(call, dict) or call.keys() != {each.name for each in fields(RecordedCall)}:
            raise ValueError("a call must have exactly the fields of one")
        for name, types in _TYPES.items():
            _field(call, name, *types)
        if call["state"] not in STATES or not all(isinstance(rank, int) for rank in call["ranks"] + call["peers"]):
            raise ValueError(f"a call must be in one of the states {', '.join(STATES)}, and ranks be numbers")
    return Dump(
        _field(raw, "rank", int),
        _field(raw, "world_size", int),
        _field(raw, "why", str),
        _field(raw, "time", float, int),
        [RecordedCall(**call) for call in calls],
        _field(raw, "stacks", dict),
    )


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("op", "group", "device", "state"), (str,)),
    **dict.fromkeys(("ranks", "peers"), (list,)),
    **dict.fromkeys(("resets", "number"), (int,)),
    **dict.fromkeys(("started", "seconds"), (float, int)),
    "arguments": (dict,),
    "waiting_for": (int, type(None)),
}


def _field(raw: dict[str, Any], name: str, *types: type) -> Any:
    if not isinstance(raw.get(name), types):
        raise ValueError(
            f"a dump's {name} must be {' or '.join(each.__name__ for each in types)}, got {raw.get(name)!r}"
        )
    return raw[name]


def _groups(dumps: Sequence[Dump]) -> list[GroupKey]:
    """The groups in the order of their first calls."""
    calls = sorted((call for dump in dumps for call in dump.calls), key=lambda call: call.started)
    return list(dict.fromkeys(_key(call) for call in calls))


def _key(call: RecordedCall) -> GroupKey:
    return call.group, tuple(call.ranks), call.device


def _judge_group(key: GroupKey, dumps: dict[int, Dump]) -> GroupReport:
    calls = {rank: {c.place: c for c in dumps[rank].calls if _key(c) == key} for rank in key[1] if rank in dumps}
    report = GroupReport(key, {rank: found[max(found)] for rank, found in calls.items() if found})
    newest = max(call.place for call in report.last.values())
    came = {rank: call for rank, call in report.last.items() if call.place == newest}
    report.waits = [wait for rank, call in report.last.items() for wait in _waits(rank, call, report, newest)]
    report.verdicts += _differences(calls)
    report.verdicts += _late(came)
    if any(call.is_open or call.peers for call in came.values()):
        for rank in key[1]:
            if rank not in came:
                report.verdicts.append(_behind(rank, came, report, dumps))
        if len(came) == len(key[1]):
            report.verdicts += _inside(came, report, dumps)
    return report


def _waits(rank: int, call: RecordedCall, report: GroupReport, newest: Place) -> Iterator[Wait]:
    """The waits of a call that is open, or has failed for want of ranks that have not come since."""
    absent = [r for r in report.ranks if r not in report.last or report.last[r].place < call.place]
    if call.state == FAILED:
        awaited = [peer for peer in call.peers if peer in absent]
    elif call.is_open:
        awaited = absent if call.waiting_for is None else sorted({*absent, call.waiting_for})
    else:
        awaited = []
    yield from (Wait(rank, peer, call) for peer in awaited if peer != rank)


def _differences(calls: dict[int, dict[Place, RecordedCall]]) -> Iterator[str]:
    """The first place where ranks called differently."""
    for place in sorted({place for found in calls.values() for place in found if place[1]}):
        here = {rank: found[place] for rank, found in calls.items() if place in found}
        values = {rank: call.facts for rank, call in here.items()}
        first, *_ = values.values()
        for name in first:
            found: dict[str, list[int]] = {}
            for rank, facts in values.items():
                found.setdefault(str(facts.get(name)), []).append(rank)
            if len(found) > 1:
                texts = " and ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in found.items())
                yield f"call {place[1]} differs: {name} is {texts}"
                return


def _late(came: dict[int, RecordedCall]) -> Iterator[str]:
    """The ranks that came when others had given up waiting."""
    gave_up = {rank: call for rank, call in came.items() if call.state == FAILED and call.peers}
    for rank, call in came.items():
        left = [r for r, other in gave_up.items() if rank in other.peers and other.ended <= call.started]
        if left:
            seconds = call.started - min(came[r].started for r in left)
            yield f"rank {rank} came to {call} {seconds:.1f} s after {ranks_text(left)}, which had given up by then"


def _behind(rank: int, came: dict[int, RecordedCall], report: GroupReport, dumps: dict[int, Dump]) -> str:
    call = next(iter(came.values()))
    waiting = [r for r, other in came.items() if other.is_open or rank in other.peers]
    seconds = max((came[r].seconds for r in waiting), default=0.0)
    waits = f"{ranks_text(waiting)} {'waits' if len(waiting) == 1 else 'wait'} since {seconds:.1f} s"
    if rank not in dumps:
        waits = f". In {call} {waits} for it" if waiting else ""
        return f"rank {rank} has left no dump{_without_dump(report.ranks.index(rank), came)}{waits}"
    last = report.last.get(rank)
    if last is None:
        done = "has called nothing"
    elif last.is_open:
        done = f"is still in {last}"
    else:
        done = f"has {'finished' if last.state == DONE else 'failed in'} {last}"
    ended = f"{dumps[rank].why.replace('the', 'its', 1)}. It" if dumps[rank].has_ended else "it"
    waits = f", for which {waits}" if waiting else ""
    where = f". It is outside of fusedcomm, at {dumps[rank].at}" if dumps[rank].is_outside else ""
    return f"rank {rank} is behind: {ended} {done} and never came to {call}{waits}{where}"


# What follows in errors of waits and of votes, the latter also as they are raised until a reset.
_BEHIND_LAST_WORDS = r"; rank \d+ has left: | \(rounds seen |\. Call fusedcomm\.reset|\n|$"


def _without_dump(local: int, came: dict[int, RecordedCall]) -> str:
    """What is known of a rank, ``local`` in its group, that has left no dump, from those that waited for it."""
    errors = [call.error or "" for call in came.values()]
    for error in errors:
        if found := re.search(rf"\brank {local} has left: (.*?)(?:{_BEHIND_LAST_WORDS})", error):
            return f", and its peers know why: {found[1]}"
    timed_out = "did not signal within"
    on_cpus = [call for call in came.values() if call.device == "cpu" and call.rounds is not None]
    waited_s = [call.waiting_s or 0.0 for call in on_cpus if call.is_open]
    waited_s += [call.seconds for call in on_cpus if timed_out in (call.error or "")]
    if any(seconds > LOOK_S for seconds in waited_s):  # then it has looked for the process
        return ", though its process was there: it is stopped, or got no SIGUSR1"
    return ": it has died, is stopped, or never came"


def _inside(came: dict[int, RecordedCall], report: GroupReport, dumps: dict[int, Dump]) -> Iterator[str]:
    """All ranks are in the same call, where those that wait for nobody hold up the others."""
    waiters = {wait.waiter for wait in report.waits}
    awaited = {wait.awaited for wait in report.waits}
    for rank in sorted(awaited - waiters):
        call = came[rank]
        if call.is_open:
            yield f"rank {rank} is in {call} too, and waits for nobody: it is at {dumps[rank].at}"


def _circle(waits: Sequence[Wait]) -> list[str]:
    """The verdict on ranks that wait for each other, if some do."""
    for rank in dict.fromkeys(wait.waiter for wait in waits):
        if path := _path(rank, rank, waits, set()):
            return [f"in a circle: {_joined(path)}. All ranks must use groups in the same order"]
    return []


def _path(start: int, goal: int, waits: Sequence[Wait], seen: set[int]) -> list[Wait]:
    """The waits that lead from one rank to the other, if some do."""
    for wait in waits:
        if wait.waiter == start and wait.awaited not in seen:
            if wait.awaited == goal:
                return [wait]
            seen.add(wait.awaited)
            if rest := _path(wait.awaited, goal, waits, seen):
                return [wait, *rest]
    return []


def _chain(waits: Sequence[Wait], dumps: dict[int, Dump]) -> list[str]:
    """The verdict on waits in a row, from a rank that nobody waits for to one that waits for nobody, if any."""
    waiters = {wait.waiter for wait in waits}
    for wait in waits:
        if wait.waiter not in {other.awaited for other in waits} and wait.awaited in waiters:
            path = [wait]
            while more := [other for other in waits if other.waiter == path[-1].awaited]:
                path.append(more[0])
            last = path[-1].awaited
            if last not in dumps:
                return [f"in a row: {_joined(path)}, which has left no dump"]
            where = "has ended" if dumps[last].has_ended else f"is at {dumps[last].at}"
            return [f"in a row: {_joined(path)}, which {where}"]
    return []


def _joined(path: Sequence[Wait]) -> str:
    first, *rest = path
    texts = [f"which waits in group {w.call.group!r}, {w.call}, for rank {w.awaited}" for w in rest]
    return ", ".join([str(first), *texts])
