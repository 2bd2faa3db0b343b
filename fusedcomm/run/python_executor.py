"""The steps of a schedule one by one: the reference for the native executor, and its stand-in where there is none."""

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import profiler

from fusedcomm.memory import stream_writes
from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.memory.captures import is_capturing
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import schedule as steps
from fusedcomm.run.add_in_order import add_in_order
from fusedcomm.run.group_collectives import begin
from fusedcomm.run.rms_norm import rms_norm
from fusedcomm.run.scaled_matmul import scaled_matmul

_MOST_KEPT = 4096  # kernels of a workspace; with more, as when sizes keep changing, it begins anew


def run(
    schedule: steps.Schedule, memory: CallMemory, op: str, fingerprint: int, inputs: Sequence[Tensor | None]
) -> list[Tensor]:
    """The tensors that the call returns. A round that fails or is left half way breaks the workspace; a call by the
    group's collectives sends NaN for the rest.
    """
    try:
        execution = Execution(schedule, memory, op, fingerprint, inputs)
    except BaseException:
        memory.in_order = False  # nothing is there to send NaN from
        raise
    try:
        execution.run()
    except BaseException:
        try:
            with suppress(Exception):  # of a group that has failed
                execution.send_nan()
        finally:
            execution.join()
        raise
    return [execution.returned(place) for place in schedule.returned]


class Execution:
    """One run."""

    def __init__(
        self, schedule: steps.Schedule, memory: CallMemory, op: str, fingerprint: int, inputs: Sequence[Tensor | None]
    ) -> None:
        self.schedule, self.memory, self.inputs = schedule, memory, inputs
        self.workspace = cast(Workspace, memory)  # the steps of slots and flags are in schedules for a workspace alone
        self.op, self.fingerprint = op, fingerprint
        self.at = 0  # in the schedule
        self.results = [memory.empty(*each) for each in schedule.results]
        device = memory.device
        self.temporaries = torch.empty(schedule.temporary_bytes, dtype=torch.uint8, device=device)
        self.collectives: dict[int, Callable[[], object]] = {}  # under way: the wait for each
        self.events: dict[int, torch.cuda.Event] = {}
        self.streams: dict[steps.Stream, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self.streams[steps.Stream.MAIN] = torch.cuda.current_stream(device)
            for stream in {step.stream for step in schedule.steps} - {steps.Stream.MAIN}:
                self.streams[stream] = self.workspace.streams[stream - 1]

    @property
    def epoch(self) -> int:
        return self.workspace.epoch + 1

    def run(self) -> None:
        with ExitStack() as lane:
            name = ""
            for at, step in enumerate(self.schedule.steps):
                self.at = at
                if step.lane != name:
                    lane.close()
                    name = step.lane
                    lane.enter_context(_range(name))
                with self._on(step.stream):
                    self.step(step.work, step.stream)

    def join(self) -> None:
        """End a call that is left half way: memory of the call may be used again, on the caller's stream."""
        if self.streams and not is_capturing(self.memory.device):
            for stream in self.streams.values():
                self.streams[steps.Stream.MAIN].wait_stream(stream)

    def send_nan(self) -> None:
        """Run the collectives that are left, or they would meet those of this rank's next call: of equal sizes,
        without an error.
        """
        for step in () if is_capturing(self.memory.device) else self.schedule.steps[self.at :]:
            if isinstance(step.work, steps.Collective) and step.work.source.base != steps.Base.INPUT:
                self.tensor(step.work.source).view(torch.uint8).fill_(0xFF)  # NaN of every floating dtype
            if isinstance(step.work, steps.Collective | steps.Finish):
                self.step(step.work, step.stream)

    def step(self, work: Any, stream: steps.Stream) -> None:
        match work:
            case steps.Multiply():
                x, w, out = self.tensor(work.x), self.tensor(work.w), self.tensor(work.out)
                if work.scales:
                    scale_x, scale_w = map(self.tensor, work.scales)
                    bias = self._optional(work.bias)
                    scaled_matmul(out, x, w, scale_x, scale_w, bias, adds=work.adds, fast=work.fast)
                else:
                    multiply(x, w, self._optional(work.bias), out, adds=work.adds)
            case steps.Copy():
                self.tensor(work.to).copy_(self.tensor(work.source))
            case steps.Update():
                getattr(self.tensor(work.to), work.method)(work.value)
            case steps.Reduce():
                parts = [self.tensor(each) for each in work.parts]
                add_in_order(self.tensor(work.out), parts, self._optional(work.bias), work.scale)
            case steps.Norm():
                rms_norm(self.tensor(work.out), self.tensor(work.x), self._optional(work.weight), work.eps)
            case steps.Collective():
                group_name = self.memory.group_name
                to, source = self.tensor(work.to), self.tensor(work.source)
                self.collectives[work.number] = begin(work.kind, group_name, to, source)
            case steps.Finish():
                self.collectives[work.number]()
                del self.collectives[work.number]
            case steps.Signal():
                self._signal(work.dst_rank, stream)
            case steps.Wait():
                self.workspace.wait(work.src_rank, self.epoch, self.op, self.fingerprint)
            case steps.Launch():
                launch(work, self.workspace, self.fingerprint, self.tensor)
            case steps.Record():
                self.events[work.event] = self.streams[stream].record_event()
            case steps.Await():
                self.streams[stream].wait_event(self.events[work.event])
            case steps.EndRound():
                self._end_round(work.by_kernel)

    def returned(self, place: steps.Place) -> Tensor:
        """The tensor itself, not a view, where it is returned whole."""
        base = self._base(place)
        is_whole = (place.offset, place.sizes, place.strides) == (0, tuple(base.shape), base.stride())
        return base if is_whole and base.dtype == place.dtype else self.tensor(place)

    def tensor(self, place: steps.Place) -> Tensor:
        """A Place's tensor in this run and round."""
        base, start = self._base(place), place.offset
        if place.base == steps.Base.TEMPORARY:
            start += self.schedule.temporaries[place.number]
        elif place.base == steps.Base.SLOT:
            start += self.workspace.slot_start(self.epoch)
        start += int(base.storage_offset()) * base.itemsize
        typed = base if base.dtype == place.dtype else base.view(place.dtype)
        return typed.as_strided(place.sizes, place.strides, start // place.dtype.itemsize)

    def _base(self, place: steps.Place) -> Tensor:
        match place.base:
            case steps.Base.INPUT:
                found = self.inputs[place.number]
                assert found is not None
                return found
            case steps.Base.RESULT:
                return self.results[place.number]
            case steps.Base.TEMPORARY:
                return self.temporaries
            case steps.Base.SLOT | steps.Base.SEGMENT:
                return self.workspace.buffers[place.number]

    def _optional(self, place: steps.Place | None) -> Tensor | None:
        return None if place is None else self.tensor(place)

    def _signal(self, dst_rank: int, stream: steps.Stream) -> None:
        if self.streams:
            stream_writes.write(self.streams[stream], *self.workspace.flag(dst_rank, self.epoch, self.fingerprint))
        else:
            self.workspace.signal(dst_rank, self.epoch, self.fingerprint)

    def _end_round(self, by_kernel: bool) -> None:
        if not by_kernel:
            self.workspace.end_round(self.op, self.fingerprint)
            return
        self.workspace.launched(captured=is_capturing(self.workspace.device))
        if not self.streams:  # kernels in Triton's interpreter
            self.workspace.check(self.op)

    def _on(self, stream: steps.Stream) -> AbstractContextManager[Any]:
        is_main = not self.streams or stream == steps.Stream.MAIN
        return nullcontext() if is_main else torch.cuda.stream(self.streams[stream])


def _range(name: str) -> AbstractContextManager[Any]:
    return profiler.record_function(name) if name and profiler._is_profiler_enabled else nullcontext()


def multiply(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, *, adds: bool) -> None:
    """``out = x @ w + bias``, or ``out += x @ w``: 2-D, or 3-D with batches; one rounding."""
    batched = out.dim() == 3
    added = out if adds else bias
    if added is not None:
        (torch.baddbmm if batched else torch.addmm)(added, x, w, out=out)
    else:
        (torch.bmm if batched else torch.mm)(x, w, out=out)


def launch(work: steps.Launch, workspace: Workspace, fingerprint: int, tensor: Callable[[steps.Place], Tensor]) -> None:
    """Launch a kernel on the current stream.

    Triton finds the compiled kernel by a look at every argument, the longest part of a launch. A step's arguments
    differ between runs in addresses alone, of one alignment: so it keeps its kernel.
    """
    arguments = [_resolved(each, workspace, fingerprint, tensor) for each in work.arguments]
    kept = workspace.kernels.get(id(work))
    if kept is not None:
        kept[1][work.num_programs, 1, 1](*arguments)
        return
    compiled = kernel(work.kernel)[(work.num_programs,)](*arguments, **dict(work.options))
    if hasattr(type(compiled), "__getitem__"):  # neither futures of Triton nor None have it
        if len(workspace.kernels) >= _MOST_KEPT:
            workspace.kernels.clear()
        workspace.kernels[id(work)] = work, compiled  # which keeps its id


@functools.cache
def kernel(name: str) -> Any:
    """A `Launch.kernel` as a function of Triton."""
    module, function = name.split(".")
    return getattr(importlib.import_module(f"fusedcomm.kernels.triton.{module}"), function)


def _resolved(argument: Any, workspace: Workspace, fingerprint: int, tensor: Callable[[steps.Place], Tensor]) -> Any:
    match argument:
        case steps.Place():
            return tensor(argument)
        case steps.Described(place, shape, strides, block):
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(tensor(place), list(shape), list(strides), list(block))
        case steps.Table():
            return workspace.segments
        case steps.Fingerprint():
            return fingerprint
        case _:
            return argument
