"""The order in which a rank writes, signals, waits and reads, by the schedules of its calls.

A rank has two programs, as it has streams: what it sends, and what it receives. Its own chunk is in neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, takewhile
from typing import NamedTuple

from tests.helpers.plain_cases import Case
from tests.helpers.problems import Problem
from tests.helpers.schedule.happens_before import HappensBefore, Node
from tests.helpers.schedule.kernel_effects import EPOCH, WORD, Group
from tests.helpers.schedule.programs import CPU, CPU_WITH_HEAP, GPU, exchange_of, memory_of, schedule
from tests.helpers.schedule.region import Region
from tests.helpers.schedule.walk import Walk
from tests.helpers.uneven import Uneven

SLOT_BYTES, ITEM_BYTES = 1 << 14, 2
BY_KERNELS = GPU._replace(least_copied=1 << 62)


@dataclass(frozen=True)
class Traffic:
    """A call. ``algorithm``: on a device; a host has `chunked` alone."""

    problem: Callable[[int], Problem | Uneven | Case]  # by group_size
    algorithm: str = "fused"
    num_rounds: int = 1


class Word(NamedTuple):
    what: str  # "post", "look", "write" or "signal"; or "wait", "read" or "finish"
    other: int  # rank
    epoch: int
    after: int  # words of the other program that come before, by the rank's own streams, events and flag


class Words(NamedTuple):
    sends: list[Word]
    receives: list[Word]
    num_rounds: list[int]  # of each call


@cache
def words(calls: tuple[Traffic | None, ...], rank: int, group_size: int, device: bool, in_place: bool) -> Words:
    """The words of calls one after the other. None takes a round in which the rank does nothing."""
    group, facts = Group("group", tuple(range(group_size))), CPU_WITH_HEAP if in_place else CPU
    memory = memory_of(rank, group_size, SLOT_BYTES)
    walk, num_rounds = Walk(rank, [group], [memory], posts=in_place), list[int]()
    chunk_bytes: dict[int, int] = {}  # by epoch
    for call in calls:
        before = walk.epochs[group.name]
        if call is None:
            walk.epochs[group.name] += 1
        else:
            problem, algorithm = call.problem(group_size), call.algorithm if device else "chunked"
            num_bytes = exchange_of(problem, memory).chunk_numel * ITEM_BYTES // call.num_rounds
            cut = memory._replace(max_chunk_bytes=max(num_bytes, ITEM_BYTES))
            walk.call(schedule(problem, cut, BY_KERNELS if device else facts, algorithm), group)
            chunk_bytes |= dict.fromkeys(range(before + 1, walk.epochs[group.name] + 1), num_bytes)
        num_rounds.append(walk.epochs[group.name] - before)
    order = HappensBefore([walk.enqueued])
    nodes = [node for each in order.by_operation.values() for node in each]
    sends = list(_sends(nodes, group, rank, memory.layout.header_bytes))
    receives = list(_receives(nodes, group, rank, memory.layout.header_bytes, chunk_bytes))
    return Words(_placed(order, sends, receives), _placed(order, receives, sends), num_rounds)


_Found = tuple[str, int, int, Node]  # what, the other rank, epoch


def _sends(nodes: Sequence[Node], group: Group, rank: int, header_bytes: int) -> Iterator[_Found]:
    chunk: dict[int, dict[str, Node]] = defaultdict(dict)  # by dst_rank: what comes before its signal
    for node in nodes:
        for flag in node.step.waits:
            if flag.group != group.name:
                chunk[flag.src_rank]["look"] = node
        for dst_rank in group.ranks:
            if dst_rank != rank and any(_is_chunk(each, group, dst_rank, header_bytes) for each in node.step.writes):
                chunk[dst_rank].setdefault("write", node)
        for flag in node.step.signals:
            if flag.group != group.name:
                yield "post", flag.dst_rank, flag.epoch, node
            elif flag.dst_rank != rank:
                yield from ((what, flag.dst_rank, flag.epoch, at) for what, at in chunk.pop(flag.dst_rank, {}).items())
                yield "signal", flag.dst_rank, flag.epoch, node
    assert not chunk, "what is written is signalled"


def _is_chunk(region: Region, group: Group, owner: int, header_bytes: int) -> bool:
    """Whether it is in a slot of the owner, or in a result of its."""
    is_result = region.memory.startswith("result") and region.memory.endswith(f" on rank {owner}")
    return is_result or (region.memory == group.segment(owner) and region.start >= header_bytes)


def _receives(
    nodes: Sequence[Node], group: Group, rank: int, header_bytes: int, chunk_bytes: Mapping[int, int]
) -> list[_Found]:
    found: dict[tuple[str, int, int], Node] = {}
    epochs = iter(chunk_bytes)
    epoch = next(epochs, 0)
    for node in nodes:
        for flag in node.step.waits:
            if flag.group == group.name and flag.src_rank != rank:
                found.setdefault(("wait", flag.src_rank, flag.epoch), node)
        marked = [src for src in group.ranks if group.mark(rank, src) in node.step.reads]
        found.update({("read", src_rank, epoch): node for src_rank in marked})
        for region in node.step.reads:
            if region.memory == group.segment(rank) and region.start >= header_bytes:
                src_rank = (region.start - header_bytes) % SLOT_BYTES // chunk_bytes[epoch]
                found.pop(("read", src_rank, epoch), None)  # one of parts, or for another result
                if src_rank != rank:
                    found["read", src_rank, epoch] = node
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
