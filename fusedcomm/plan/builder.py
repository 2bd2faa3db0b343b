"""A schedule in the making. An algorithm is a program that runs once, on tensors without memory.

The tensors are on torch's meta device: views of them cost nothing, and storage and offset make a Place. So algorithms
cut operands by torch's own views, and see no address.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.kernels.triton.bundles import SegmentLayout
from fusedcomm.plan import schedule as steps
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.geometry.spans import RoundSpans

_ALIGNMENT = 256  # bytes: temporaries begin at multiples
_LANES = "fusedcomm."


Given = Tensor | None  # an operand that a call may leave out


class RmsNorm(NamedTuple):
    """``normed = out / sqrt(mean(out ** 2) + eps) * weight`` of the rows of a sum, ``out``. All are contiguous."""

    normed: Tensor
    weight: Given
    eps: float


class Layout(NamedTuple):
    """A tensor argument without its memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    alignment: int = 0  # the address modulo 16


def layout_of(t: Tensor) -> Layout:
    return Layout(tuple(t.shape), tuple(t.stride()), t.dtype, t.data_ptr() % 16)


class Device(NamedTuple):
    """The facts of a group's devices that schedules depend on."""

    is_gpu: bool = False
    architecture: int = 0  # the key of the tables of tiles; 0 for Triton's interpreter
    triton: tuple[int, ...] = ()  # its version
    num_sms: int = 1
    shares_gpu: bool = False
    writes_by_stream: bool = False  # whether a stream sets flags without a kernel
    launches_early: bool = False  # kernels, by programmatic dependent launch
    allow_tf32: bool = False
    for_capture: bool = False  # whether a CUDA graph has, or will have, rounds of this workspace
    least_copied: int = 0  # bytes of a run that copy engines send beside a kernel that waits

    @property
    def has_tma(self) -> bool:
        return self.architecture >= 90

    def num_programs(self, kind: str) -> int:
        """Programs of a persistent kernel, one an SM. All run at the same time.

        Copy-outs that wait, or have a matmul beside them, leave half of the SMs. Gathers come after this rank's sends,
        or engines copy. Rows of experts have an eighth beside a matmul.
        """
        rows = self.num_sms // 8
        shares = {"copy-out beside": self.num_sms // 2, "rows beside": rows, "matmul beside": self.num_sms - rows}
        return max(1, shares.get(kind, self.num_sms))


class Memory(NamedTuple):
    """The facts of a rank's segment that schedules depend on."""

    rank: int
    group_size: int
    usable_bytes: int  # of a slot
    slot_bytes: int  # from one slot to the next
    max_chunk_bytes: int
    layout: SegmentLayout


class Builder:
    """``inputs``: a stand-in for each tensor argument, None where there is none. ``num_pieces``, ``backend_sums``: of a
    `pipelined` call.
    """

    def __init__(
        self,
        memory: Memory,
        device: Device,
        inputs: Sequence[Layout | None],
        num_pieces: int = 0,
        backend_sums: bool = False,
    ) -> None:
        self.num_pieces, self.backend_sums = num_pieces, backend_sums
        self.memory, self.device = memory, device
        self.rank, self.group_size = memory.rank, memory.group_size
        self.alignments = [0 if each is None else each.alignment for each in inputs]
        self._bases: dict[int, tuple[steps.Base, int]] = {}  # by storage
        self._kept: list[Tensor] = []  # their storages' numbers are not given out again
        self.inputs = [None if each is None else self._input(i, each) for i, each in enumerate(inputs)]
        slots = range(self.group_size)
        self._slots = [self._base(steps.Base.SLOT, owner, memory.usable_bytes) for owner in slots]
        layout = memory.layout
        self._segment = self._base(
            steps.Base.SEGMENT, self.rank, layout.header_bytes + layout.num_slots * memory.slot_bytes
        )
        self._steps: list[steps.Step] = []
        self._results: list[steps.Result] = []
        self._temporaries: list[int] = []
        self._temporary_bytes = self._most_temporary_bytes = 0
        self._last: dict[steps.Stream, int] = {}  # by stream: the event that covers all that is on it
        self._num_events = self._num_collectives = 0
        self._stream, self._lane = steps.Stream.MAIN, ""

    # ---- memory

    def _input(self, index: int, layout: Layout) -> Tensor:
        t = torch.empty_strided(layout.sizes, layout.strides, dtype=layout.dtype, device="meta")
        return self._know(t, steps.Base.INPUT, index)

    def _base(self, base: steps.Base, index: int, num_bytes: int) -> Tensor:
        return self._know(_stand_in((num_bytes,), torch.uint8), base, index)

    def _know(self, t: Tensor, base: steps.Base, index: int) -> Tensor:
        self._kept.append(t)
        self._bases[t.untyped_storage()._cdata] = base, index
        return t

    def result(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._results.append(steps.Result(tuple(shape), dtype))
        return self._know(_stand_in(shape, dtype), steps.Base.RESULT, len(self._results) - 1)

    def temporary(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._temporaries.append(self._temporary_bytes)
        self._temporary_bytes += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._most_temporary_bytes = max(self._temporary_bytes, self._most_temporary_bytes)
        return self._know(_stand_in(shape, dtype), steps.Base.TEMPORARY, len(self._temporaries) - 1)

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Temporaries made inside are used there alone, on one stream: later ones take their memory."""
        before = self._temporary_bytes
        yield
        self._temporary_bytes = before

    def max_chunk_numel(self, dtype: torch.dtype) -> int:
        return self.memory.max_chunk_bytes // dtype.itemsize

    def rounds(self, exchange: Exchange, dtype: torch.dtype) -> list[RoundSpans]:
        device_type = "cuda" if self.device.is_gpu else "cpu"
        return exchange.rounds_of(device_type, dtype.itemsize, self.max_chunk_numel(dtype))

    def chunk(self, owner: int, src_rank: int, spans: RoundSpans, dtype: torch.dtype) -> Tensor:
        """src_rank's chunk in a rank's slot, flat."""
        peer, of_peer = (owner, "pack") if src_rank == self.rank else (src_rank, "unpack")
        numel = getattr(spans.at(peer), of_peer).size
        start = src_rank * spans.chunk_numel * dtype.itemsize
        return self._slots[owner][start : start + numel * dtype.itemsize].view(dtype)

    def slots(self, dtype: torch.dtype) -> Tensor:
        """All of this rank's slots, flat."""
        return self._segment[self.memory.layout.header_bytes :].view(dtype)

    def place(self, t: Tensor) -> steps.Place:
        base, index = self._bases[t.untyped_storage()._cdata]
        start = int(t.storage_offset()) * t.itemsize
        return steps.Place(base, index, start, tuple(t.shape), tuple(t.stride()), t.dtype)

    def is_at(self, t: Tensor, other: Tensor) -> bool:
        """Whether both begin at one place."""
        return self.place(t)[:3] == self.place(other)[:3]

    def address_mod_16(self, t: Tensor) -> int:
        place = self.place(t)
        return (place.offset + (self.alignments[place.number] if place.base == steps.Base.INPUT else 0)) % 16

    def contiguous(self, t: Tensor) -> Tensor:
        if t.is_contiguous():
            return t
        made = self.temporary(t.shape, t.dtype)
        self.copy(made, t)
        return made

    def reshape(self, t: Tensor, *shape: int) -> Tensor:
        try:
            return t.view(shape)
        except RuntimeError:  # of a tensor that only a copy can have in this shape
            return self.contiguous(t).view(shape)

    # ---- steps

    def add(self, work: steps.Work) -> None:
        if not isinstance(work, steps.EndRound):  # the host's alone
            self._last.pop(self._stream, None)
        self._steps.append(steps.Step(work, self._stream, self._lane))

    def copy(self, to: Tensor, source: Tensor) -> None:
        if source.numel():
            self.add(steps.Copy(self.place(to), self.place(source)))

    def update(self, to: Tensor, method: str, value: float) -> None:
        if to.numel():
            self.add(steps.Update(self.place(to), method, value))

    def begin(self, kind: str, to: Tensor, source: Tensor) -> int:
        """Begin a `Collective`. Returns its number, for `end`."""
        self._num_collectives += 1
        self.add(steps.Collective(self._num_collectives, kind, self.place(to), self.place(source)))
        return self._num_collectives

    def end(self, number: int) -> None:
        self.add(steps.Finish(number))

    def multiply(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        out: Tensor,
        *,
        adds: bool = False,
        scales: Sequence[Tensor] = (),
        fast: bool = False,
    ) -> None:
        """``out[b, m, n] = x[b, m, k] @ w[b, k, n] + bias[n]``."""
        if out.numel() == 0:
            return
        if out.shape[0] == 1:
            x, w, out, *scales = (t[0] for t in (x, w, out, *scales))
        places = tuple(map(self.place, scales))
        self.add(steps.Multiply(self.place(out), self.place(x), self.place(w), self.optional(bias), adds, places, fast))

    def reduce(self, out: Tensor, parts: Sequence[Tensor], bias: Tensor | None, scale: float) -> None:
        """``out = sum(parts) * scale + bias``, flat; bias [N] repeats."""
        if out.numel():
            self.add(steps.Reduce(self.place(out), tuple(map(self.place, parts)), self.optional(bias), scale))

    def norm(self, out: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> None:
        if out.numel():
            to, rows = (self.place(t.view(-1, t.shape[-1])) for t in (out, x))
            self.add(steps.Norm(to, rows, self.optional(weight), eps))

    def optional(self, t: Tensor | None) -> steps.Place | None:
        return None if t is None else self.place(t)

    @contextmanager
    def on(self, stream: steps.Stream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        yield
        self._stream = before

    @contextmanager
    def lane(self, name: str, peer: int | None = None) -> Iterator[None]:
        before, self._lane = self._lane, f"{_LANES}{name}" + ("" if peer is None else f" rank {peer}")
        yield
        self._lane = before

    # ---- order between streams; none on CPUs, which have one

    def event(self, stream: steps.Stream) -> int:
        """Everything on the stream so far. `finish` removes events without a wait."""
        if stream not in self._last:
            self._steps.append(steps.Step(steps.Record(self._num_events), stream))
            self._last[stream], self._num_events = self._num_events, self._num_events + 1
        return self._last[stream]

    def after(self, stream: steps.Stream, event: int) -> None:
        """Work that follows on the stream comes after the event."""
        with self.on(stream):
            self.add(steps.Await(event))

    def join(self, stream: steps.Stream, other: steps.Stream) -> None:
        """Work that follows on ``stream`` comes after all of ``other``."""
        if stream != other:
            self.after(stream, self.event(other))

    def finish(self, *returned: Tensor) -> steps.Schedule:
        kept = self._without_earlier_waits()
        awaited = {step.work.event for step in kept if isinstance(step.work, steps.Await)}
        return steps.Schedule(
            tuple(step for step in kept if not isinstance(step.work, steps.Record) or step.work.event in awaited),
            tuple(self._results),
            self._most_temporary_bytes,
            tuple(self._temporaries),
            self._num_events,
            tuple(map(self.place, returned)),
        )

    def _without_earlier_waits(self) -> list[steps.Step]:
        """All steps but waits of a stream for another that it waits for again, and longer, before its next work."""
        sources = {step.work.event: step.stream for step in self._steps if isinstance(step.work, steps.Record)}
        kept: list[steps.Step] = []
        later: dict[tuple[steps.Stream, steps.Stream], int] = {}  # the event that it then waits for
        for step in reversed(self._steps):
            if isinstance(step.work, steps.Await):
                key = step.stream, sources[step.work.event]
                if later.setdefault(key, step.work.event) > step.work.event:
                    continue
            elif not isinstance(step.work, steps.EndRound):
                later = {key: event for key, event in later.items() if key[0] != step.stream}
            kept.append(step)
        return kept[::-1]


Program = Callable[..., Any]  # emits the steps of a call, and returns the stand-ins of its results


def build(
    program: Program,
    exchange: Exchange,
    memory: Memory,
    device: Device,
    operands: Sequence[Layout | list[Layout | None] | None],
    *,
    num_pieces: int = 0,
    backend_sums: bool = False,
    **facts: Hashable,
) -> steps.Schedule:
    """The steps of ``program(builder, exchange, *operands, **facts)``."""
    inputs = [t for each in operands for t in (each if isinstance(each, list) else [each])]
    builder = Builder(memory, device, inputs, num_pieces, backend_sums)
    made = iter(builder.inputs)
    stand_ins = [[next(made) for _ in each] if isinstance(each, list) else next(made) for each in operands]
    returned = program(builder, exchange, *stand_ins, **facts)
    return builder.finish(*([returned] if isinstance(returned, Tensor) else returned))


def _stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided((math.prod(shape),), (1,), dtype=dtype, device="meta").view(*shape)
