"""Hangs of streams that share hardware queues, of which a process has CUDA_DEVICE_MAX_CONNECTIONS.

Streams are dealt to queues in some way. A queue holds operations in the host's order of launches, and here each of them
begins when the one before has ended, which is later than on a GPU. Two properties rule out a hang, for every number of
queues and every dealing, also where ranks deal differently:

1. Each rank's operations in the host's order, with the edges of events and signals, form no circle. So all ranks'
   operations have an order that respects the host's order on each rank, and thereby the queues of any dealing.
2. Waiting kernels leave room for each operation that was launched before them and may begin after them.

Proof: in a hang, take the first operation in that order that has not ended. All that it waits for has ended, by 1, so
it has no room. The kernels that hold the room wait, and come later in that order, which 2 forbids.

A call sends all that it waits for. So where 1 holds for each call, it holds for all sequences of calls, on any groups
and streams, that all ranks launch in one order.

A gather on all SMs violates 2. Where there is one, all dealings that are alike on all ranks are searched for circles.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tests.helpers.schedule.blocked_waits import blocked_waits, overtaken
from tests.helpers.schedule.happens_before import HappensBefore
from tests.helpers.schedule.operations import Enqueued, Kind

Dealing = Mapping[int, int]  # stream -> queue


def hangs(ranks: Sequence[Enqueued]) -> list[str]:
    """Hangs that some dealing of streams to hardware queues allows."""
    streams = sorted({each.stream for rank in ranks for each in rank.operations if each.stream >= 0})
    order = HappensBefore(dealt(ranks, dict.fromkeys(streams, 0)))
    found = [f"nobody signals {flag}, for which {node} waits" for node, flag in order.unmatched]
    if order.cyclic:
        found.append(f"in one queue {order.cyclic[0]} waits for what is launched behind it")
    if not found and overtaken(HappensBefore(ranks)):
        for dealing in dealings(streams):
            circles = blocked_waits(HappensBefore(dealt(ranks, dealing)))
            found += [f"with streams in queues {dealing}: {circle}" for circle in circles]
    return found


def dealt(ranks: Sequence[Enqueued], dealing: Dealing) -> list[Enqueued]:
    """The ranks as on GPUs whose queues are their streams."""
    return [
        replace(
            rank,
            operations=[
                each if each.kind is Kind.FREE else replace(each, stream=dealing[each.stream])
                for each in rank.operations
            ],
        )
        for rank in ranks
    ]


def dealings(streams: Sequence[int]) -> Iterator[dict[int, int]]:
    """Every partition of streams, the first of which is in queue 0."""
    if not streams:
        yield {}
        return
    *others, last = streams
    for dealing in dealings(others):
        for queue in range(max(dealing.values(), default=-1) + 2):
            yield dealing | {last: queue}
