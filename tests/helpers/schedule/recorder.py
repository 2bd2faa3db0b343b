"""Runs one rank's host code without a GPU, and records what it enqueues.

Tensors on "cuda" are meta tensors that say they are on cuda:0; streams and events are stand-ins; ops of torch, launches
of Triton and stream writes become operations, with the regions that they read and write. The ops of the package run the
code that they run on a GPU, below the choice of an algorithm, which is the recorder's.

A word that a kernel loads, such as the epoch, has the value that it has if the device runs everything in the host's
order. The happens-before checker finds where it might have another.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm.memory import launch_order, stream_writes
from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.memory.segment import FINGERPRINT_BITS, NUM_SLOTS
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import dispatch
from fusedcomm.ops.table import OPS
from fusedcomm.plan.call_plan import CallPlan, fingerprint_of
from fusedcomm.run import calls, reference
from tests.helpers.schedule import async_collectives, torch_ops
from tests.helpers.schedule.async_collectives import PretendedGroup
from tests.helpers.schedule.kernel_effects import EFFECTS, EPOCH, WORD, Group, Launch
from tests.helpers.schedule.memory import Memories, Memory
from tests.helpers.schedule.operations import Flag, Kind, Operation, Recording, Step, Work
from tests.helpers.schedule.region import Region
from tests.helpers.schedule.streams import DEVICE, Event, Stream, Streams

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like")
_ADDRESSES = 1 << 44  # bytes for the tensors of a rank, or for one segment


class Recorder(TorchDispatchMode):
    """One rank. ``groups`` has this rank in each; a call on one of them runs by ``algorithm`` in slots of
    ``slot_bytes``. ``writes_words``: whether streams can write words.
    """

    def __init__(
        self,
        rank: int,
        groups: Sequence[Group],
        slot_bytes: int,
        algorithm: str,
        writes_words: bool = True,
    ) -> None:
        super().__init__()
        self.rank, self.algorithm, self.writes_words = rank, algorithm, writes_words
        self.groups = {group.name: group for group in groups}
        self.slot_bytes = slot_bytes
        self.recording = Recording(rank)
        self.streams = Streams()
        self.memories = Memories(_ADDRESSES * (rank + 1))
        self.epochs = dict.fromkeys(self.groups, 0)  # rounds that have ended
        self.workspaces: dict[str, Workspace] = {}
        self._group_of: dict[str, Group] = {}  # by the name of the memory that holds the segments' addresses
        self._segments: dict[str, tuple[Group, int]] = {}  # by the name of a segment
        self._nccl: dict[str, Stream] = {}
        self._collected: dict[str, Event] = {}  # by the name of a memory: the end of its collective
        self._num_collectives = dict.fromkeys(self.groups, 0)
        self._pretends = False

    @contextmanager
    def records(self) -> Iterator[Recording]:
        """Inside, this process is a rank with a GPU."""
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(self.streams.in_place_of_cuda())
            for name in _FACTORIES:
                enter(mock.patch.object(torch, name, self._on_meta(getattr(torch, name))))
            for name, value in self._tensor_attributes().items():
                enter(mock.patch.object(torch.Tensor, name, value))
            for function in torch_ops.launchers():
                enter(mock.patch.object(function, "run", self._run()))
            enter(mock.patch.object(stream_writes, "available", lambda device: self.writes_words))
            enter(mock.patch.object(stream_writes, "write", self.stream_write))
            enter(mock.patch.object(reference, "_is_gloo", lambda group_name: False))
            groups = {name: PretendedGroup(group, self.rank) for name, group in self.groups.items()}
            enter(async_collectives.in_place_of_torchs(self._begin_async, self.streams, groups))
            enter(mock.patch.dict(launch_order._orders, clear=True))
            enter(mock.patch.object(launch_order, "native", None))  # which takes torch's own streams alone
            enter(self)
            self._pretends = True
            for i, group in enumerate(self.groups.values()):
                self._join(i, group)
            self.start_again()
            yield self.recording
            self._collect()
            self._pretends = False
        self.recording.priorities = {stream.number: stream.priority for stream in self.streams.made}

    def start_again(self) -> None:
        """Forget what was recorded: it has ended before what comes now."""
        self.recording.operations.clear()
        self.streams.forget()

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False) -> Tensor:
        """An input of the program: ready before it begins."""
        t = torch.empty(*shape, dtype=dtype, device="meta")
        return t.requires_grad_(requires_grad)

    # ---- groups and calls

    def _join(self, index: int, group: Group) -> None:
        size = Workspace.num_bytes(len(group.ranks), self.slot_bytes)
        segments = [torch.empty(size, dtype=torch.uint8, device="meta") for _ in group.ranks]
        for member, segment in enumerate(segments):
            name = group.segment(member)
            self.memories.add(segment, name, address=_ADDRESSES * (64 + 64 * index + member))
            self._segments[name] = group, member
        workspace = Workspace(group.ranks.index(self.rank), segments, group.name)
        memory = self.memories.find(workspace.segments)
        assert memory is not None
        memory.name = f"addresses of {group.name} on rank {self.rank}"
        self._group_of[memory.name] = group
        self.workspaces[group.name] = workspace

    def _call(self, op: str, args: Sequence[Any]) -> Any:
        """`fusedcomm.ops.dispatch.run` behind its votes and its plan."""
        spec = OPS[op]
        bound = spec.bind(args)
        exchange = spec.exchange_of(bound)
        fingerprint = fingerprint_of(op, exchange.key, bound.x.dtype)
        plan = CallPlan(op, self.algorithm, "recorded", fingerprint=fingerprint, exchange=exchange)
        plan.num_rounds = async_collectives.NUM_PIECES
        memory: CallMemory = self.workspaces[bound.group_name]
        if not plan.has_workspace:
            memory = CallMemory(memory.rank, memory.group_size, memory.group_name, DEVICE)
        ran = calls.run(plan, memory, spec.program, *spec.operands(bound))
        return spec.returned(dispatch._results(spec, bound, ran))

    # ---- what torch does

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "fusedcomm":
            with self:
                return self._call(torch_ops.name_of(func), args)
        if func.namespace == "profiler" or func.is_view:
            return func(*args, **kwargs)
        self._collect()
        if torch_ops.name_of(func) == "wait_tensor":  # on meta tensors it would make another tensor
            memory = self.memories.find(args[0])
            assert memory is not None
            self.streams.current.wait_event(self._collected[memory.name])
            return args[0]
        if torch_ops.name_of(func) in torch_ops.SYNCHRONIZES and any(map(_on_gpu, torch_ops.tensors(args))):
            self._to_host(torch_ops.tensors(args))
            return 0
        given = kwargs.get("device")
        if given is not None and torch.device(given).type == "cuda":
            kwargs["device"] = "meta"
        before, self._pretends = self._pretends, False
        try:
            result = func(*args, **kwargs)
            self._record_op(func, args, kwargs, result)
        finally:
            self._pretends = before
        return result

    def _record_op(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        used = [t for t in torch_ops.tensors(args, kwargs) if _on_gpu(t)]
        written = [t for t in torch_ops.written_by(func, args, kwargs) if _on_gpu(t)]
        made = [t for t in torch_ops.tensors(result) if _on_gpu(t) and self.memories.find(t) is None]
        if func.namespace == "_c10d_functional":
            self._collective(func, args, used, made)
            return
        for t in made:
            self._allocate(t)
        if used and not made and any(not _on_gpu(t) for t in torch_ops.tensors(result)):  # a copy to the host
            self._to_host(used)
        if torch_ops.makes_memory_alone(func) or not (made or written):
            return
        written += made
        read = [t for t in used if all(t is not each for each in written)]
        step = Step(reads=self._regions(read), writes=self._regions(written))
        kind = torch_ops.kind_of(func, read, written)
        if kind is Kind.MATMUL:
            step.work.matmul = torch_ops.matmul_sizes(func, args, written[0])
            step.work.flops = 2 * math.prod(step.work.matmul)
        else:
            self._count_stores(step)
        self._enqueue(kind, torch_ops.name_of(func), [step], shape=str(tuple(written[0].shape)))

    def _count_stores(self, step: Step) -> None:
        for written in step.writes:
            owner = self._owner(written.memory)
            if owner == self.rank:
                step.work.copied += written.num_bytes
            else:
                step.work.sent[owner] = step.work.sent.get(owner, 0) + written.num_bytes

    def _owner(self, memory: str) -> int:
        """The global rank whose GPU has the memory."""
        if memory not in self._segments:
            return self.rank
        group, member = self._segments[memory]
        return group.ranks[member]

    def _collective(self, func: Any, args: Any, used: list[Tensor], made: list[Tensor]) -> None:
        """A functional collective, which wait_tensor joins."""
        for t in made:
            self._allocate(t)
        ended = self._begin(torch_ops.name_of(func), self.groups[args[-1]], used, made)
        for t in (*used, *made):
            memory = self.memories.find(t)
            assert memory is not None
            memory.used_on.add(self._nccl[args[-1]].number)
            self._collected[memory.name] = ended

    def _begin_async(self, name: str, group_name: str, sent: Tensor, received: Tensor) -> Event:
        self._collect()
        return self._begin(name, self.groups[group_name], [sent], [received])

    def _begin(self, op: str, group: Group, used: list[Tensor], made: list[Tensor]) -> Event:
        """NCCL's kernel runs on a stream of its own, and begins when all ranks have begun. Returns its end."""
        if group.name not in self._nccl:
            self._nccl[group.name] = Stream(self.streams, -1)
        stream = self._nccl[group.name]
        stream.wait_stream(self.streams.current)
        self._num_collectives[group.name] += 1
        own, epoch, name = group.ranks.index(self.rank), self._num_collectives[group.name], f"NCCL of {group.name}"
        peers = [peer for peer in range(len(group.ranks)) if peer != own]
        there = Step(signals=[Flag(name, peer, own, epoch) for peer in peers])
        moves = Step(waits=[Flag(name, own, peer, epoch) for peer in peers])
        moves.reads, moves.writes = self._regions(used), self._regions(made)
        sent = sum(t.numel() * t.itemsize for t in used) / len(group.ranks)
        moves.work = Work(sent={group.ranks[peer]: sent for peer in peers})
        self._enqueue(Kind.COLLECTIVE, op, [there, moves], stream, num_programs=24, num_warps=16)
        return stream.record_event()

    def _to_host(self, read: Sequence[Tensor]) -> None:
        self._enqueue(Kind.MEMCPY, "to the host", [Step(reads=self._regions(read))])
        self.streams.current.synchronize()

    # ---- what Triton launches, and writes to words

    def _run(self) -> Callable[..., None]:
        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self._launch(function, args, grid, options)

        return run

    def _launch(self, function: Any, args: Sequence[Any], grid: Sequence[int], options: dict[str, Any]) -> None:
        self._collect()
        num_warps = options.pop("num_warps", 4)
        signature = inspect.signature(function.fn)
        bound = signature.bind(*args, **{k: v for k, v in options.items() if k in signature.parameters})
        bound.apply_defaults()
        memory = self.memories.find(bound.arguments["segments_ptr"])
        assert memory is not None
        group, name = self._group_of[memory.name], function.fn.__name__
        launch = Launch({**bound.arguments, "grid": grid[0]}, group, self.epochs[group.name] + 1, self.memories)
        steps = list(EFFECTS[name](launch))
        self._enqueue(Kind.LAUNCH, name, steps, num_programs=grid[0], num_warps=num_warps)
        self.epochs[group.name] += launch.ends_round

    def stream_write(self, stream: Stream | int, address: int, value: int) -> None:
        """cuStreamWriteValue64: a release of all that the stream, or its handle, did before."""
        stream = self.streams.made[stream] if isinstance(stream, int) else stream
        memory = self.memories.at(address)
        offset = address - memory.address
        step = Step(writes=[Region(memory.name, offset, WORD)])
        group, owner = self._segments[memory.name]
        layout = self.workspaces[group.name].layout
        slot, src_rank = divmod((offset - layout.flags) // WORD, layout.group_size)
        if 0 <= slot < NUM_SLOTS:
            step.signals.append(Flag(group.name, owner, src_rank, value >> FINGERPRINT_BITS))
        elif offset == EPOCH:
            self.epochs[group.name] = value
        self._enqueue(Kind.STREAM_WRITE, "write", [step], stream)

    # ---- operations and memory

    def _enqueue(
        self,
        kind: Kind,
        name: str,
        steps: list[Step],
        stream: Stream | None = None,
        num_programs: int = 1,
        num_warps: int = 1,
        shape: str = "",
    ) -> None:
        stream = stream or self.streams.current
        number = len(self.recording.operations)
        operation = Operation(
            number, self.rank, stream.number, kind, f"{name}{shape}", stream.pending, steps, num_programs, num_warps
        )
        operation.host_waits = self.streams.take_host_waits()
        stream.pending, stream.last = [], number
        self.recording.operations.append(operation)

    def _regions(self, ts: Sequence[Tensor]) -> list[Region]:
        return [found for t in ts if (found := self.memories.region(t)) is not None]

    def _allocate(self, t: Tensor) -> None:
        stream = self.streams.current
        name = f"memory {self.memories.num_added} of rank {self.rank} {tuple(t.shape)}"
        memory = self.memories.add(t, name, stream.number)
        if memory.num_bytes:
            self._enqueue(Kind.ALLOC, "alloc", [Step(writes=[Region(memory.name, 0, memory.num_bytes)])])

    def _collect(self) -> None:
        for memory in self.memories.freed():
            if memory.num_bytes and memory.stream is not None:
                self._free(memory)

    def _free(self, memory: Memory) -> None:
        """The allocator's own stream may use the memory from here on, the others once what they were given is done."""
        assert memory.stream is not None
        tails = [self.streams.made[number].tail for number in (memory.stream, *memory.used_on)]
        number = len(self.recording.operations)
        step = Step(writes=[Region(memory.name, 0, memory.num_bytes)])
        after = sorted({each for tail in tails for each in tail})
        operation = Operation(number, self.rank, -1, Kind.FREE, "free", after, [step])
        self.recording.operations.append(operation)

    # ---- tensors that say they are on a GPU

    def _tensor_attributes(self) -> dict[str, Any]:
        base = torch._C.TensorBase

        def device(t: Tensor) -> torch.device:
            real = base.device.__get__(t)  # type: ignore[attr-defined]
            return DEVICE if self._pretends and real.type == "meta" else real

        def is_cuda(t: Tensor) -> bool:
            return self._pretends and base.device.__get__(t).type == "meta"  # type: ignore[attr-defined]

        def data_ptr(t: Tensor) -> int:
            return self.memories.address(t) if _on_gpu(t) else base.data_ptr(t)

        def record_stream(t: Tensor, stream: Stream) -> None:
            memory = self.memories.find(t)
            assert memory is not None
            memory.used_on.add(stream.number)

        return {
            "device": property(device),
            "is_cuda": property(is_cuda),
            "data_ptr": data_ptr,
            "record_stream": record_stream,
        }

    def _on_meta(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            options.pop("pin_memory", None)
            if options.get("device") is not None and torch.device(options["device"]).type == "cuda":
                options["device"] = "meta"
            t = make(*args, **options)
            if self._pretends and _on_gpu(t) and self.memories.find(t) is None:  # torch.tensor: no mode sees it
                self.memories.add(t, f"constant of rank {self.rank}")
            return t

        return made


def _on_gpu(t: Tensor) -> bool:
    return torch._C.TensorBase.device.__get__(t).type == "meta"  # type: ignore[attr-defined]
