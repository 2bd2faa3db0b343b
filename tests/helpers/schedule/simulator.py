"""When each operation of all ranks runs: a prediction from `rates`, with streams, SMs, copy engines and links.

An operation begins when the host has enqueued it, what it comes after has ended, and, if it needs SMs, one of its
programs has found room; programs without room come later. Streams of a lower priority number are served first. A step
that waits holds its SMs until the flags are there. Steps that send share what a GPU sends and what it receives equally.
Elementwise kernels of torch end programs all the time, so they hold no SM; they begin when there is room for one
program. Copies between memories of one GPU are such kernels; those to peers, if torch makes them by cudaMemcpyAsync,
run on copy engines.

Left out: contention for memory and caches, clocks, uneven ranks, and everything that only a GPU can tell.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.helpers.schedule.multiprocessors import Multiprocessors, footprint
from tests.helpers.schedule.operations import Enqueued, Flag, Kind, Operation, Step
from tests.helpers.schedule.rates import Rates

_HELD = {Kind.MATMUL, Kind.LAUNCH, Kind.COLLECTIVE}  # kernels whose programs hold their SMs until they end


@dataclass(eq=False)
class Run:
    """An operation in time, in seconds; ``ready`` is when only room was missing, ``waited`` the time in waits."""

    operation: Operation
    ready: float = math.inf
    start: float = math.inf
    end: float = math.inf
    waited: float = 0
    step: int = 0
    left: float = 0  # what is left of the step, from 1 to 0
    waiting_since: float | None = None
    placed: list[int] = field(default_factory=list)

    @property
    def current(self) -> Step:
        return self.operation.steps[self.step]


@dataclass
class TimeLine:
    runs: dict[tuple[int, int], Run]  # by rank and number

    @property
    def total(self) -> float:
        return max(run.end for run in self.runs.values())

    def stalls(self, rank: int) -> dict[str, float]:
        """Seconds by cause, over all streams: kernels without room, and kernels that wait for peers."""
        found: dict[str, float] = defaultdict(float)
        for run in self._of(rank):
            name = run.operation.name.partition("(")[0]
            if run.start - run.ready > 1e-6:
                found[f"{name} without room"] += run.start - run.ready
            if run.waited:
                found[f"{name} waits"] += run.waited
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def _of(self, rank: int) -> Iterator[Run]:
        return (run for (owner, _), run in self.runs.items() if owner == rank and run.operation.stream >= 0)


class Simulator:
    def __init__(self, ranks: Sequence[Enqueued], rates: Rates) -> None:
        self.rates, self.operations = rates, {each.rank: each.operations for each in ranks}
        self.now = 0.0
        self.runs = {(op.rank, op.number): Run(op) for each in ranks for op in each.operations}
        self.gpus = {each.rank: Multiprocessors() for each in ranks}
        self.flags: dict[Flag, float] = {}  # when they are there
        self.active: list[Run] = []
        self.enqueued: dict[tuple[int, int], float] = {}
        self.host = {each.rank: (0, 0.0) for each in ranks}  # the next operation, and when the host is free
        self.queues: dict[tuple[int, int], list[Run]] = defaultdict(list)
        for each in ranks:
            for operation in each.operations:
                if operation.kind is not Kind.FREE:
                    self.queues[each.rank, operation.stream].append(self.runs[each.rank, operation.number])
        self.heads = dict.fromkeys(self.queues, 0)
        priorities = {each.rank: each.priorities for each in ranks}
        self.served = sorted(self.queues, key=lambda key: (priorities[key[0]].get(key[1], 0), key))

    def run(self) -> TimeLine:
        while True:
            while self._advance():
                pass
            later = [time for time in self._timers() if self.now < time < math.inf]
            speeds = [(run, self._speed(run)) for run in self.active if run.waiting_since is None]
            later += [self.now + run.left / speed for run, speed in speeds if speed > 0]
            if not later:
                break
            then = min(later)
            for run, speed in speeds:
                run.left -= (then - self.now) * speed
            self.now = then
        stuck = [str(queue[self.heads[key]].operation) for key, queue in self.queues.items() if self._head(key)]
        assert not stuck, f"these never end: {', '.join(stuck)}"
        for run in self.runs.values():
            if run.operation.kind is Kind.FREE:
                run.ready = run.start = run.end = 0.0
        return TimeLine(self.runs)

    # ---- what happens now

    def _advance(self) -> bool:
        """Do what can be done without time passing; whether there was something."""
        self._enqueue()
        moved = False
        for run in list(self.active):
            moved |= self._continue(run)
        for key in self.served:
            head = self._head(key)
            if head is not None and head not in self.active and self._ready_at(head) <= self.now:
                head.ready = min(head.ready, self.now)
                moved |= self._start(head)
        for run in self.active:
            self._place(run)
        return moved

    def _enqueue(self) -> None:
        for rank, (number, free_at) in self.host.items():
            operations = self.operations[rank]
            while number < len(operations):
                if operations[number].kind not in (Kind.ALLOC, Kind.FREE):
                    free_at += self.rates.host
                self.enqueued[rank, number] = free_at
                number += 1
            self.host[rank] = number, free_at

    def _head(self, key: tuple[int, int]) -> Run | None:
        queue, head = self.queues[key], self.heads[key]
        return queue[head] if head < len(queue) else None

    def _ready_at(self, run: Run) -> float:
        operation, rates = run.operation, self.rates
        at = self.enqueued.get((operation.rank, operation.number), math.inf)
        key = operation.rank, operation.stream
        latency = 0.0 if operation.kind is Kind.ALLOC else rates.same_stream
        if self.heads[key]:
            at = max(at, self.queues[key][self.heads[key] - 1].end + latency)
        for number in operation.after:
            before = self.runs[operation.rank, number]
            at = max(at, before.end + (latency if before.operation.stream == operation.stream else rates.event))
        return at

    def _start(self, run: Run) -> bool:
        operation = run.operation
        gpu = self.gpus[operation.rank]
        if operation.kind in _HELD:
            self._place(run)
            if not run.placed:
                return False
        elif self._is_elementwise(operation) and not gpu.has_room(footprint(operation, self.rates.cublas)):
            return False
        run.start = self.now
        self.active.append(run)
        self._enter(run)
        return True

    def _is_elementwise(self, operation: Operation) -> bool:
        to_peer = any(step.work.sent for step in operation.steps)
        return operation.kind is Kind.ELEMENTS or (operation.kind is Kind.MEMCPY and not to_peer)

    def _place(self, run: Run) -> None:
        operation = run.operation
        if operation.kind in _HELD and len(run.placed) < self._num_programs(operation):
            missing = self._num_programs(operation) - len(run.placed)
            run.placed += self.gpus[operation.rank].place(footprint(operation, self.rates.cublas), missing)

    def _num_programs(self, operation: Operation) -> int:
        return self.rates.constants.num_sms if operation.kind is Kind.MATMUL else operation.num_programs

    def _enter(self, run: Run) -> None:
        run.left, run.waiting_since = 1.0, self.now if run.current.waits else None

    def _continue(self, run: Run) -> bool:
        if run.waiting_since is not None:
            if any(self.flags.get(flag, math.inf) > self.now for flag in run.current.waits):
                return False
            run.waited += self.now - run.waiting_since
            run.waiting_since = None
            return True
        if run.left > 1e-9 and self._speed(run) < math.inf:
            return False
        for flag in run.current.signals:
            self.flags[flag] = self.now + self.rates.flag
        run.step += 1
        if run.step < len(run.operation.steps):
            self._enter(run)
        else:
            self._end(run)
        return True

    def _end(self, run: Run) -> None:
        run.end = self.now
        self.active.remove(run)
        if run.placed:
            self.gpus[run.operation.rank].release(footprint(run.operation, self.rates.cublas), run.placed)
        self.heads[run.operation.rank, run.operation.stream] += 1

    # ---- what happens later

    def _timers(self) -> Iterator[float]:
        for key in self.served:
            run = self._head(key)
            if run is not None and run not in self.active:
                yield self._ready_at(run)
        for run in self.active:
            if run.waiting_since is not None:
                yield max(self.flags.get(flag, math.inf) for flag in run.current.waits)

    def _speed(self, run: Run) -> float:
        """The fraction of the current step that is done in a second."""
        seconds = self._seconds(run)
        for dst_rank, num_bytes in run.current.work.sent.items():
            seconds = max(seconds, num_bytes / self._link(run, dst_rank))
        return math.inf if seconds == 0 else 1 / seconds

    def _seconds(self, run: Run) -> float:
        """How long the step takes if links are no limit."""
        operation, work, rates = run.operation, run.current.work, self.rates
        if operation.kind is Kind.MATMUL:
            assert work.matmul is not None
            return rates.matmul(work.matmul, len(run.placed) / self._num_programs(operation))
        if operation.kind is Kind.LAUNCH:
            if operation.num_programs == 1 and not work.flops and not work.copied:
                return rates.small_kernel / len(operation.steps)
            compute = rates.fused(work.flops, len(run.placed)) if work.flops else 0.0
            return max(compute, rates.copied(work.copied, len(run.placed)))
        if operation.kind in (Kind.ALLOC, Kind.STREAM_WRITE):
            return 0.0
        latency = rates.constants.link_latency if work.sent else rates.constants.copy_overhead
        return latency + work.copied / rates.memory

    def _link(self, run: Run, dst_rank: int) -> float:
        """Bytes per second to a peer."""
        flows = [
            (each.operation.rank, dst)
            for each in self.active
            if each.waiting_since is None and each.left > 1e-9
            for dst in each.current.work.sent
        ]
        source = run.operation.rank
        sharing = max(sum(src == source for src, _ in flows), sum(dst == dst_rank for _, dst in flows), 1)
        rate = self.rates.link / sharing
        by_stores = run.operation.kind is Kind.ELEMENTS or (
            run.operation.kind is Kind.LAUNCH and not run.current.work.flops
        )
        num_sms = len(run.placed) or self.rates.constants.num_sms
        return min(rate, self.rates.stored * num_sms) if by_stores else rate


def simulate(ranks: Sequence[Enqueued], rates: Rates) -> TimeLine:
    """The time line of all ranks' operations, from the first call of the host on."""
    return Simulator(ranks, rates).run()
