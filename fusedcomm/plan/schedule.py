"""A call as data: rounds of steps on streams. Operands are places in named memory.

A schedule holds no tensor, pointer or handle: `Builder` makes one for any rank of any group on any machine. Executors
(`fusedcomm.run`) bind the bases to memory and run the steps in order; checkers, the simulator and `explain` read them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch


class Base(IntEnum):
    """The memory that a place is in."""

    INPUT = 0  # a tensor argument of the call; offsets count from its first element
    RESULT = 1  # memory made for a result
    TEMPORARY = 2  # memory of the call alone
    SLOT = 3  # the slot of this round in a rank's segment
    SEGMENT = 4  # a rank's whole segment


class Stream(IntEnum):
    MAIN = 0  # the caller's
    SENDS = 1  # copies to peers, each with its signal behind it
    READS = 2  # waits and copies out


class Place(NamedTuple):
    """A tensor by base, offset, shape, strides. ``number``: of an input, result or temporary, or its owner's rank."""

    base: Base
    number: int
    offset: int  # bytes
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        shape = "x".join(map(str, self.sizes))
        return f"{self.base.name.lower()} {self.number}+{self.offset}[{shape}]"


@dataclass(frozen=True)
class Multiply:
    """``out = x @ w + bias``, or ``out += x @ w``: 2-D, or 3-D with batches. One rounding from float32. ``scales``: of
    float8 x and w, whose sums may be ``fast``.
    """

    out: Place
    x: Place
    w: Place
    bias: Place | None = None
    adds: bool = False
    scales: tuple[Place, ...] = ()
    fast: bool = False


@dataclass(frozen=True)
class Copy:
    """``to.copy_(source)``, of one shape."""

    to: Place
    source: Place


@dataclass(frozen=True)
class Update:
    """``to.fill_(value)`` or ``to.div_(value)``, by the name of the method."""

    to: Place
    method: str
    value: float


@dataclass(frozen=True)
class Reduce:
    """``out = sum(parts) * scale + bias``, flat: in float32, in the order of parts, rounded once."""

    out: Place
    parts: tuple[Place, ...]
    bias: Place | None
    scale: float


@dataclass(frozen=True)
class Norm:
    """``out = x / sqrt(mean(x ** 2) + eps) * weight`` of each row: in float32, rounded once."""

    out: Place
    x: Place
    weight: Place | None
    eps: float


@dataclass(frozen=True)
class Collective:
    """Begins the process group's own "all_to_all", "all_gather" or "reduce_scatter", of flat chunks of one size."""

    number: int
    kind: str
    to: Place
    source: Place


@dataclass(frozen=True)
class Finish:
    """Work that follows on the stream comes after the end of a `Collective`."""

    number: int


@dataclass(frozen=True)
class Signal:
    """Sets this rank's flag at dst_rank to (epoch, fingerprint), behind everything before it on the stream."""

    dst_rank: int


@dataclass(frozen=True)
class Wait:
    """Holds the host until src_rank's flag of this round has come. On GPUs kernels wait."""

    src_rank: int


@dataclass(frozen=True)
class Launch:
    """A Triton kernel. ``arguments``: Places, `Described`, `Table`, `Fingerprint`, and values equal in all runs."""

    kernel: str  # module.function in fusedcomm.kernels.triton
    num_programs: int
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, int], ...]


class Described(NamedTuple):
    """A Place as a tensor descriptor (TMA) with the block that one load takes."""

    place: Place
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


class Table(NamedTuple):
    """The addresses of all ranks' segments, int64 [R]."""


class Fingerprint(NamedTuple):
    """The number of the call in the flags of its rounds."""


@dataclass(frozen=True)
class Record:
    """The event is everything on the stream so far."""

    event: int


@dataclass(frozen=True)
class Await:
    """Work that follows on the stream comes after the event."""

    event: int


@dataclass(frozen=True)
class EndRound:
    """This rank's part of a round is launched or done: the epoch is counted, slots change.

    ``by_kernel``: a kernel counts the epoch on the device, when it has read the last chunk.
    """

    by_kernel: bool = False


Moves = Copy | Collective | Finish | Signal | Wait
Work = Moves | Multiply | Update | Reduce | Norm | Launch | Record | Await | EndRound


class Step(NamedTuple):
    work: Work
    stream: Stream = Stream.MAIN
    lane: str = ""  # of a profiler's trace

    def __str__(self) -> str:
        parts = [f"{each.name}={_text(getattr(self.work, each.name))}" for each in fields(self.work)]
        return f"{self.stream.name:5}  {type(self.work).__name__:8}  {', '.join(parts)}"


class Result(NamedTuple):
    """Memory for a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Schedule:
    """All steps of a call. ``results``: memory to make; ``returned``: the Places of the call's results, in order."""

    steps: tuple[Step, ...]
    results: tuple[Result, ...]
    temporary_bytes: int
    temporaries: tuple[int, ...]  # by index: where each begins in the one block of temporary_bytes
    num_events: int
    returned: tuple[Place, ...]

    @property
    def num_rounds(self) -> int:
        return sum(isinstance(step.work, EndRound) for step in self.steps)

    @cached_property
    def can_be_captured(self) -> bool:
        """Whether replays of a CUDA graph may run it: no address or flag of it changes with the epoch."""
        places = (place for step in self.steps for place in places_of(step.work))
        return not any(isinstance(step.work, Signal) for step in self.steps) and not any(
            place.base == Base.SLOT for place in places
        )

    def counts(self) -> Mapping[str, int]:
        """The number of steps by kind."""
        found: dict[str, int] = {}
        for step in self.steps:
            kind = type(step.work).__name__
            found[kind] = found.get(kind, 0) + 1
        return found

    def __str__(self) -> str:
        return "\n".join(f"{i:3}  {step}" for i, step in enumerate(self.steps))


def places_of(work: Any) -> Iterator[Place]:
    """All Places among the operands."""
    if isinstance(work, Place):
        yield work
    elif isinstance(work, tuple):
        for each in work:
            yield from places_of(each)
    elif hasattr(work, "__dataclass_fields__"):
        for each in fields(work):
            yield from places_of(getattr(work, each.name))


def _text(value: Any) -> str:
    if isinstance(value, tuple) and not isinstance(value, Place):
        return f"({', '.join(map(_text, value))})"
    return str(value)
