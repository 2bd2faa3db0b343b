"""Schedules as operations on a rank's streams, one call behind the other. Nothing runs, and there is no memory.

An operation is a step of a `Schedule`: its operands say which bytes it touches, and `kernel_effects` what a Triton
kernel does with them. A call has the rounds that it gets if all ranks run all in the host's order: the happens-before
checker finds where it might get others.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusedcomm.plan import schedule as steps
from fusedcomm.plan.builder import Memory
from fusedcomm.plan.schedule import Stream as Lane
from tests.helpers.schedule.kernel_effects import EFFECTS, EPOCH, WORD, Group, KernelCall
from tests.helpers.schedule.operations import Enqueued, Flag, Kind, Operation, Step, Work
from tests.helpers.schedule.region import Region, region

_ALL_BYTES = 1 << 60  # of a memory, from its first byte on


@dataclass
class Stream:
    """``last``: the number of its last operation. ``pending``: those that its next operation comes after."""

    number: int
    last: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)

    @property
    def tail(self) -> list[int]:
        """All that is complete when everything so far is."""
        return [*self.pending, *self.last]

    def wait(self, numbers: Sequence[int]) -> None:
        self.pending = sorted({*self.pending, *numbers})


class Walk:
    """One rank, by group: ``memories`` has the facts of its segments."""

    def __init__(self, rank: int, groups: Sequence[Group], memories: Sequence[Memory]) -> None:
        self.rank, self.enqueued = rank, Enqueued(rank)
        self.groups = {group.name: group for group in groups}
        self.memories = dict(zip(self.groups, memories, strict=True))
        self.epochs = dict.fromkeys(self.groups, 0)  # rounds that have ended
        self.num_calls = self.num_collectives = 0
        self.last_call: list[int] = []  # its end, which the next call comes after: fusedcomm.memory.launch_order
        self._streams: dict[Hashable, Stream] = {}

    def stream(self, name: Hashable, priority: int = 0) -> Stream:
        if name not in self._streams:
            self._streams[name] = Stream(len(self._streams))
            self.enqueued.priorities[len(self._streams) - 1] = priority
        return self._streams[name]

    def call(self, schedule: steps.Schedule, group: Group, caller: Hashable = 0) -> None:
        """A call on the caller's stream. Its inputs are gone, and its results too, when it has returned."""
        _Call(self, schedule, group, caller).enqueue()

    def multiply(self, *sizes: int, caller: Hashable = 0) -> None:
        """A matmul [b, m, k] @ [b, k, n] between calls."""
        self.enqueue(Kind.MATMUL, "mm", [Step(work=_matmul(*sizes))], self.stream(caller))

    def begin_collective(
        self, group: Group, num_bytes: int, moves: Step | None = None, caller: Hashable = 0, name: str = "all_reduce"
    ) -> list[int]:
        """NCCL's kernel on its own stream, which begins when all ranks have; returns its end. ``moves``: accesses."""
        stream, own = self.stream(("NCCL", group.name), priority=-1), group.ranks.index(self.rank)
        stream.wait(self.stream(caller).tail)
        self.num_collectives += 1
        flags, epoch = f"NCCL of {group.name}", self.num_collectives
        peers = [peer for peer in range(len(group.ranks)) if peer != own]
        there, moves = Step(signals=[Flag(flags, peer, own, epoch) for peer in peers]), moves or Step()
        moves.waits = [Flag(flags, own, peer, epoch) for peer in peers]
        moves.work = Work(sent={group.ranks[peer]: num_bytes / len(group.ranks) for peer in peers})
        self.enqueue(Kind.COLLECTIVE, name, [there, moves], stream, num_programs=24)
        return stream.tail

    def enqueue(self, kind: Kind, name: str, steps: list[Step], stream: Stream, num_programs: int = 1) -> None:
        number = len(self.enqueued.operations)
        operation = Operation(number, self.rank, stream.number, kind, name, stream.pending, steps, num_programs)
        stream.pending, stream.last = [], [number]
        self.enqueued.operations.append(operation)

    def free(self, memory: str, stream: Stream) -> None:
        """The allocator gives the memory to others, once its stream has come here."""
        step, number = Step(writes=[Region(memory, 0, _ALL_BYTES)]), len(self.enqueued.operations)
        self.enqueued.operations.append(Operation(number, self.rank, -1, Kind.FREE, "free", stream.tail, [step]))


class _Call:
    def __init__(self, walk: Walk, schedule: steps.Schedule, group: Group, caller: Hashable) -> None:
        self.walk, self.schedule, self.group, self.memory = walk, schedule, group, walk.memories[group.name]
        self.number, walk.num_calls = walk.num_calls, walk.num_calls + 1
        self.events: dict[int, list[int]] = {}
        self.collectives: dict[int, list[int]] = {}  # by number: their ends
        self.ends = 0  # kernels that end this round
        self.caller, self.streams = caller, {Lane.MAIN: walk.stream(caller)}
        for lane in sorted({step.stream for step in schedule.steps} - {Lane.MAIN}):
            self.streams[lane] = walk.stream((group.name, lane), priority=-1)

    @property
    def epoch(self) -> int:
        return self.walk.epochs[self.group.name] + 1

    def enqueue(self) -> None:
        walk, main = self.walk, self.streams[Lane.MAIN]
        if self.schedule.num_rounds:  # of a workspace
            main.wait(walk.last_call)
        made = [self._name(steps.Base.RESULT, i) for i in range(len(self.schedule.results))]
        made += [self._name(steps.Base.TEMPORARY, 0)] * bool(self.schedule.temporary_bytes)
        for each in made:
            walk.enqueue(Kind.ALLOC, "alloc", [Step(writes=[Region(each, 0, _ALL_BYTES)])], main)
        for step in self.schedule.steps:
            self._step(step.work, self.streams[step.stream])
        if self.schedule.num_rounds:
            walk.last_call = main.tail
        places = [place for step in self.schedule.steps for place in steps.places_of(step.work)]
        inputs = {self._name(steps.Base.INPUT, place.number) for place in places if place.base == steps.Base.INPUT}
        for each in (*made, *sorted(inputs)):
            walk.free(each, main)

    def _step(self, work: Any, stream: Stream) -> None:
        match work:
            case steps.Record(event):
                self.events[event] = stream.tail
            case steps.Await(event):
                stream.wait(self.events[event])
            case steps.Launch():
                call = KernelCall(work, self.group, self.epoch, self.region)
                self.walk.enqueue(Kind.LAUNCH, call.name, list(EFFECTS[call.name](call)), stream, work.num_programs)
                self.ends += call.ends_round
            case steps.Collective(number, name, to, source):
                moves = self._touching([to], [source])
                num_bytes = sum(each.num_bytes for each in moves.reads)
                self.collectives[number] = self.walk.begin_collective(self.group, num_bytes, moves, self.caller, name)
            case steps.Finish(number):
                stream.wait(self.collectives[number])
            case steps.EndRound(by_kernel):
                assert self.ends == by_kernel, "a round has one end, on the device or on the host"
                if not by_kernel:
                    word = Region(self.group.segment(self.memory.rank), EPOCH, WORD)
                    self.walk.enqueue(Kind.ELEMENTS, "end", [Step(writes=[word])], stream)
                self.walk.epochs[self.group.name] += 1
                self.ends = 0
            case _:
                for kind, step in self._on_the_host(work):
                    name = "copy_" if isinstance(work, steps.Copy) else type(work).__name__.lower()
                    self.walk.enqueue(kind, name, [step], stream)

    def _on_the_host(self, work: Any) -> Iterator[tuple[Kind, Step]]:
        """The operations that are not kernels of this package."""
        group, own = self.group.name, self.memory.rank
        match work:
            case steps.Multiply(out, x, w, bias, adds):
                step = self._touching([out], [x, w, bias, out if adds else None])
                step.work = _matmul(*(1, *out.sizes[:-1])[-2:], x.sizes[-1], out.sizes[-1])
                yield Kind.MATMUL, step
            case steps.Copy(to, source):
                step = self._touching([to], [source])
                owner = self.group.ranks[to.number] if to.base == steps.Base.SLOT else self.walk.rank
                num_bytes = sum(each.num_bytes for each in step.writes)
                step.work = Work(copied=num_bytes) if owner == self.walk.rank else Work(sent={owner: num_bytes})
                step.reads += [self.group.begun(own)] * bool(step.work.sent)
                yield Kind.MEMCPY if is_memcpy(to, source) else Kind.ELEMENTS, step
            case steps.Update(to, method):
                yield Kind.ELEMENTS, self._touching([to], [to] if method == "div_" else [])
            case steps.Reduce(out, parts, bias):
                yield Kind.ELEMENTS, self._touching([out], [*parts, bias])
            case steps.Norm(out, x, weight):
                yield Kind.ELEMENTS, self._touching([out], [x, weight])
            case steps.Signal(dst_rank):
                word = Region(self.group.segment(dst_rank), self._flag(own), WORD)
                yield Kind.STREAM_WRITE, Step(writes=[word], signals=[Flag(group, dst_rank, own, self.epoch)])
            case steps.Wait(src_rank):
                word = Region(self.group.segment(own), self._flag(src_rank), WORD)
                yield Kind.ELEMENTS, Step(reads=[word], waits=[Flag(group, own, src_rank, self.epoch)])

    def _flag(self, src_rank: int) -> int:
        layout = self.memory.layout
        return layout.flags + WORD * (self.epoch % layout.num_slots * layout.group_size + src_rank)

    def _touching(self, written: Sequence[steps.Place], read: Sequence[steps.Place | None]) -> Step:
        reads = [self.region(place) for place in read if place is not None]
        writes = [self.region(place) for place in written]
        return Step(reads=[each for each in reads if each], writes=[each for each in writes if each])

    def region(self, place: steps.Place) -> Region | None:
        start, layout = place.offset, self.memory.layout
        match place.base:
            case steps.Base.SLOT | steps.Base.SEGMENT:
                memory = self.group.segment(place.number)
                if place.base == steps.Base.SLOT:
                    start += layout.header_bytes + self.epoch % layout.num_slots * self.memory.slot_bytes
            case steps.Base.TEMPORARY:
                memory, start = self._name(place.base, 0), start + self.schedule.temporaries[place.number]
            case _:
                memory = self._name(place.base, place.number)
        return region(memory, start, place.sizes, place.strides, place.dtype.itemsize)

    def _name(self, base: steps.Base, number: int) -> str:
        return f"{base.name.lower()} {number} of call {self.number} on rank {self.walk.rank}"


def _matmul(*sizes: int) -> Work:
    b, m, k, n = sizes
    return Work(matmul=(b, m, k, n), flops=2 * b * m * k * n)


def is_memcpy(to: steps.Place, source: steps.Place) -> bool:
    """Whether torch copies by cudaMemcpyAsync: both are dense, in the same order of elements and of one dtype."""
    if to.dtype != source.dtype or to.sizes != source.sizes:
        return False
    dims = [each for each in zip(to.sizes, to.strides, source.strides, strict=True) if each[0] > 1]
    expected = 1
    for size, stride, other in sorted(dims, key=lambda dim: dim[1]):
        if stride != expected or other != expected:
            return False
        expected *= size
    return True
