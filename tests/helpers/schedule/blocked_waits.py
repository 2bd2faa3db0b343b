"""Waits that queued kernels can block for good.

A kernel that waits holds its SMs until the signal comes. If what the signal needs finds no room meanwhile, on this GPU
or by way of others, nobody goes on. So to the order of `HappensBefore` come the edges "this kernel may have to wait for
room that those hold who wait", for all pairs that nothing orders; a circle may be a deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tests.helpers.schedule.happens_before import HappensBefore, Node
from tests.helpers.schedule.multiprocessors import NUM_SMS, Multiprocessors, footprint
from tests.helpers.schedule.operations import ON_SMS, Kind, Operation


def blocked_waits(order: HappensBefore, num_sms: int = NUM_SMS) -> list[str]:
    """One text for each circle. A kernel of the package needs room for one program, one of NCCL for all."""
    kernels: dict[int, list[list[Node]]] = defaultdict(list)  # by rank, their steps
    for (rank, _), steps in order.by_operation.items():
        if steps[0].operation.kind in ON_SMS:
            kernels[rank].append(steps)
    blocking: dict[int, list[Node]] = defaultdict(list)  # by id of a kernel's first step
    for each in kernels.values():
        for steps in each:
            holders = _holders(order, steps, [other for other in each if other[0].operation.waits])
            if holders and not _has_room(steps[0].operation, [other[0].operation for other in holders], num_sms):
                blocking[id(steps[0])] += [_last_wait(other) for other in holders]
    return _circles(order, blocking)


def _holders(order: HappensBefore, steps: Sequence[Node], waiting: Sequence[list[Node]]) -> list[list[Node]]:
    """The largest set of waiting kernels that may all run when this one is to be placed, found greedily."""
    beside = [other for other in waiting if other is not steps and _unordered(order, steps, other)]
    beside = [other for other in beside if not _begins_behind(order, other, steps)]
    beside.sort(key=lambda other: -other[0].operation.num_programs)
    held: list[list[Node]] = []
    for other in beside:
        if all(_unordered(order, other, each) for each in held):
            held.append(other)
    return held


def _begins_behind(order: HappensBefore, steps: Sequence[Node], other: Sequence[Node]) -> bool:
    """Whether a kernel is enqueued behind a step of the other one, which then has its place; its own wait is later."""
    first = steps[0]
    edges = [node for node in first.before if not set(node.step.signals) & set(first.step.waits)]
    return any(order.ordered(other[0], node) for node in edges)


def _unordered(order: HappensBefore, first: Sequence[Node], second: Sequence[Node]) -> bool:
    return not order.ordered(first[-1], second[0]) and not order.ordered(second[-1], first[0])


def _has_room(operation: Operation, holders: Sequence[Operation], num_sms: int) -> bool:
    gpu = Multiprocessors(num_sms)
    for holder in holders:
        gpu.place(footprint(holder), holder.num_programs)
    needed = operation.num_programs if operation.kind is Kind.COLLECTIVE else 1
    return len(gpu.place(footprint(operation), needed)) == needed


def _last_wait(steps: Sequence[Node]) -> Node:
    return [node for node in steps if node.step.waits][-1]


def _circles(order: HappensBefore, blocking: dict[int, list[Node]]) -> list[str]:
    """A kernel is blocked for good if a wait that holds its room comes after it, by these edges and all others."""
    left = {id(node): len(node.before) + len(blocking.get(id(node), ())) for node in order.nodes}
    after: dict[int, list[Node]] = defaultdict(list)
    for node in order.nodes:
        for each in (*node.before, *blocking.get(id(node), ())):
            after[id(each)].append(node)
    ready = [node for node in order.nodes if left[id(node)] == 0]
    while ready:
        node = ready.pop()
        for each in after[id(node)]:
            left[id(each)] -= 1
            if left[id(each)] == 0:
                ready.append(each)
    stuck = [node for node in order.nodes if left[id(node)] and id(node) in blocking]
    return [
        f"{node} may find no room while these wait: {', '.join(sorted({str(each) for each in blocking[id(node)]}))}"
        for node in stuck
    ]
