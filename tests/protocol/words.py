"""The order in which a rank writes, signals, waits and reads, by the schedules of its calls.

A rank has two programs, as it has streams: what it sends, and what it receives. Its own chunk is in neither.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import torch

from fusedcomm.plan.geometry.rank_order import peers_of, sources_of
from tests.helpers.plain_cases import Case
from tests.helpers.problems import Problem
from tests.helpers.schedule.happens_before import HappensBefore, Node
from tests.helpers.schedule.kernel_effects import EPOCH, WORD, Group
from tests.helpers.schedule.operations import Flag, Kind, Step
from tests.helpers.schedule.programs import CPU, GPU, exchange_of, memory_of, schedule, token_schedules
from tests.helpers.schedule.region import Region
from tests.helpers.schedule.walk import Walk
from tests.helpers.uneven import Uneven

SLOT_BYTES, ITEM_BYTES = 1 << 16, 2
# problems of rows that go to experts and come back, from the slots of their senders or by pushes
DISPATCH, COMBINE, RETURN = "dispatch", "combine", "return"
BY_KERNELS = GPU._replace(least_copied=1 << 62)


@dataclass(frozen=True)
class Traffic:
    """A call. ``algorithm``: on a device; a host has `chunked` alone."""

    problem: Callable[[int], Problem | Uneven | Case | str]  # by group_size
    algorithm: str = "fused"
    num_rounds: int = 1


class Word(NamedTuple):
    what: str  # "write", "show" or "signal"; or "wait", "read", "fetch" or "finish"
    other: int  # rank; "show" writes the own slot, which all peers "fetch"
    epoch: int
    after: int  # words of the other program that come before, by the rank's own streams, events and flag


class Words(NamedTuple):
    sends: list[Word]
    receives: list[Word]
    num_rounds: list[int]  # of each call


@cache
def words(calls: tuple[Traffic | None, ...], rank: int, group_size: int, device: bool) -> Words:
    """The words of calls one after the other. None takes a round in which the rank does nothing."""
    group = Group("group", tuple(range(group_size)))
    memory = memory_of(rank, group_size, SLOT_BYTES)
    walk, num_rounds = Walk(rank, [group], [memory]), list[int]()
    chunk_bytes: dict[int, int] = {}  # by epoch; 0: rows anywhere in the slot; -1: the slot of a peer is read
    for call in calls:
        before = walk.epochs[group.name]
        problem = None if call is None else call.problem(group_size)
        if call is None:
            walk.epochs[group.name] += 1
        elif isinstance(problem, str):
            if device:
                schedules = token_schedules(memory, BY_KERNELS)
                walk.call(schedules[problem != DISPATCH], replace(group, pulls=problem == COMBINE))
            else:
                getattr(_Rows(walk, group), COMBINE if problem == RETURN else problem)()
            counts = _counts_bytes(group_size)
            kinds = (
                [counts, 0 if device else counts]
                if problem == DISPATCH
                else [0 if device and problem == RETURN else -1]
            )
            chunk_bytes |= dict(zip(range(before + 1, walk.epochs[group.name] + 1), kinds, strict=True))
        else:
            algorithm = call.algorithm if device else "chunked"
            num_bytes = exchange_of(problem, memory).chunk_numel * ITEM_BYTES // call.num_rounds
            cut = memory._replace(max_chunk_bytes=max(num_bytes, ITEM_BYTES))
            walk.call(schedule(problem, cut, BY_KERNELS if device else CPU, algorithm), group)
            chunk_bytes |= dict.fromkeys(range(before + 1, walk.epochs[group.name] + 1), num_bytes)
        num_rounds.append(walk.epochs[group.name] - before)
    order = HappensBefore([walk.enqueued])
    nodes = [node for each in order.by_operation.values() for node in each]
    shown = {epoch for epoch, kind in chunk_bytes.items() if kind < 0}
    sends = list(_sends(nodes, group, rank, memory.layout.header_bytes, shown))
    receives = list(_receives(nodes, group, rank, memory.layout.header_bytes, chunk_bytes))
    return Words(_placed(order, sends, receives), _placed(order, receives, sends), num_rounds)


class _Rows:
    """The words of `fusedcomm.run.routed_rows.BySlots`, which has no schedule (tests/protocol/mirrored.py)."""

    def __init__(self, walk: Walk, group: Group) -> None:
        self.walk, self.group, self.rank = walk, group, walk.rank
        self.peers, self.sources = (order(self.rank, len(group.ranks)) for order in (peers_of, sources_of))
        self.peers.remove(self.rank)
        self.sources.remove(self.rank)

    def dispatch(self) -> None:
        for _ in ("counts", "rows"):
            for dst in self.peers:
                self._do(writes=[self._slot(dst, self.rank)])
                self._signal(dst)
            for src in self.sources:
                self._wait(src)
                self._do(reads=[self._slot(self.rank, src)])
            self._end_round()

    def combine(self) -> None:
        self._do(writes=[self._slot(self.rank)])
        for dst in self.peers:
            self._signal(dst)
        for src in self.sources:
            self._wait(src)
            self._do(reads=[self._slot(src)])
        self._end_round()

    def _do(self, **accesses: Any) -> None:
        self.walk.enqueue(Kind.ELEMENTS, "rows", [Step(**accesses)], self.walk.stream(0))

    def _signal(self, dst: int) -> None:
        self._do(signals=[Flag(self.group.name, dst, self.rank, self.walk.epochs[self.group.name] + 1)])

    def _wait(self, src: int) -> None:
        self._do(waits=[Flag(self.group.name, self.rank, src, self.walk.epochs[self.group.name] + 1)])

    def _end_round(self) -> None:
        self._do(writes=[Region(self.group.segment(self.rank), EPOCH, WORD)])
        self.walk.epochs[self.group.name] += 1

    def _slot(self, owner: int, part: int = 0) -> Region:
        layout, epoch = self.walk.memories[self.group.name].layout, self.walk.epochs[self.group.name] + 1
        slot, at = epoch % layout.num_slots * SLOT_BYTES, part * _counts_bytes(len(self.group.ranks))
        return Region(self.group.segment(owner), layout.header_bytes + slot + at, WORD)


def _counts_bytes(group_size: int) -> int:
    """A rank's, in `token_schedules`."""
    return 2 * group_size * torch.int64.itemsize


_Found = tuple[str, int, int, Node]  # what, the other rank, epoch


def _sends(
    nodes: Sequence[Node], group: Group, rank: int, header_bytes: int, shown: Collection[int]
) -> Iterator[_Found]:
    written: dict[int, Node] = {}  # by dst_rank
    own: Node | None = None
    for node in nodes:
        for dst_rank in group.ranks:
            if any(_is_in_slot(each, group, dst_rank, header_bytes) for each in node.step.writes):
                if dst_rank != rank:
                    written.setdefault(dst_rank, node)
                else:
                    own = node
        for flag in node.step.signals:
            if own is not None and flag.epoch in shown:
                yield "show", rank, flag.epoch, own
            own = None
            if (before := written.pop(flag.dst_rank, None)) is not None:
                yield "write", flag.dst_rank, flag.epoch, before
        for flag in node.step.signals:
            if flag.dst_rank != rank:
                yield "signal", flag.dst_rank, flag.epoch, node
    assert not written, "what is written is signalled"


def _is_in_slot(region: Region, group: Group, owner: int, header_bytes: int) -> bool:
    return region.memory == group.segment(owner) and region.start >= header_bytes


def _receives(
    nodes: Sequence[Node], group: Group, rank: int, header_bytes: int, chunk_bytes: Mapping[int, int]
) -> list[_Found]:
    found: dict[tuple[str, int, int], Node] = {}
    epochs = iter(chunk_bytes)
    epoch = next(epochs, 0)
    for node in nodes:
        for flag in node.step.waits:
            if flag.src_rank != rank:
                found.setdefault(("wait", flag.src_rank, flag.epoch), node)
        for owner, region in ((owner, each) for each in node.step.reads for owner in group.ranks):
            if not _is_in_slot(region, group, owner, header_bytes):
                continue
            kind = chunk_bytes[epoch]
            whole = [("fetch", owner)] if kind < 0 else [("read", src) for src in group.ranks]
            part = (region.start - header_bytes) % SLOT_BYTES // kind if kind > 0 else 0
            for what, src_rank in [("read", part)] if kind > 0 else whole:
                found.pop((what, src_rank, epoch), None)  # one of parts, or for another result
                if src_rank != rank:
                    found[what, src_rank, epoch] = node
        if Region(group.segment(rank), EPOCH, WORD) in node.step.writes:
            found["finish", rank, epoch] = node
            epoch = next(epochs, 0)
    return [(*what, node) for what, node in found.items()]


def _placed(order: HappensBefore, found: Sequence[_Found], others: Sequence[_Found]) -> list[Word]:
    """The words, which must come one after the other, with the number of others that come before each."""
    nodes = [node for *_, node in found]
    assert all(first is second or order.ordered(first, second) for first, second in pairwise(nodes))
    return [
        Word(what, other, epoch, sum(1 for _ in takewhile(lambda each: order.ordered(each[-1], node), others)))  # noqa: B023
        for what, other, epoch, node in found
    ]
