"""The cases. Each makes y, exchanges it, does unrelated compute and checks every element that arrived.

The time of each is set beside the times of its parts alone: the compute, checks included, and the communication.

There is no case of shared memory handed from one rank to others, as that alone moves nothing. On a CPU the fused op
exchanges through shared memory, so `fused` covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import fusedcomm
from fusedcomm.bench.all_to_all import parts
from fusedcomm.bench.all_to_all.case_call import CaseCall
from fusedcomm.bench.all_to_all.data import SuiteData
from fusedcomm.bench.all_to_all.parts import CasePart
from fusedcomm.runtime.device_to_host import DeviceToHost


@dataclass(frozen=True)
class Variant:
    """A line of the report; ``case`` is what users choose by."""

    case: str
    kind: str  # tells several variants of one case apart
    about: str
    run: Callable[[SuiteData, CaseCall], None]
    compute: CasePart = parts.compute
    communication: CasePart = parts.all_to_all

    @property
    def name(self) -> str:
        return f"{self.case}, {self.kind}" if self.kind else self.case


def sync(data: SuiteData, call: CaseCall) -> None:
    y = data.produce()
    received = torch.empty_like(y)
    call.waited(lambda: dist.all_to_all_single(received, y))
    data.unrelated()
    call.check(received, data.expected)


def asynchronous(data: SuiteData, call: CaseCall) -> None:
    received, work = data.start(data.produce())
    data.unrelated()
    call.waited(work.wait)
    call.check(received, data.expected)


def async_twice(data: SuiteData, call: CaseCall) -> None:
    received, work = data.start(data.produce())
    data.unrelated()
    call.waited(work.wait)
    call.check(received, data.expected)
    returned, work = data.start(received + 1)
    data.unrelated()
    call.waited(work.wait)
    call.check(returned, data.sent + 1)


def two_groups(data: SuiteData, call: CaseCall) -> None:
    y, total = data.produce(), data.addend.clone()
    # NCCL wants one order on all ranks, whatever the group
    if data.device.type == "cpu" and data.rank % 2:
        summing = data.start_sum(total, data.groups[1])
        received, exchanging = data.start(y, data.groups[0])
    else:
        received, exchanging = data.start(y, data.groups[0])
        summing = data.start_sum(total, data.groups[1])
    data.unrelated()
    call.waited(summing.wait)
    call.waited(exchanging.wait)
    call.check(received, data.expected)
    call.check(total, data.total)


def competing_at_once(data: SuiteData, call: CaseCall) -> None:
    y, total = data.produce(), data.addend.clone()
    received, exchanging = data.start(y, data.groups[0])
    summing = data.start_sum(total, data.groups[1])
    call.waited(exchanging.wait)
    call.waited(summing.wait)
    data.unrelated()
    call.check(received, data.expected)
    call.check(total, data.total)


def competing_serialised(data: SuiteData, call: CaseCall) -> None:
    y, total = data.produce(), data.addend.clone()
    received, exchanging = data.start(y, data.groups[0])
    call.waited(exchanging.wait)
    summing = data.start_sum(total, data.groups[1])
    call.waited(summing.wait)
    data.unrelated()
    call.check(received, data.expected)
    call.check(total, data.total)


def tolist(data: SuiteData, call: CaseCall) -> None:
    y = data.produce()
    received, work = data.start(y)
    first = call.waited(lambda: y[0, :8].tolist())  # needs the matmul, not the all_to_all that is under way
    data.unrelated()
    call.waited(work.wait)
    call.check(received, data.expected)
    call.wrong += first != data.first


def event_wait(blocking: bool) -> Callable[[SuiteData, CaseCall], None]:
    def wait(work: Any) -> None:
        while not (blocking or work.is_completed()):
            pass
        work.wait()

    def wait_for_event(work: Any) -> None:
        work.wait()  # makes the stream wait, not the host
        event = torch.cuda.Event(blocking=blocking)
        event.record()
        event.synchronize()

    def run(data: SuiteData, call: CaseCall) -> None:
        received, work = data.start(data.produce())
        call.waited(lambda: wait(work) if data.device.type == "cpu" else wait_for_event(work))
        data.unrelated()
        call.check(received, data.expected)

    return run


def d2h_alone(data: SuiteData, call: CaseCall) -> None:
    y = data.produce()
    copied = DeviceToHost(y)
    data.unrelated()
    call.waited(copied.wait)
    call.check(y, data.sent)
    if call.keep:
        call.check(copied.wait(), data.sent.cpu())


def d2h_together(data: SuiteData, call: CaseCall) -> None:
    y = data.produce()
    received, work = data.start(y)
    copied = DeviceToHost(y)
    data.unrelated()
    call.waited(work.wait)
    call.waited(copied.wait)
    call.check(received, data.expected)
    if call.keep:
        call.check(copied.wait(), data.sent.cpu())


def lazy(data: SuiteData, call: CaseCall) -> None:
    """The first use of the result waits. Here it is the check, whose time therefore counts as blocked."""
    assert dist.group.WORLD is not None
    received = funcol.all_to_all_single(data.produce(), None, None, dist.group.WORLD)
    data.unrelated()
    call.waited(lambda: call.check(received, data.expected))


def isend_irecv(data: SuiteData, call: CaseCall) -> None:
    y = data.produce()
    received = torch.empty_like(y)
    blocks, places = y.chunk(data.num_ranks), received.chunk(data.num_ranks)
    works: list[Any] = []
    for peer in _peers(data):
        pair = [(dist.isend, blocks[peer]), (dist.irecv, places[peer])]
        # One of two sends first, the other receives first: sends that meet can wait for each other for ever
        for start, block in pair if data.rank < peer else reversed(pair):
            works.append(start(block, peer))
    places[data.rank].copy_(blocks[data.rank])
    data.unrelated()
    for work in works:
        call.waited(work.wait)
    call.check(received, data.expected)


def batch_isend_irecv(data: SuiteData, call: CaseCall) -> None:
    y = data.produce()
    received = torch.empty_like(y)
    blocks, places = y.chunk(data.num_ranks), received.chunk(data.num_ranks)
    sends = [dist.P2POp(dist.isend, blocks[peer], peer) for peer in _peers(data)]
    receives = [dist.P2POp(dist.irecv, places[peer], peer) for peer in _peers(data)]
    works = dist.batch_isend_irecv(sends + receives)
    places[data.rank].copy_(blocks[data.rank])
    data.unrelated()
    for work in works:
        call.waited(work.wait)
    call.check(received, data.expected)


def fused(data: SuiteData, call: CaseCall) -> None:
    received = fusedcomm.matmul_all_to_all(data.x, data.w, 0, -1)
    data.unrelated()
    call.check(received, data.expected)


def _peers(data: SuiteData) -> Sequence[int]:
    """The peers in an order that pairs ranks in each step: nobody waits for a rank that waits for a third."""
    every = [(step - data.rank) % data.num_ranks for step in range(data.num_ranks)]
    return [peer for peer in every if peer != data.rank]


_WITH_SUM = {"compute": parts.compute_with_sum, "communication": parts.all_to_all_and_sum}
VARIANTS = (
    Variant("sync", "", "all_to_all, then the unrelated compute", sync),
    Variant("async", "", "all_to_all under way during the unrelated compute", asynchronous),
    Variant(
        "async-twice",
        "",
        "two all_to_all, the second of the first one's result, each beside unrelated compute",
        async_twice,
        parts.compute_twice,
        parts.all_to_all_twice,
    ),
    Variant(
        "two-groups", "", "all_to_all and all_reduce on two groups; on CPU in opposite order", two_groups, **_WITH_SUM
    ),
    Variant("competing", "at once", "all_to_all and all_reduce together, waited for", competing_at_once, **_WITH_SUM),
    Variant("competing", "serialised", "all_to_all, then all_reduce", competing_serialised, **_WITH_SUM),
    Variant("tolist", "", "async, and .tolist() of a few elements meanwhile", tolist),
    Variant("event-wait", "blocking", "the host sleeps until the all_to_all is done", event_wait(True)),
    Variant("event-wait", "spinning", "the host polls until the all_to_all is done", event_wait(False)),
    Variant("d2h", "alone", "copy to the host in place of the all_to_all", d2h_alone, communication=parts.copy_to_host),
    Variant("d2h", "together", "async, and a copy to the host", d2h_together, communication=parts.all_to_all_and_copy),
    Variant("lazy", "", "async by a functional collective; blocked is its first use, the check", lazy),
    Variant("point-to-point", "isend", "an isend and an irecv per peer, in pairs", isend_irecv),
    Variant("point-to-point", "batch", "batch_isend_irecv with all peers", batch_isend_irecv),
    Variant("fused", "", "fusedcomm.matmul_all_to_all, then the unrelated compute", fused),
)
CASES = tuple(dict.fromkeys(variant.case for variant in VARIANTS))
