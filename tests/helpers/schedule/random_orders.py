"""Runs what `chunked` and `fused` enqueue on GPUs, without one: all ranks enqueue all, then it runs in a random order.

Tensors lie on the CPU, and kernels run in Triton's interpreter, one at a time. Streams, events and flags alone decide
what may come next: the head of any stream, if all that its stream waited for is done. A kernel that waits for peers
begins when it is a head, and takes its epoch then; it goes on when their flags are there. Each operation is run whole,
so two that overlap on a GPU come in either order here, but not mixed. What an operation uses is kept until the end:
memory that is used again too early is found by happens_before.py.
"""

from __future__ import annotations

import ctypes
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm.memory import launch_order, stream_writes
from fusedcomm.memory.segment import FINGERPRINT_BITS
from fusedcomm.memory.workspace import Workspace
from tests.helpers.schedule import torch_ops
from tests.helpers.schedule.streams import DEVICE, Stream, Streams

WAIT_FOR_ALL = ("gather_matmul_kernel", "unpack_kernel", "reduce_kernel", "finish_kernel")
MOST_STEPS_OF_ONE_MOOD = 12


class NoProgressError(Exception):
    """Every stream waits for something that nobody will do."""


@dataclass
class Queued:
    number: int
    stream: int
    name: str
    after: list[int]
    run: Callable[[], object]
    sources: Sequence[int] = ()  # ranks whose flags it waits for, in ``workspace``
    workspace: Workspace | None = None
    epoch: int | None = None  # from when it has begun to wait

    def goes_on(self) -> bool:
        """Whether it finds what it waits for: the flags, or that a rank has given up."""
        assert self.workspace is not None and self.epoch is not None
        start = self.workspace.layout.flag(self.epoch, 0)
        flags = self.workspace.buffers[self.workspace.rank][start:].view(torch.int64)
        there = all(int(flags[src_rank]) >> FINGERPRINT_BITS >= self.epoch for src_rank in self.sources)
        return there or bool(self.workspace.breakers(self.epoch))

    def next_epoch(self) -> int:
        assert self.workspace is not None
        return int(self.workspace._epoch_word()) + 1


class Gpus(TorchDispatchMode):
    """The GPUs of some virtual ranks. ``writes_words``: whether their streams write signals, or kernels do."""

    def __init__(self, workspaces: Sequence[Workspace], writes_words: bool = True) -> None:
        super().__init__()
        self.workspaces = {workspace.segments.data_ptr(): workspace for workspace in workspaces}
        self.writes_words = writes_words
        self.streams = Streams()
        self.queued: list[Queued] = []
        self.allocated: list[tuple[int, ...]] = []  # shapes
        for workspace in workspaces:
            workspace.device, workspace.shares_gpu = DEVICE, False  # each has a GPU of its own

    @contextmanager
    def enqueue_all(self) -> Iterator[None]:
        """Inside, what is called is enqueued and not run."""
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(self.streams.in_place_of_cuda())
            for launcher in torch_ops.launchers():
                enter(mock.patch.object(launcher, "run", self._launcher(launcher.run)))
            enter(mock.patch.object(stream_writes, "available", lambda device: self.writes_words))
            enter(mock.patch.object(stream_writes, "write", self._write))
            enter(mock.patch.dict(launch_order._orders, clear=True))
            enter(mock.patch.object(launch_order, "native", None))  # which takes torch's own streams alone
            enter(mock.patch.object(torch, "empty", _on_cpu(torch.empty)))
            enter(self)
            yield

    def run_all(self, seed: int) -> None:
        """Run what is enqueued. For some steps at a time, some streams are in more of a hurry than others."""
        with _language_patched_once():
            self._run_all(random.Random(seed))

    def _run_all(self, moods: random.Random) -> None:
        done = set[int]()
        queues = {stream.number: deque[Queued]() for stream in self.streams.made}
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, torch_ops.name_of(func)
        if func.namespace == "profiler" or func.is_view or name in torch_ops.SYNCHRONIZES:
            return func(*args, **kwargs)
        written = torch_ops.written_by(func, args, kwargs)
        if written:
            self._enqueue(name, lambda: func(*args, **kwargs))
            return written[0]
        made = func(*args, **kwargs)  # for its shape: the arguments hold no values yet
        if made.dtype == torch.uint8:  # of temporaries
            made.fill_(0xFF)
        elif made.is_floating_point():
            made.fill_(float("nan"))
        else:  # the host's error record
            return made
        if torch_ops.makes_memory_alone(func):
            self.allocated.append(tuple(made.shape))
        else:
            self._enqueue(name, lambda: made.copy_(func(*args, **kwargs)))
        return made

    def _launcher(self, run: Callable[..., Any]) -> Callable[..., None]:
        def launch(function: Any, *args: Any, **options: Any) -> None:
            signature = inspect.signature(function.fn)
            bound = signature.bind(*args, **{k: v for k, v in options.items() if k in signature.parameters}).arguments
            workspace, name = self.workspaces[bound["segments_ptr"].data_ptr()], function.fn.__name__
            sources: Sequence[int] = range(workspace.group_size) if name in WAIT_FOR_ALL else ()
            if name == "wait_source_kernel":
                sources = [bound["src_rank"]]
            self._enqueue(name, lambda: run(function, *args, **options), sources=sources, workspace=workspace)

        return launch

    def _write(self, stream: Stream, address: int, value: int) -> None:
        self._enqueue("write", lambda: _store(address, value), stream)

    def _enqueue(self, name: str, run: Callable[[], object], stream: Stream | None = None, **waits: Any) -> None:
        stream = stream or self.streams.current
        number = len(self.queued)
        self.queued.append(Queued(number, stream.number, name, stream.pending, run, **waits))
        stream.pending, stream.last = [], number


def _on_cpu(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == DEVICE:
            options["device"] = "cpu"
        return empty(*args, **options)

    return made


def _store(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


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
