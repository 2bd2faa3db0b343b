"""``fusedcomm postmortem``: the ranks of a hung or failed run that are behind, their ops and their waits."""

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusedcomm.launch import console
from fusedcomm.launch.console import Column, Table
from fusedcomm.memory.dumps import ENDED, SCHEMA, SIGUSR1
from fusedcomm.memory.flight_recorder import DONE, FAILED
from fusedcomm.tools.doctor_findings import ranks_text

GroupKey = tuple[str, tuple[int, ...], str]  # name, ranks, device type
# The text behind a rank's last words in errors of waits and of votes, the latter also as they are raised until a reset
_BEHIND_LAST_WORDS = r"; rank \d+ has left: | \(rounds seen |\. Call fusedcomm\.reset|\n|$"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "postmortem",
        help="say which rank of a hung or failed run is behind, in which op, waiting for what",
        description="Reads what ranks have written into FUSEDCOMM_DUMP_DIR, when a call failed or on SIGUSR1. "
        "Prints each rank's last call, and a verdict: who is behind, and who waits for whom. "
        "Exit code: 0 if there is a verdict, 1 if there is no dump, 2 for wrong arguments.",
        epilog="example: fusedcomm postmortem dumps",
    )
    parser.add_argument("dir", metavar="DIR", help="where the files rank0.json, rank1.json, ... are")
    parser.add_argument("--json", metavar="FILE", help="also write everything that was found to FILE, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if problem := console.not_writable(args, "json"):
        return console.fail("postmortem", problem, code=2)
    try:
        dumps, problems = read(Path(args.dir))
    except OSError as error:
        return console.fail("postmortem", f"{args.dir}: {error.strerror}")
    for problem in problems:
        console.fail("postmortem", f"not read: {problem}")
    if not dumps:
        text = f"{args.dir}: no dump is there. Ranks need FUSEDCOMM_DUMP_DIR, before they start"
        return console.fail("postmortem", text)
    report = judge(dumps)
    _print(report)
    if args.json:
        console.write_json(args.json, {**asdict(report), "problems": problems})
    return 0


@dataclass(frozen=True)
class RecordedCall:
    """A call as `dumps` writes it. ``peers``: the ranks that its error names."""

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
    peers: list[int]
    rounds: list[int] | None
    started: float
    seconds: float
    waiting_for: int | None
    waiting_s: float | None

    @property
    def key(self) -> GroupKey:
        return self.group, tuple(self.ranks), self.device

    @property
    def place(self) -> tuple[int, int]:
        return self.resets, self.number

    @property
    def is_open(self) -> bool:
        return self.state not in (DONE, FAILED)

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
    host: str  # a hash: clocks of two hosts may differ
    started: float  # when the process was
    calls: list[RecordedCall]
    stacks: dict[str, list[str]]

    @property
    def at(self) -> str:
        """The main thread's line, unknown in the dump of a call that failed: the thread was writing the dump."""
        known = self.stacks.get("MainThread", []) if self.why == SIGUSR1 else []
        return known[-1] if known else "an unknown line"


@dataclass(frozen=True)
class Wait:
    """A rank that waits for another, in one call of one group."""

    waiter: int
    awaited: int
    call: RecordedCall


@dataclass(frozen=True)
class GroupReport:
    name: str
    ranks: tuple[int, ...]
    last: dict[int, RecordedCall]  # by rank
    waits: list[Wait]


@dataclass(frozen=True)
class Postmortem:
    dumps: list[Dump]
    silent: list[int]  # ranks without a dump
    groups: list[GroupReport]
    verdicts: list[str]


def read(folder: Path) -> tuple[list[Dump], list[str]]:
    """The last run's dumps by rank, and why other files are none of them. Raises OSError."""
    dumps: dict[int, Dump] = {}
    problems = []
    for file in sorted(each for each in folder.iterdir() if each.match("rank*.json")):
        try:
            raw = json.loads(file.read_text())
            if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
                raise ValueError(f"it must be a dump of schema {SCHEMA}")
            calls = [RecordedCall(**call) for call in raw["calls"]]
            rank, num_ranks, stacks = raw["rank"], raw["world_size"], raw["stacks"]
            run = raw["host"], raw["started"]
            dump = Dump(rank, num_ranks, raw["why"], raw["time"], *run, calls, stacks)
            if dumps.setdefault(dump.rank, dump) is not dump:
                problems.append(f"{file.name}: another file is of rank {dump.rank} too")
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            problems.append(f"{file.name}: {error}")
    # No rank has a group, and so a dump, before all ranks' processes have started
    old = sorted(a.rank for a in dumps.values() if any(a.host == b.host and a.time < b.started for b in dumps.values()))
    problems += [f"rank{rank}.json: of an earlier run" for rank in old]
    return [dumps[rank] for rank in sorted(dumps) if rank not in old], problems


def judge(dumps: Sequence[Dump]) -> Postmortem:
    """The verdicts, from the dumps of at least one rank."""
    by_rank = {dump.rank: dump for dump in dumps}
    silent = [rank for rank in range(max(dump.world_size for dump in dumps)) if rank not in by_rank]
    calls = sorted((call for dump in dumps for call in dump.calls), key=lambda call: call.started)
    groups, verdicts = [], []
    for key in dict.fromkeys(call.key for call in calls):
        group, texts = _judge_group(key, by_rank)
        groups.append(group)
        verdicts += [f"group {group.name!r}: {text}" for text in texts]
    verdicts += _circle([wait for group in groups for wait in group.waits])
    return Postmortem(list(dumps), silent, groups, verdicts or ["no rank waits for another"])


def _judge_group(key: GroupKey, dumps: dict[int, Dump]) -> tuple[GroupReport, list[str]]:
    name, ranks, _ = key
    calls = {rank: {c.place: c for c in dumps[rank].calls if c.key == key} for rank in ranks if rank in dumps}
    last = {rank: found[max(found)] for rank, found in calls.items() if found}
    newest = max(call.place for call in last.values())
    came = {rank: call for rank, call in last.items() if call.place == newest}
    group = GroupReport(name, ranks, last, [wait for rank in last for wait in _waits(rank, ranks, last)])
    verdicts = [*_differences(calls), *_late(came)]
    if any(call.is_open or call.peers for call in came.values()):
        verdicts += [_behind(rank, came, group, dumps) for rank in ranks if rank not in came]
    if len(came) == len(ranks):
        idle = {wait.awaited for wait in group.waits} - {wait.waiter for wait in group.waits}
        inside = [rank for rank in sorted(idle) if came[rank].is_open]
        verdicts += [f"rank {r} is in {came[r]} too, and waits for nobody: it is at {dumps[r].at}" for r in inside]
    return group, verdicts


def _waits(rank: int, ranks: Sequence[int], last: dict[int, RecordedCall]) -> Iterator[Wait]:
    """The waits of a call that is open, or has failed for want of ranks that have not come since."""
    call = last[rank]
    awaited = {r for r in ranks if r not in last or last[r].place < call.place}
    if call.state == FAILED:
        awaited &= set(call.peers)
    elif not call.is_open:
        awaited = set()
    elif call.waiting_for is not None:
        awaited.add(call.waiting_for)
    yield from (Wait(rank, peer, call) for peer in sorted(awaited - {rank}))


def _differences(calls: dict[int, dict[tuple[int, int], RecordedCall]]) -> Iterator[str]:
    """The first place where ranks called differently."""
    for place in sorted({place for found in calls.values() for place in found if place[1]}):
        here = {rank: found[place] for rank, found in calls.items() if place in found}
        facts = {rank: {"op": call.op, **call.arguments, "dtype": call.dtype} for rank, call in here.items()}
        for name in next(iter(facts.values())):
            found: dict[str, list[int]] = {}
            for rank, values in facts.items():
                found.setdefault(str(values.get(name)), []).append(rank)
            if len(found) > 1:
                texts = " and ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in found.items())
                yield f"call {place[1]} differs: {name} is {texts}"
                return


def _late(came: dict[int, RecordedCall]) -> Iterator[str]:
    """The ranks that came when others had given up waiting."""
    gave_up = {rank: call for rank, call in came.items() if call.state == FAILED}
    for rank, call in came.items():
        left = [r for r, c in gave_up.items() if rank in c.peers and c.started + c.seconds <= call.started]
        if left:
            seconds = call.started - min(came[r].started for r in left)
            yield f"rank {rank} came to {call} {seconds:.1f} s after {ranks_text(left)}, which had given up by then"


def _behind(rank: int, came: dict[int, RecordedCall], group: GroupReport, dumps: dict[int, Dump]) -> str:
    call = next(iter(came.values()))
    waiting = [r for r, other in came.items() if other.is_open or rank in other.peers]
    seconds = max((came[r].seconds for r in waiting), default=0.0)
    waits = f"{ranks_text(waiting)} {'waits' if len(waiting) == 1 else 'wait'} since {seconds:.1f} s"
    if rank not in dumps:
        waits = f". In {call} {waits} for it" if waiting else ""
        return f"rank {rank} has left no dump{_without_dump(group.ranks.index(rank), came)}{waits}"
    dump, last = dumps[rank], group.last.get(rank)
    done = "has called nothing"
    if last is not None:
        done = f"{'is still in' if last.is_open else 'has finished' if last.state == DONE else 'has failed in'} {last}"
    ended, where = "it", ""
    if dump.why.startswith(ENDED):
        ended = f"{dump.why.replace('the', 'its', 1)}. It"
    elif not any(each.is_open for each in dump.calls):
        where = f". It is outside of fusedcomm, at {dump.at}"
    waits = f", for which {waits}" if waiting else ""
    return f"rank {rank} is behind: {ended} {done} and never came to {call}{waits}{where}"


def _without_dump(local: int, came: dict[int, RecordedCall]) -> str:
    """The fate of a rank without a dump, ``local`` in its group, by the errors of ranks that waited for it."""
    for call in came.values():
        if found := re.search(rf"\brank {local} has left: (.*?)(?:{_BEHIND_LAST_WORDS})", call.error or ""):
            return f", and its peers know why: {found[1]}"
    return ": it has died, is stopped, or never came"


def _circle(waits: list[Wait]) -> list[str]:
    """The verdict on ranks that wait for each other, mostly in several groups, if some do."""
    while idle := {wait.awaited for wait in waits} - {wait.waiter for wait in waits}:
        waits = [wait for wait in waits if wait.awaited not in idle]
    if not waits:
        return []
    path, rank = dict[int, Wait](), waits[0].waiter  # by waiter, until one comes again
    while rank not in path:
        path[rank] = next(wait for wait in waits if wait.waiter == rank)
        rank = path[rank].awaited
    circle = list(path.values())[list(path).index(rank) :]
    texts = [f"waits in group {w.call.group!r}, {w.call}, for rank {w.awaited}" for w in circle]
    return [f"in a circle: rank {rank} {', which '.join(texts)}. All ranks must use groups in the same order"]


def _print(report: Postmortem) -> None:
    newest = max(dump.time for dump in report.dumps)
    reasons: dict[str, list[int]] = {}
    for dump in report.dumps:
        earlier = f", {newest - dump.time:.0f} s before the last" if newest - dump.time >= 1 else ""
        reasons.setdefault(f"{dump.why.partition(':')[0]}{earlier}", []).append(dump.rank)
    reasons |= {"no dump": report.silent} if report.silent else {}
    out = console.stdout()
    out.print(f"why ranks have written their dumps, the last {time.ctime(newest)}:")
    for why, ranks in reasons.items():
        out.print(f"{ranks_text(ranks)}: {why}", markup=False)
    rows = [
        (group.name if i == 0 else "", rank, group.last.get(rank))
        for group in report.groups
        for i, rank in enumerate(group.ranks)
    ]
    columns = (
        Column("group", "its name; the lines below are its other ranks", lambda row: row[0], left=True),
        Column("rank", "its number in the job", lambda row: str(row[1])),
        Column("last call", "-: none was recorded", lambda row: str(row[2] or "-"), left=True, folds=24),
        Column("runs", "the algorithm of the last call", lambda row: (row[2] and row[2].algorithm) or "", left=True),
        Column("is", "where the call was when the dump was written", lambda row: _state(row[2]), left=True, folds=12),
        Column("since\ns", "how long it was there", lambda row: f"{row[2].seconds:.1f}" if row[2] else ""),
    )
    console.show(Table(columns, rows), out)
    out.print("\n".join(["verdict:", *report.verdicts]), markup=False)


def _state(call: RecordedCall | None) -> str:
    if call is None:
        return ""
    return call.state if call.waiting_for is None else f"waiting for rank {call.waiting_for}"
