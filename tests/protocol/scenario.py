"""The scripts of a model's ranks: calls, the rules that they keep, and which faults may come.

A rank's script is compiled to two programs of steps, as a rank has two streams: what it sends, and what it receives.
A step names how far the other program must be before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fusedcomm.memory.segment import NUM_SLOTS
from fusedcomm.plan.geometry.rank_order import peers_of, sources_of


@dataclass(frozen=True)
class ResultRules:
    """The rules of results in place. Every default is what the protocol says."""

    post: tuple[str, ...] = ("post", "stamp")
    chunk: tuple[str, ...] = ("look", "place", "write", "mark", "signal")
    posts_after_reads: bool = True  # a rank posts when it has done all reads of the round before
    compares_epoch: bool = True  # a sender takes a post of its own round, not of one before
    compares_fingerprint: bool = True
    compares_size: bool = True
    mark_names: str = "epoch"  # a receiver takes a mark of its own round; "op": of the same call; "nothing": any
    copies_slots_only: bool = True  # what is in place is not copied out
    holds_until: str = "finish"  # or "signal": a call's result is the user's, to free, when its own last signal is set
    retires: bool = True  # a block of a call that has failed is not used again
    heap_after_reset: str = "new"  # or "forgotten": the memory is kept, but not who has which block


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
    new_segment: bool = True  # a reset makes a new segment
    drains: bool = True  # a rank waits for its device before it comes to a reset
    clears_before_agreement: bool = True  # a rank clears its own header in a reset
    results: ResultRules = field(default_factory=ResultRules)


class Round(NamedTuple):
    op: int
    empty: tuple[int, ...] = ()  # ranks whose chunks have no element
    beside: bool = False  # on a device: the sends run on a stream beside the waits and reads
    sums: bool = False  # whether all chunks are waited for before the first is read
    slot: int | None = None  # the slot where a captured copy writes and reads; None: by the epoch
    size: int = 1  # the size of the result, which peers of another size do not know from the op
    sizes: tuple[int, ...] = ()  # that of each rank, where parts differ in size: all ranks know these from the op
    nothing: tuple[tuple[int, int], ...] = ()  # (src_rank, dst_rank) whose chunk alone has no element

    def is_empty(self, src: int, dst: int) -> bool:
        return src in self.empty or (src, dst) in self.nothing

    def size_on(self, rank: int) -> int:
        return self.sizes[rank] if self.sizes else self.size


Call = tuple[Round, ...]
RESET: Call = ()
UNFUSED: Call = (Round(0),)
PUSH: Call = (Round(1),)
GATHER: Call = (Round(2, beside=True),)
REDUCE: Call = (Round(3, sums=True),)
ALL_REDUCE: Call = (Round(4, sums=True), Round(4))
REDUCE_BESIDE: Call = (Round(3, sums=True, beside=True),)
ALL_REDUCE_BESIDE: Call = (Round(4, sums=True, beside=True), Round(4, beside=True))
UNEVEN: Call = (Round(8, sizes=(2, 1, 1), nothing=((0, 1),)),)
HANDSHAKE: Call = (Round(5, empty=(0, 1, 2)),)
Script = tuple[Call, ...]
POSTS = ("enter", "post", "stamp")
AT_ONCE = ("stamp", "place", "mark")


def empty_from(*ranks: int) -> Call:
    """A push for which these ranks have nothing to send."""
    return (Round(6, empty=ranks),)


def in_rounds(call: Call, count: int) -> Call:
    """A call larger than a slot."""
    return call * count


def captured(slot: int) -> Call:
    """A replay of a push whose copies have the addresses of this slot."""
    return (Round(7, slot=slot),)


@dataclass(frozen=True)
class Scenario:
    """``scripts`` has each rank's script.

    Time-outs come in the first segment and in resets; after a reset all is strict.
    """

    scripts: tuple[Script, ...]
    rules: Rules = field(default_factory=Rules)
    device: bool = False  # whether queued work runs on after a failure; otherwise the host raises
    timeouts: bool = False
    dies: tuple[int, ...] = ()  # ranks that may stop for ever, at any step
    leaves: tuple[int, ...] = ()  # ranks that may leave a call by an exception, at any step
    ends: tuple[int, ...] = ()  # ranks whose program may end, between any two calls
    mismatched: bool = False  # the scripts differ
    blocks: int = 0  # in the results heap of each rank; 0: no results in place
    offers: tuple[int, ...] = (0, 1, 2)  # ranks whose results may be in their heap
    whole_posts: bool = False  # a post is written and read in one step, and so are a chunk in place and its mark
    turned: tuple[int, ...] = ()  # ranks that send to the last peer first, as it has posted first

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
    size: int = 0  # the size of a result that may be in place
    last: int = 0  # the last epoch of the call
    at_once: bool = False  # whether it is one step with the one before


class Programs(NamedTuple):
    sends: tuple[Step, ...]
    receives: tuple[Step, ...]


def compile_script(scenario: Scenario, rank: int) -> Programs:
    rules, size = scenario.rules, scenario.group_size
    sends: list[Step] = []
    receives: list[Step] = []
    segment = epoch = joined = 0
    for call in scenario.scripts[rank]:
        if call is RESET:
            for what in ("arrive", "depart"):
                receives.append(Step(what, rank, segment, epoch, 0, 0, len(sends)))
            segment, epoch = segment + 1, 0
            continue
        if call is UNFUSED:
            epoch += rank in rules.unfused_takes_epoch
            continue
        last = epoch + len(call)
        for i, round in enumerate(call):
            epoch += 1
            if not rules.takes_part_in_empty_rounds and len(round.empty) >= size:
                continue
            slot = epoch % rules.num_slots if round.slot is None else round.slot
            before, joined = joined, len(receives) if rules.reads_before_next_signals else _last_wait(receives)
            posted = joined if rules.results.posts_after_reads else before
            if i == 0:
                result = max(_place(scenario, each, rank) for each in call)
                sends.append(Step("enter", rank, segment, epoch, round.op, slot, posted, result, last))
            started = len(sends)
            for what, dst in _sends(scenario, round, rank):
                after, at_once = posted if what in POSTS else joined, scenario.whole_posts and what in AT_ONCE
                written = round.size_on(rank if what in POSTS else dst)
                sends.append(Step(what, dst, segment, epoch, round.op, slot, after, written, last, at_once))
            sent = started if round.beside and scenario.device else len(sends)
            for what, src in _receives(rules, round, rank, size):
                receives.append(Step(what, src, segment, epoch, round.op, slot, sent, round.size_on(rank), last))
    return Programs(tuple(sends), tuple(receives))


def _place(scenario: Scenario, round: Round, rank: int) -> int:
    """The size of the rank's result that peers may write in place in the round; 0 if none."""
    written = len(round.empty) < scenario.group_size and not round.sums
    return round.size_on(rank) if scenario.blocks and written else 0


def _sends(scenario: Scenario, round: Round, rank: int) -> Iterator[tuple[str, int]]:
    # The own chunk is left out: one rank writes and reads it, in program order.
    rules, in_place = scenario.rules, _place(scenario, round, rank) > 0
    peers = peers_of(rank, scenario.group_size)[:-1]
    if in_place:
        yield from ((what, dst) for dst in peers if not round.is_empty(dst, rank) for what in rules.results.post)
    for dst in reversed(peers) if rank in scenario.turned else peers:
        empty = round.is_empty(rank, dst)
        signals = [] if empty and not rules.signals_empty_chunks else [("signal", dst)]
        # One step stands for all words of a chunk. The protocol treats them alike, and each lies between its signals.
        writes = [] if empty else [("write", dst)]
        if in_place and not empty:
            yield from ((what, dst) for what in rules.results.chunk)
        else:
            yield from (*writes, *signals) if rules.data_before_flag else (*signals, *writes)


def _receives(rules: Rules, round: Round, rank: int, size: int) -> Iterator[tuple[str, int]]:
    sources = sources_of(rank, size)[1:]
    if round.sums:
        yield from (("wait", src) for src in sources if rules.waits)
        yield from (("read", src) for src in sorted(sources) if not round.is_empty(src, rank))
    else:
        for src in sources:
            yield from [("wait", src)] * rules.waits
            yield from [("read", src)] * (not round.is_empty(src, rank))
    yield "finish", rank


def _last_wait(receives: list[Step]) -> int:
    return max((i + 1 for i, step in enumerate(receives) if step.what == "wait"), default=0)
