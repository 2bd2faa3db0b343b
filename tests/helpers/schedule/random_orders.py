"""Runs schedules as on GPUs, without one: all ranks enqueue all their steps, which then run in a random order.

Tensors lie on the CPU, and kernels run in Triton's interpreter, one at a time. Streams, events and flags alone decide
what may come next: the head of any stream, if all that its stream waited for is done. A kernel that waits for peers
begins when it is a head, and takes its epoch then; it goes on when their flags are there. Each step is run whole, so
two that overlap on a GPU come in either order here, but not mixed. Memory is kept until the end: what uses it again too
early is found by happens_before.py.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusedcomm.memory.segment import FINGERPRINT_BITS
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan.schedule import Await, EndRound, Launch, Record, Schedule, Signal, Stream
from fusedcomm.run.python_executor import Execution
from tests.helpers.schedule import walk

WAIT_FOR_ALL = {"gather_matmul_kernel", "unpack_kernel", "reduce_kernel", "reduce_norm_kernel", "finish_kernel"}
WAIT_FOR_ALL |= {"unpack_norm_kernel", "take_rows_kernel", "add_rows_kernel"}
MOST_STEPS_OF_ONE_MOOD = 12
OP, FINGERPRINT = "a call", 0x5A17C3


class NoProgressError(Exception):
    """Every stream waits for something that nobody will do."""


class LeftError(Exception):
    """A rank has left its call."""


@dataclass
class Queued:
    number: int
    workspace: Workspace
    stream: int
    name: str
    after: list[int]
    run: Callable[[], object]
    sources: Sequence[int] = ()  # ranks whose flags it waits for
    work: Any = None  # of the step that it is
    epoch: int | None = None  # from when it has begun to wait

    def goes_on(self) -> bool:
        """Whether it finds what it waits for: the flags, or that a rank has given up."""
        assert self.epoch is not None
        start = self.workspace.layout.flag(self.epoch, 0)
        flags = self.workspace.buffers[self.workspace.rank][start:].view(torch.int64)
        there = all(int(flags[src_rank]) >> FINGERPRINT_BITS >= self.epoch for src_rank in self.sources)
        return there or bool(self.workspace.breakers(self.epoch))

    def next_epoch(self) -> int:
        return int(self.workspace._epoch_word()) + 1


class _Late(Execution):
    """``epoch``: the round of the step that runs, while the host is far ahead."""

    epoch = 0  # type: ignore[assignment]


class Gpus:
    def __init__(self) -> None:
        self.queued: list[Queued] = []
        self._streams: dict[tuple[int, Stream], walk.Stream] = {}

    def call(
        self, workspace: Workspace, schedule: Schedule, inputs: Sequence[Tensor | None], leaves_in: int = 0
    ) -> list[Tensor]:
        """Enqueue a call; its results. In the round ``leaves_in`` it raises LeftError where it is to signal."""
        execution = _Late(schedule, workspace, OP, FINGERPRINT, inputs)
        for t in (*execution.results, execution.temporaries):
            t.view(-1).view(torch.uint8).fill_(0xFF)  # NaN
        events: dict[int, list[int]] = {}
        workspace.enter(OP, FINGERPRINT)
        try:
            for step in schedule.steps:
                stream = self._stream(workspace, step.stream)
                match step.work:
                    case Record(event):
                        events[event] = stream.tail
                    case Await(event):
                        stream.wait(events[event])
                    case EndRound():
                        workspace.launched(captured=False)
                    case Signal() if workspace.epoch + 1 == leaves_in:
                        raise LeftError
                    case _:
                        self._enqueue_step(execution, step.work, step.stream)
        except LeftError as error:
            for other in Stream:
                self._stream(workspace, Stream.MAIN).wait(self._stream(workspace, other).tail)
            tell, enqueue = workspace._give_up, self.enqueue
            with mock.patch.object(
                workspace, "_give_up", lambda *args: enqueue(workspace, "tell", lambda: tell(*args))
            ):
                workspace.abandon(OP, error)
        return [execution.returned(place) for place in schedule.returned]

    def _enqueue_step(self, execution: _Late, work: Any, stream: Stream) -> None:
        epoch, name = execution.workspace.epoch + 1, type(work).__name__.lower()
        sources: Sequence[int] = ()
        if isinstance(work, Launch):
            name = work.kernel.split(".")[1]
            sources = range(execution.workspace.group_size) if name in WAIT_FOR_ALL else ()
            sources = [work.arguments[1]] if name == "wait_source_kernel" else sources

        def run() -> None:
            execution.epoch = epoch
            execution.step(work, stream)

        self.enqueue(execution.workspace, name, run, stream, sources, work)

    def enqueue(
        self,
        workspace: Workspace,
        name: str,
        run: Callable[[], object],
        stream: Stream = Stream.MAIN,
        sources: Sequence[int] = (),
        work: Any = None,
    ) -> None:
        on = self._stream(workspace, stream)
        number = len(self.queued)
        self.queued.append(Queued(number, workspace, on.number, name, on.pending, run, sources, work))
        on.pending, on.last = [], [number]

    def _stream(self, workspace: Workspace, stream: Stream) -> walk.Stream:
        return self._streams.setdefault((workspace.rank, stream), walk.Stream(len(self._streams)))

    def run_all(self, seed: int) -> None:
        """Run what is enqueued. For some steps at a time, some streams are in more of a hurry than others."""
        with _language_patched_once():
            self._run_all(random.Random(seed))

    def _run_all(self, moods: random.Random) -> None:
        done = set[int]()
        queues = {stream.number: deque[Queued]() for stream in self._streams.values()}
        for each in self.queued:
            queues[each.stream].append(each)
        urgent: list[int] = []
        steps = 0
        while heads := [queue[0] for queue in queues.values() if queue]:
            ready = [each for each in heads if done.issuperset(each.after) and (each.epoch is None or each.goes_on())]
            if not ready:
                raise NoProgressError(", ".join(f"{each.name} on stream {each.stream}" for each in heads))
            if steps == 0:
                urgent, steps = moods.sample(list(queues), len(queues)), moods.randint(1, MOST_STEPS_OF_ONE_MOOD)
            steps -= 1
            chosen = min(ready, key=lambda each: urgent.index(each.stream))
            if chosen.sources and chosen.epoch is None:
                chosen.epoch = chosen.next_epoch()
                continue
            if chosen.sources:
                assert chosen.epoch == chosen.next_epoch(), f"the epoch must stand still while {chosen.name} waits"
            chosen.run()
            done.add(queues[chosen.stream].popleft().number)


@contextmanager
def _language_patched_once() -> Iterator[None]:
    """The interpreter does this again for each function that a kernel calls, which takes most of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        with mock.patch.object(interpreter, "_patch_lang", mock.Mock()):
            yield
    finally:
        scope.restore()
