"""Simulates an order of a graph: one compute stream, the links, and the memory. `docs/overlap.md` has the model."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from fusedcomm.compile.overlap.estimator import Estimator
from fusedcomm.compile.overlap.node_work import Transfer
from fusedcomm.compile.overlap.program import Program
from fusedcomm.compile.overlap.timeline import Line, Timeline

_EPSILON = 1e-9  # ms: less is left of a transfer by rounding alone


class Clock:
    """The time of the compute stream, and the transfers on the links. Any key can identify a collective."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queues: dict[str, deque[_Job]] = {}  # per group; the first is on the link
        self._ended: dict[Any, tuple[float, float]] = {}
        self._new: list[Any] = []

    def compute(self, ms: float) -> None:
        until = self.now + ms
        while self.now < until:
            self._step(until)

    def start(self, key: Any, transfer: Transfer) -> None:
        queue = self._queues.setdefault(transfer.group, deque())
        queue.append(_Job(key, transfer.link, transfer.latency_ms, transfer.wire_ms))
        if len(queue) == 1:
            queue[0].began = self.now

    def newly_ended(self) -> list[Any]:
        """The collectives that have ended since the last call."""
        found, self._new = self._new, []
        return found

    def ended(self, key: Any) -> bool:
        return key in self._ended

    def span(self, key: Any) -> tuple[float, float]:
        """When an ended collective was first on its link, and when it ended."""
        return self._ended[key]

    def left(self, key: Any) -> float:
        """About how long the collective takes to end, if nothing else starts."""
        for queue in self._queues.values():
            ahead = 0.0
            for job in queue:
                sharing = sum(1 for other in self._queues.values() if other and other[0].link == job.link)
                ahead += job.latency + job.wire * sharing
                if job.key == key:
                    return ahead
        return 0.0

    def wait(self, key: Any) -> float:
        """Wait until the collective has ended; returns how long that took."""
        before = self.now
        while key not in self._ended:
            self._step(float("inf"))
        return self.now - before

    def _step(self, until: float) -> None:
        """Go on to when the next latency has passed or the next collective has ended, but at most to ``until``."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        sharing: dict[str, int] = {}
        for job in heads:
            if job.latency <= 0:
                sharing[job.link] = sharing.get(job.link, 0) + 1
        left = [job.latency if job.latency > 0 else job.wire * sharing[job.link] for job in heads]
        passed = min([until - self.now, *left])
        assert passed < float("inf"), "waits for a collective that has not started"
        self.now = until if passed == until - self.now else self.now + passed
        for job in heads:
            if job.latency > 0:
                job.latency = _less(job.latency, passed)
            else:
                job.wire = _less(job.wire, passed / sharing[job.link])
        for queue in self._queues.values():
            while queue and queue[0].latency <= 0 and queue[0].wire <= 0:
                job = queue.popleft()
                self._ended[job.key] = (job.began, self.now)
                self._new.append(job.key)
                if queue:
                    queue[0].began = self.now


@dataclass
class _Job:
    key: Any
    link: str
    latency: float
    wire: float
    began: float = 0.0


def _less(ms: float, passed: float) -> float:
    return ms - passed if ms - passed > _EPSILON else 0.0


def simulate(gm: GraphModule, estimator: Estimator | None = None) -> Timeline:
    """Return the timeline of a graph in its current order.

    Args:
        gm: as in `schedule`.
        estimator: times of nodes; None: ``Estimator.of(gm.graph)``.
    """
    program = Program(gm.graph, (estimator or Estimator.of(gm.graph)).cost)
    return run(program, range(len(program)))


def run(program: Program, order: Sequence[int]) -> Timeline:
    """The timeline of a program in ``order``."""
    clock, live = Clock(), program.memory.track()
    exposed: dict[int, float] = {}

    def hold(start: int, at_least: float = 0.0) -> None:
        """Hold the compute stream until start has ended, but at least until at_least."""
        begin = clock.now
        clock.wait(start)
        clock.compute(at_least - clock.now)
        exposed[start] += clock.now - begin

    for i in order:
        cost, begin = program.costs[i], clock.now
        live.run(i)
        if cost.transfer is not None:
            clock.start(i, cost.transfer)
            exposed[i] = 0.0
        clock.compute(cost.compute_ms)
        if cost.fused_ms is not None:
            hold(i, begin + cost.fused_ms)
        for start in program.waits_for[i]:
            hold(start)
    for start in exposed:  # some may have no wait
        hold(start)
    return Timeline(
        total_ms=clock.now,
        compute_ms=sum(program.costs[i].compute_ms for i in order),
        exposed_ms=sum(exposed.values()),
        collectives=[_line(program, clock, start, ms) for start, ms in exposed.items()],
        peak_bytes=live.peak,
    )


def _line(program: Program, clock: Clock, start: int, exposed_ms: float) -> Line:
    transfer = program.costs[start].transfer
    assert transfer is not None
    begin, end = clock.span(start)
    name, kind = program.nodes[start].name, program.kinds[start]
    return Line(name, kind, transfer.group, transfer.link, begin, end, transfer.ms, exposed_ms)
