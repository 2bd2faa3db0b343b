"""The scripts of a model's ranks: calls, the rules that they keep, and which faults may come.

A rank's script is compiled to two programs of steps, what it sends and what it receives, in the order of its schedules
(tests/protocol/words.py). A step names how far the other program must be before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fusedcomm.memory.segment import NUM_SLOTS
from tests.helpers.plain_cases import Case
from tests.helpers.problems import Problem
from tests.helpers.uneven import Uneven
from tests.protocol.words import COMBINE as COMBINED
from tests.protocol.words import DISPATCH as DISPATCHED
from tests.protocol.words import RETURN as RETURNED
from tests.protocol.words import Traffic, Word, words


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol. Every default is what the code does, and every other value a planted bug."""

    num_slots: int = NUM_SLOTS
    data_before_flag: bool = True
    reads_before_next_signals: bool = True
    waits: bool = True
    signals_empty_chunks: bool = True
    takes_part_in_empty_rounds: bool = True
    unfused_takes_epoch: tuple[int, ...] = ()  # ranks on which an unfused call takes an epoch
    waits_for: str = "at least"  # or "equal": the whole flag
    compares_fingerprints: bool = True
    tells_peers: bool = True  # a rank tells that it has given up, or ends
    ends_behind_its_rounds: bool = True  # a rank that ends names the round after those that it has completed
    finds_dead: bool = True  # a host that waits looks whether its peers live
    checks_broken_after_reads: bool = True
    gives_up_earlier: bool = True  # a device that failed in f says so on f - 1 too, before it pushes f + 1
    tells_readers: bool = True  # it says so to all ranks, of which any may read a slot, not to the slot's owner alone
    rows_after_counts: bool = True  # a dispatch places rows when all ranks' counts are there
    new_segment: bool = True  # a reset makes a new segment
    drains: bool = True  # a rank waits for its device before it comes to a reset
    clears_before_agreement: bool = True  # a rank clears its own header in a reset


@dataclass(frozen=True)
class Call:
    """``traffic`` is None if it moves nothing."""

    op: int
    traffic: Traffic | None = None
    is_empty: bool = False  # nobody has anything to send
    slot: int | None = None  # the slot where a captured copy writes and reads; None: by the epoch
    counts_first: bool = False  # its last round's writes go where the counts of the round before say


def _even(*args: Any, **options: Any) -> Callable[[int], Problem]:
    return lambda group_size: Problem("even", *args, **options)


def _uneven(gather: Callable[[int], tuple[int, ...]] | None, scatter: tuple[int, ...]) -> Callable[[int], Uneven]:
    """A push; ``scatter``: the columns of the first ranks, 2 of the others."""

    def made(size: int) -> Uneven:
        columns = (*scatter, 2, 2)[:size]
        rows = gather(size) if gather is not None else (2,) * size
        return Uneven("matmul_all_to_all", (sum(rows), sum(columns)), 1, 0, 1, rows, columns, other=8)

    return made


_NO_ROWS = Traffic(_even((0, 8), 6, 0, 1))
_PUSH = Traffic(_even((12, 8), 6, 0, 1))


def _plain(op: str, gather_dim: int | None, scatter_dim: int | None) -> Traffic:
    """The collective of `_PUSH` and others without a matmul."""
    return Traffic(lambda group_size: Case(op, (12, 6), gather_dim, scatter_dim))


RESET, UNFUSED = Call(-1), Call(0)
PUSH = Call(1, _PUSH)
GATHER = Call(2, Traffic(_even((12, 8), 6, 0, op="all_gather_matmul")))
REDUCE = Call(3, Traffic(_even((12, 8), 6, scatter_dim=0, op="matmul_reduce_scatter")))
ALL_REDUCE = Call(4, Traffic(_even((12, 8), 6, op="matmul_all_reduce")))
HANDSHAKE = Call(5, _NO_ROWS, is_empty=True)
EMPTY = Call(6, _NO_ROWS, is_empty=True)
EMPTY_FROM_0 = Call(6, Traffic(_uneven(lambda size: (0,) + (2,) * (size - 1), (2,)), "chunked"))
UNEVEN = Call(8, Traffic(_uneven(None, (4, 0)), "chunked"))  # nothing is sent to rank 1
OTHER_OP = Call(9, _PUSH)
PLAIN_PUSH = replace(PUSH, traffic=_plain("all_to_all", 0, 1))
PLAIN_GATHER = replace(GATHER, traffic=_plain("all_gather", 0, None))
PLAIN_REDUCE = replace(REDUCE, traffic=_plain("reduce_scatter", None, 0))
PLAIN_ALL_REDUCE = replace(ALL_REDUCE, traffic=_plain("all_reduce", None, None))
DISPATCH = Call(10, Traffic(lambda group_size: DISPATCHED), counts_first=True)
COMBINE = Call(11, Traffic(lambda group_size: COMBINED))
RETURN = Call(12, Traffic(lambda group_size: RETURNED))
GATHERED_K = replace(PUSH, traffic=Traffic(_even((12, 6), 4, 0, 1, op="all_to_all_matmul")))  # the same exchange
Script = tuple[Call, ...]


def in_rounds(call: Call, count: int) -> Call:
    assert call.traffic is not None
    return replace(call, traffic=replace(call.traffic, num_rounds=count))


def captured(slot: int) -> Call:
    """A replay of a push whose copies have the addresses of this slot."""
    return replace(PUSH, op=7, slot=slot)


@dataclass(frozen=True)
class Scenario:
    """Time-outs come in the first segment and in resets; after a reset all is strict."""

    scripts: tuple[Script, ...]  # by rank
    rules: Rules = field(default_factory=Rules)
    device: bool = False  # whether queued work runs on after a failure; otherwise the host raises
    timeouts: bool = False
    dies: tuple[int, ...] = ()  # ranks that may stop for ever, at any step
    leaves: tuple[int, ...] = ()  # ranks that may leave a call by an exception, at any step
    ends: tuple[int, ...] = ()  # ranks whose program may end, between any two calls
    mismatched: bool = False  # the scripts differ

    @property
    def group_size(self) -> int:
        return len(self.scripts)

    @property
    def faulty(self) -> bool:
        return self.timeouts or self.mismatched or bool(self.dies) or bool(self.leaves) or bool(self.ends)

    @property
    def only_ends(self) -> bool:
        return not self.timeouts and not self.mismatched and not self.dies and not self.leaves


def all_run(group_size: int, *script: Call) -> tuple[Script, ...]:
    return (script,) * group_size


class Step(NamedTuple):
    what: str
    other: int  # rank
    segment: int
    epoch: int
    op: int
    slot: int  # the slot of the data
    after: int  # steps of the rank's other program that come before
    counts: int = 0  # the epoch of the counts that say where it writes


class Programs(NamedTuple):
    sends: list[Step]
    receives: list[Step]


def compile_script(scenario: Scenario, rank: int) -> Programs:
    programs = Programs([], [])
    script = [*scenario.scripts[rank]]
    for segment in range(script.count(RESET) + 1):
        end = script.index(RESET) if RESET in script else len(script)
        last = _Segment(scenario, rank, segment, script[:end], programs).compile()
        if end < len(script):
            for what in ("arrive", "depart"):
                programs.receives.append(Step(what, rank, segment, last, 0, 0, len(programs.sends)))
        del script[: end + 1]
    return programs


class _Segment:
    """The calls between two resets, which begin with the first round."""

    def __init__(self, scenario: Scenario, rank: int, segment: int, script: Sequence[Call], programs: Programs) -> None:
        self.scenario, self.rules, self.rank, self.segment = scenario, scenario.rules, rank, segment
        self.sends, self.receives = programs
        traffic: list[tuple[Call, Traffic | None]] = []
        for call in script:
            if call == UNFUSED:
                traffic += [(call, None)] * (rank in self.rules.unfused_takes_epoch)
            else:
                left_out = call.is_empty and not self.rules.takes_part_in_empty_rounds
                traffic.append((call, None if left_out else call.traffic))
        self.words = words(tuple(each for _, each in traffic), rank, scenario.group_size, scenario.device)
        self.calls: list[tuple[Call, int]] = []  # by round, from 1 on, with the last one of the call
        for (call, _), count in zip(traffic, self.words.num_rounds, strict=True):
            self.calls += [(call, len(self.calls) + count)] * count

    def compile(self) -> int:
        """The number of rounds."""
        sends, receives = self.words.sends, self.words.receives
        kept = [word for word in receives if word.what != "wait" or self.rules.waits]
        first = len(self.receives)
        self.received = [first + sum(word in kept for word in receives[:i]) for i in range(len(receives) + 1)]
        self.kinds = [*(step.what for step in self.receives), *(word.what for word in kept)]
        sent = [len(self.sends)]  # by words
        for i, word in enumerate(sends):
            self._send(word, sends[:i])
            sent.append(len(self.sends))
        for word in kept:
            self.receives.append(self._step(word.what, word, sent[word.after]))
        return len(self.calls)

    def _send(self, word: Word, before: Sequence[Word]) -> None:
        rules, of_round = self.rules, [each for each in before if each.epoch == word.epoch]
        after = self.received[word.after]
        call, last = self.calls[word.epoch - 1]
        if call.counts_first and word.epoch == last and not rules.rows_after_counts:
            after = self.received[next(each.after for each in before if each.epoch == word.epoch - 1)]
        if not rules.reads_before_next_signals:
            after = max((i + 1 for i, what in enumerate(self.kinds[:after]) if what == "wait"), default=0)
        if not of_round and (word.epoch == 1 or self.calls[word.epoch - 2][1] != last):
            self.sends.append(self._step("enter", word._replace(other=self.rank), after))
        if word.what == "show":
            self.sends.append(self._step("show", word, after))
        elif word.what == "signal":
            order: tuple[str, ...] = ("write", "signal") if rules.data_before_flag else ("signal", "write")
            if not any(each.what == "write" and each.other == word.other for each in of_round):
                order = ("signal",) * rules.signals_empty_chunks
            self.sends += [self._step(what, word, after) for what in order]

    def _step(self, what: str, word: Word, after: int) -> Step:
        call, last = self.calls[word.epoch - 1]
        slot = word.epoch % self.rules.num_slots if call.slot is None else call.slot
        counts = word.epoch - 1 if call.counts_first and what == "write" and word.epoch == last else 0
        return Step(what, word.other, self.segment, word.epoch, call.op, slot, after, counts)
