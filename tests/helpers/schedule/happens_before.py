"""The order that holds over all ranks, and the accesses that nothing orders.

Edges: a stream runs its operations in order; an event puts operations before others; a signal (release)
comes before the wait (acquire) that needs it. Two accesses to the same bytes, one of which writes, must be ordered. The
allocator gives memory to a stream before the first access to it, and the next owner writes it any time after the free:
so both count as writes of all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from tests.helpers.schedule.operations import Enqueued, Flag, Kind, Operation, Step
from tests.helpers.schedule.region import Region

NO_CHAIN = -1


@dataclass
class Node:
    """A step, at its ``place`` in a ``chain``, the steps of one stream. A free is in none: nothing comes after it.
    It begins behind the nodes in ``begins_behind``. Those in ``before`` also signal what it then waits for."""

    operation: Operation
    step: Step
    chain: int
    place: int
    begins_behind: list[Node]
    before: list[Node]
    clock: tuple[int, ...] = ()  # by chain: how many of its nodes come before or are this one

    def __str__(self) -> str:
        return str(self.operation)


class HappensBefore:
    """``nodes`` of all ranks, in an order that could be that of time."""

    def __init__(self, ranks: Sequence[Enqueued]) -> None:
        self.by_operation: dict[tuple[int, int], list[Node]] = {}
        self.unmatched: list[tuple[Node, Flag]] = []  # waits that no signal ends
        self.num_chains = 0
        made: list[Node] = []
        for each in ranks:
            made += self._nodes(each)
        self._add_signals(made)
        self.nodes = self._sorted(made)
        self.cyclic = [node for node in made if not node.clock]

    def ordered(self, first: Node, second: Node) -> bool:
        return first.chain != NO_CHAIN and second.clock[first.chain] > first.place

    def _nodes(self, enqueued: Enqueued) -> Iterator[Node]:
        chains: dict[int, tuple[int, list[Node]]] = {}
        chain, nodes = NO_CHAIN, list[Node]()
        for operation in enqueued.operations:
            if operation.kind is Kind.FREE:
                chain, nodes = NO_CHAIN, []
            else:
                if operation.stream not in chains:
                    chains[operation.stream] = self.num_chains, []
                    self.num_chains += 1
                chain, nodes = chains[operation.stream]
            before = [self.by_operation[enqueued.rank, number][-1] for number in operation.after]
            for step in operation.steps:
                begins_behind = before + nodes[-1:]
                node = Node(operation, step, chain, len(nodes), begins_behind, [*begins_behind])
                before = []
                nodes.append(node)
                self.by_operation.setdefault((enqueued.rank, operation.number), []).append(node)
                yield node

    def _add_signals(self, nodes: Sequence[Node]) -> None:
        signalled = {flag: node for node in nodes for flag in node.step.signals}
        for node in nodes:
            for flag in node.step.waits:
                if flag in signalled:
                    node.before.append(signalled[flag])
                else:
                    self.unmatched.append((node, flag))

    def _sorted(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes by their edges, with clocks; those of a cycle are left out and have none."""
        done = by_edges(nodes, lambda node: node.before)
        for node in done:
            clock = [max(counts) for counts in zip(*(each.clock for each in node.before), strict=True)]
            clock = clock or [0] * self.num_chains
            if node.chain != NO_CHAIN:
                clock[node.chain] = node.place + 1
            node.clock = tuple(clock)
        return done


def by_edges(nodes: Sequence[Node], before: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """The nodes in an order of these edges, without those of a cycle and behind one."""
    found, of = list[Node](), {id(node): node for node in nodes}
    sorter = TopologicalSorter({id(node): [id(each) for each in before(node)] for node in nodes})
    with suppress(CycleError):
        sorter.prepare()
    while ready := sorter.get_ready():
        found += [of[each] for each in ready]
        sorter.done(*ready)
    return found


def races(order: HappensBefore) -> list[str]:
    """Accesses that nothing orders, waits that nobody ends, and operations that wait for each other."""
    found = [f"nobody signals {flag}, for which {node} waits" for node, flag in order.unmatched]
    if order.cyclic:
        found.append("these wait for each other: " + ", ".join(sorted({str(node) for node in order.cyclic})))
    memories: dict[str, _Accesses] = defaultdict(lambda: _Accesses(order))
    for node in order.nodes:
        for write, regions in ((False, node.step.reads), (True, node.step.writes)):
            for region in regions:
                found += memories[region.memory].add(node, region, write)
    return list(dict.fromkeys(found))


class _Accesses:
    """The accesses to one memory. As chains are in order, only the last one of a chain needs to be compared."""

    def __init__(self, order: HappensBefore) -> None:
        self.order = order
        self.last: dict[Region, dict[tuple[bool, int], Node]] = {}  # by (whether it writes, chain)
        self.overlapping: dict[Region, list[Region]] = {}

    def add(self, node: Node, region: Region, write: bool) -> Iterator[str]:
        if region not in self.last:
            self.overlapping[region] = [other for other in self.last if region.overlaps(other)] + [region]
            for overlapping in self.overlapping[region][:-1]:
                self.overlapping[overlapping].append(region)
            self.last[region] = {}
        for other_region in self.overlapping[region]:
            for (other_write, _), other in self.last[other_region].items():
                if (write or other_write) and other is not node and not self.order.ordered(other, node):
                    first, second = (other, node) if node.operation.kind is Kind.FREE else (node, other)
                    yield _named(first, second, region)
        self.last[region][write, node.chain] = node


def _named(first: Node, second: Node, region: Region) -> str:
    if second.operation.kind is Kind.FREE:
        return f"memory is used again too early: nothing ends {first} before its free"
    if Kind.ALLOC in (first.operation.kind, second.operation.kind):
        return f"memory is used too early: {first} and {second} are not ordered"
    return f"race at byte {region.start} of {region.memory}: {first} and {second} are not ordered"
