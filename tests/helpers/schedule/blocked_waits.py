"""Waits that queued kernels can block for good.

A kernel that waits holds its SMs until the signal comes. If what the signal needs finds no room meanwhile, on this GPU
or by way of others, nobody goes on. So to the order of `HappensBefore` come the edges "this kernel may have to wait for
room that those hold who wait", for all pairs that nothing orders; a circle may be a deadlock.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.helpers.schedule.happens_before import HappensBefore, Node, by_edges
from tests.helpers.schedule.multiprocessors import NUM_SMS, Multiprocessors, footprint
from tests.helpers.schedule.operations import ON_SMS, Kind, Operation


def blocked_waits(order: HappensBefore, num_sms: int = NUM_SMS) -> list[str]:
    """One text for each circle. A kernel of the package needs room for one program, one of NCCL for all."""
    blocking: dict[int, list[Node]] = defaultdict(list)  # by id of a kernel's first step
    for steps, holders in _without_room(order, num_sms):
        blocking[id(steps[0])] += [[node for node in other if node.step.waits][-1] for other in holders]
    return _circles(order, blocking)


def overtaken(order: HappensBefore, num_sms: int = NUM_SMS) -> list[str]:
    """One text for each kernel that may find no room because waiting kernels of later launches began before it."""
    found = _without_room(order, num_sms, only_later=True)
    return [f"{steps[0]} may find no room behind {', '.join(str(other[0]) for other in by)}" for steps, by in found]


def _without_room(
    order: HappensBefore, num_sms: int, only_later: bool = False
) -> Iterator[tuple[list[Node], list[list[Node]]]]:
    """The steps of each kernel without room, and of those that hold it while they wait."""
    kernels: dict[int, list[list[Node]]] = defaultdict(list)  # by rank
    for (rank, _), steps in order.by_operation.items():
        if steps[0].operation.kind in ON_SMS or _is_copy_kernel(steps[0].operation):
            kernels[rank].append(steps)
    for each in kernels.values():
        waiting = [other for other in each if _may_wait(order, other)]
        for steps in each:
            number = steps[0].operation.number
            later = [other for other in waiting if not only_later or other[0].operation.number > number]
            holders = _holders(order, steps, later)
            if holders and not _has_room(steps[0].operation, [other[0].operation for other in holders], num_sms):
                yield steps, holders


def _may_wait(order: HappensBefore, steps: Sequence[Node]) -> bool:
    """Whether a signal may come after the start of the kernel that waits for it."""
    signals = [signal for node in steps if node.step.waits for signal in node.before[len(node.begins_behind) :]]
    return any(not _begins_after(order, steps, signal) for signal in signals)


def _is_copy_kernel(operation: Operation) -> bool:
    """Copies within a GPU are kernels; copy engines make those to peers."""
    return operation.kind is Kind.MEMCPY and not any(step.work.sent for step in operation.steps)


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
    return _begins_after(order, steps, other[0])


def _unordered(order: HappensBefore, first: Sequence[Node], second: Sequence[Node]) -> bool:
    """Whether two kernels can run at the same time. A kernel that waits for a flag runs already."""
    return not _begins_after(order, second, first[-1]) and not _begins_after(order, first, second[-1])


def _begins_after(order: HappensBefore, steps: Sequence[Node], node: Node) -> bool:
    return any(order.ordered(node, each) for each in steps[0].begins_behind)


def _has_room(operation: Operation, holders: Sequence[Operation], num_sms: int) -> bool:
    gpu = Multiprocessors(num_sms)
    for holder in holders:
        gpu.place(footprint(holder), holder.num_programs)
    needed = operation.num_programs if operation.kind is Kind.COLLECTIVE else 1
    return len(gpu.place(footprint(operation), needed)) == needed


def _circles(order: HappensBefore, blocking: dict[int, list[Node]]) -> list[str]:
    """A kernel is blocked for good if a wait that holds its room comes after it, by these edges and all others."""
    free = set(map(id, by_edges(order.nodes, lambda node: [*node.before, *blocking.get(id(node), ())])))
    stuck = [node for node in order.nodes if id(node) not in free and id(node) in blocking]
    return [
        f"{node} may find no room while these wait: {', '.join(sorted({str(each) for each in blocking[id(node)]}))}"
        for node in stuck
    ]
