"""Work that a rank enqueues: operations on streams, each of which waits, reads, writes and signals in steps."""

from dataclasses import dataclass, field
from enum import Enum

from tests.helpers.schedule.region import Region


class Kind(Enum):
    MATMUL = "matmul"  # cuBLAS
    LAUNCH = "launch"  # a kernel of this package
    ELEMENTS = "elements"  # a kernel of torch
    MEMCPY = "memcpy"  # cudaMemcpyAsync
    STREAM_WRITE = "stream write"  # cuStreamWriteValue64, which needs no SM
    COLLECTIVE = "collective"  # a kernel of NCCL
    ALLOC = "alloc"  # the allocator gives memory to a stream
    FREE = "free"  # the allocator takes it back


ON_SMS = {Kind.MATMUL, Kind.LAUNCH, Kind.ELEMENTS, Kind.COLLECTIVE}


@dataclass(frozen=True)
class Flag:
    """A flag in round ``epoch``: src_rank's word in a slot of dst_rank. NCCL's kernels meet by flags of their own."""

    group: str
    dst_rank: int
    src_rank: int
    epoch: int


@dataclass
class Work:
    """How much a step does: floating-point operations, bytes copied within the GPU, bytes stored to each peer."""

    flops: float = 0
    matmul: tuple[int, int, int, int] | None = None  # of cuBLAS: (batches, m, k, n)
    copied: float = 0
    sent: dict[int, float] = field(default_factory=dict)  # by global rank


@dataclass
class Step:
    """A part of an operation. It first waits, then reads and writes, then signals."""

    waits: list[Flag] = field(default_factory=list)
    reads: list[Region] = field(default_factory=list)
    writes: list[Region] = field(default_factory=list)
    signals: list[Flag] = field(default_factory=list)
    work: Work = field(default_factory=Work)


@dataclass
class Operation:
    number: int
    rank: int
    stream: int  # -1: of a free, which is on none
    kind: Kind
    name: str
    after: list[int]  # numbers of this rank's operations that events put before it, beside its stream's
    steps: list[Step]
    num_programs: int = 1

    @property
    def waits(self) -> bool:
        return any(step.waits for step in self.steps)

    def __str__(self) -> str:
        return f"rank {self.rank} stream {self.stream} #{self.number} {self.name}"


@dataclass
class Enqueued:
    """One rank's operations, in the host's order."""

    rank: int
    operations: list[Operation] = field(default_factory=list)
    priorities: dict[int, int] = field(default_factory=dict)  # by stream; lower ones come first
