"""Effects of each Triton kernel of the package: whom it waits for, what it reads and writes, whom it signals.

The programs of a kernel go through its steps together: each step has its own wait or signal, and what a program does in
a step comes after what it did in the step before.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from fusedcomm.kernels.triton.bundles import Spans
from fusedcomm.plan.geometry.rank_order import peers_of, sources_of
from fusedcomm.plan.geometry.spans import Span
from fusedcomm.plan.schedule import Described, Launch, Place
from fusedcomm.run.python_executor import kernel
from tests.helpers.schedule.operations import Flag, Step, Work
from tests.helpers.schedule.region import Region, region

EPOCH, ARRIVALS, WORD = 0, 8, 8  # bytes: fusedcomm.memory.segment.HeaderLayout


@dataclass(frozen=True)
class Group:
    """``ranks``: the global rank of each member. ``pulls``: combines leave rows in the slots of their senders."""

    name: str
    ranks: tuple[int, ...]
    pulls: bool = False

    def segment(self, rank: int) -> str:
        return f"segment of rank {rank} in {self.name}"

    def begun(self, rank: int) -> Region:
        """A word that stands for the begin of a round: only then a rank knows whether it may send, and copies."""
        return Region(f"begun by rank {rank} in {self.name}", 0, WORD)


class KernelCall:
    """A launch of the round ``epoch``, by the names of the kernel's parameters."""

    def __init__(self, work: Launch, group: Group, epoch: int, region_of: Callable[[Place], Region | None]) -> None:
        function = kernel(work.kernel).fn
        signature = inspect.signature(function)
        options = {name: value for name, value in work.options if name in signature.parameters}
        self.args = signature.bind(*work.arguments, **options).arguments
        self.name, self.num_programs = function.__name__, work.num_programs
        self.group, self.epoch, self.region_of = group, epoch, region_of
        self.rank, self.layout = self.args.get("rank"), self.args.get("LAYOUT")  # no kernel's that waits for nobody
        self.group_size = len(group.ranks)
        self.ends_round = False

    @property
    def spans(self) -> Spans:
        return Spans(*(Span(*each) for each in self.args["spans"]))

    @property
    def numel(self) -> int:
        batches, rows, columns = self.spans
        return batches.size * rows.size * columns.size

    def word(self, offset: int, rank: int | None = None) -> Region:
        return Region(self.group.segment(self.rank if rank is None else rank), offset, WORD)

    def place(self, name: str) -> Place | None:
        given = self.args.get(name)
        return given.place if isinstance(given, Described) else given

    def tensor(self, name: str) -> list[Region]:
        place = self.place(name)
        found = None if place is None else self.region_of(place)
        return [] if found is None else [found]

    def itemsize(self, name: str) -> int:
        place = self.place(name)
        assert place is not None
        return place.dtype.itemsize

    def part(self, owner: int, src_rank: int, numel: int, itemsize: int) -> Region:
        """src_rank's part of a slot of ``owner``, of which its chunk has ``numel`` elements."""
        apart = self.args["run"].chunk_numel if "run" in self.args else numel
        slot_bytes = self.args["sizes"].slot_bytes if "sizes" in self.args else self.args["slot_bytes"]
        slot = self.layout.header_bytes + self.epoch % self.layout.num_slots * slot_bytes
        start = slot + src_rank * itemsize * apart
        return Region(self.group.segment(owner), start, numel * itemsize)

    def counter(self, dst_rank: int) -> Region:
        return self.word(self.layout.counters + WORD * dst_rank)

    def span(self, name: str, tensor: str, peer: int) -> list[Region]:
        """The elements of a tensor that a Span of the arguments describes."""
        span = Span(*self.args[name])
        return self.part_of(tensor, span.first(peer), (span.outer, span.inner), (span.outer_stride, 1))

    def part_of(self, tensor: str, first: int, sizes: Sequence[int], strides: Sequence[int]) -> list[Region]:
        """Elements of a tensor, from the element ``first`` on."""
        itemsize = self.itemsize(tensor)
        found = [region(t.memory, t.start + first * itemsize, sizes, strides, itemsize) for t in self.tensor(tensor)]
        return [each for each in found if each is not None]

    def signal(self, step: Step, dst_rank: int) -> Step:
        step.signals.append(Flag(self.group.name, dst_rank, self.rank, self.epoch))
        step.writes.append(self.word(self._flag(self.rank), dst_rank))
        return step

    def signal_all(self) -> Step:
        """By the programs' one counter."""
        step = Step(writes=[self.counter(0)])
        for dst_rank in [self.rank, *peers_of(self.rank, self.group_size)[:-1]]:
            self.signal(step, dst_rank)
        return step

    def wait(self, step: Step, src_rank: int) -> Step:
        step.waits.append(Flag(self.group.name, self.rank, src_rank, self.epoch))
        step.reads += [self.word(EPOCH), self.word(self._flag(src_rank))]
        return step

    def wait_all(self) -> list[Step]:
        return [self.wait(Step(), src_rank) for src_rank in sources_of(self.rank, self.group_size)]

    def end_round(self) -> Step:
        self.ends_round = True
        return Step(writes=[self.word(ARRIVALS), self.word(EPOCH)])

    def store(self, work: Work, dst_rank: int, num_bytes: int) -> Work:
        if dst_rank == self.rank:
            work.copied += num_bytes
        else:
            work.sent[self.group.ranks[dst_rank]] = num_bytes
        return work

    def _flag(self, src_rank: int) -> int:
        return self.layout.flags + WORD * (self.epoch % self.layout.num_slots * self.group_size + src_rank)


def push(launch: KernelCall) -> Iterator[Step]:
    sizes, itemsize, numel = launch.args["sizes"], launch.itemsize("x"), launch.numel
    yield Step(reads=[launch.word(EPOCH)])
    for dst_rank in peers_of(launch.rank, launch.group_size):
        work = launch.store(Work(flops=2 * numel * sizes.K), dst_rank, numel * itemsize)
        step = Step(reads=[*launch.tensor("x"), *launch.tensor("w"), *launch.tensor("bias_ptr")], work=work)
        step.writes += [launch.part(dst_rank, launch.rank, numel, itemsize), launch.counter(dst_rank)]
        yield launch.signal(step, dst_rank)


def pack(launch: KernelCall) -> Iterator[Step]:
    itemsize, numel = launch.itemsize("tensor"), Span(*launch.args["pack"]).size
    yield Step(reads=[launch.word(EPOCH)])
    own, by_chunk = launch.args["TRAITS"]
    for dst_rank in [launch.rank, *peers_of(launch.rank, launch.group_size)[:-1]]:
        step = Step()
        if dst_rank != launch.rank or own:
            step.reads = launch.span("pack", "tensor", dst_rank)
            step.work = launch.store(step.work, dst_rank, numel * itemsize)
            step.writes = [launch.part(dst_rank, launch.rank, numel, itemsize)]
        if by_chunk:
            step.writes.append(launch.counter(dst_rank))
            launch.signal(step, dst_rank)
        yield step
    if not by_chunk:
        yield launch.signal_all()


def gather_matmul(launch: KernelCall) -> Iterator[Step]:
    args, spans, sizes, tile = launch.args, launch.spans, launch.args["sizes"], launch.args["TILE"]
    num_tiles = spans.batches.size * -(-spans.rows.size // tile.block_m) * -(-sizes.N // tile.block_n)
    split_k = args["TRAITS"].split_k
    first = (
        min(1.0, launch.num_programs / num_tiles) if split_k and num_tiles else 1.0
    )  # the tiles that do not wait for all
    parts, total = list[Region](), 0
    for src_rank in sources_of(launch.rank, launch.group_size):
        if src_rank == launch.rank and not args["TRAITS"].own:
            yield launch.wait(Step(), src_rank)
            continue
        part = launch.part(launch.rank, src_rank, launch.numel, launch.itemsize("out_ptr"))
        flops = 2 * launch.numel * sizes.N
        total += flops
        step = launch.wait(Step(reads=[part], work=Work(flops=first * flops)), src_rank)
        step.reads += [*launch.tensor("w"), *launch.tensor("bias_ptr")]
        if not split_k:
            step.writes += _rows(launch, src_rank)
        parts.append(part)
        yield step
    if split_k:
        work = Work(flops=(1 - first) * total)
        yield Step(reads=[*parts, *launch.tensor("w")], writes=_rows(launch, 0), work=work)
    if args["TRAITS"].end_round:
        yield launch.end_round()


def unpack(launch: KernelCall) -> Iterator[Step]:
    itemsize, numel = launch.itemsize("out_ptr"), Span(*launch.args["unpack"]).size
    for src_rank in sources_of(launch.rank, launch.group_size):
        step = Step()
        if src_rank != launch.rank or launch.args["TRAITS"].own:
            step.reads.append(launch.part(launch.rank, src_rank, numel, itemsize))
            step.writes = launch.span("unpack", "out_ptr", src_rank)
            step.work = Work(copied=numel * itemsize)
        yield launch.wait(step, src_rank)
    if launch.args["TRAITS"].end_round:
        yield launch.end_round()


def unpack_norm(launch: KernelCall) -> Iterator[Step]:
    """Own rows that lie in out are normed before the first wait; the own signal is then the last."""
    n, in_slot, weight = launch.args["N"], launch.args["OWN"], launch.tensor("weight_ptr")
    own, *others = sources_of(launch.rank, launch.group_size)
    launch.args["unpack"] = span = Span(*(n * each for each in launch.args["rows"]))
    itemsize, normed = launch.itemsize("out_ptr"), partial(launch.span, "unpack", "normed_ptr")
    work = Work(copied=1.5 * span.size * itemsize)
    if not in_slot:
        yield Step(reads=[*launch.span("unpack", "out_ptr", own), *weight], writes=normed(own), work=work)
    for src_rank in [own, *others] if in_slot else [*others, own]:
        step = Step()
        if src_rank != own or in_slot:
            step = Step(reads=[launch.part(own, src_rank, span.size, itemsize), *weight], work=work)
            step.writes = [*launch.span("unpack", "out_ptr", src_rank), *normed(src_rank)]
        yield launch.wait(step, src_rank)
    yield launch.end_round()


def reduce(launch: KernelCall) -> Iterator[Step]:
    (size, start, _), itemsize = launch.args["run"], launch.itemsize("out_ptr")
    yield from launch.wait_all()
    added, results = launch.tensor("residual_ptr"), [*launch.tensor("out_ptr"), *launch.tensor("normed_ptr")]
    num_moved = launch.group_size + len(added) + len(results)
    step = Step(work=Work(copied=num_moved / 2 * size * itemsize), reads=added)
    step.reads += [launch.part(launch.rank, src, size, itemsize) for src in range(launch.group_size)]
    step.reads += [*launch.tensor("bias_ptr"), *launch.tensor("weight_ptr")]
    for out in results:
        step.writes.append(Region(out.memory, out.start + start * itemsize, size * itemsize))
    yield step
    yield launch.end_round()


def norm(launch: KernelCall) -> Iterator[Step]:
    step = Step(reads=[*launch.tensor("out_ptr"), *launch.tensor("weight_ptr")], writes=launch.tensor("normed_ptr"))
    step.work = Work(copied=launch.args["num_rows"] * launch.args["N"] * launch.itemsize("out_ptr"))
    yield step


def begin_push(launch: KernelCall) -> Iterator[Step]:
    yield Step(reads=[launch.word(EPOCH)], writes=[launch.group.begun(launch.rank)])


def signal(launch: KernelCall) -> Iterator[Step]:
    first, count = launch.args["first"], launch.args["count"]
    step = Step(reads=[launch.word(EPOCH)])
    for dst_rank in range(first, first + count):
        launch.signal(step, dst_rank % launch.group_size)
    yield step


def wait_source(launch: KernelCall) -> Iterator[Step]:
    yield launch.wait(Step(), launch.args["src_rank"])


def finish(launch: KernelCall) -> Iterator[Step]:
    yield from launch.wait_all()
    yield Step(writes=launch.tensor("out_ptr"))
    if launch.args["END_ROUND"]:
        yield launch.end_round()


def send_rows(launch: KernelCall) -> Iterator[Step]:
    """As if each rank's rows were a part of a piece: which they are is in the routing."""
    capacity, n, itemsize = launch.args["capacity"], launch.args["N"], launch.itemsize("x_ptr")
    first, num_rows = of_piece(launch, capacity)
    num_rows //= launch.group_size
    first += launch.rank * num_rows
    names = "x_ptr", "scores_ptr", "places_ptr", "first_ptr"
    yield Step(reads=[launch.word(EPOCH), *(each for name in names for each in launch.tensor(name))])
    for dst_rank in [launch.rank, *peers_of(launch.rank, launch.group_size)[:-1]]:
        step = Step(work=launch.store(Work(), dst_rank, num_rows * n * itemsize))
        scored = bool(launch.tensor("scores_ptr"))
        step.writes = with_notes(launch, dst_rank, first, num_rows, n * itemsize, scored)
        yield step
    yield launch.signal_all()


def take_rows(launch: KernelCall) -> Iterator[Step]:
    yield from launch.wait_all()
    n, itemsize = launch.args["N"], launch.itemsize("rows_ptr")
    first, num_rows = of_piece(launch, launch.args["capacity"])
    reads = with_notes(launch, launch.rank, first, num_rows, n * itemsize, launch.args["SCORED"])
    reads += [*launch.part_of("rows_ptr", 0, (first * n,), (1,)), *launch.tensor("first_ptr")]
    yield Step(reads=reads, writes=launch.part_of("rows_ptr", first * n, (num_rows * n,), (1,)))
    yield launch.end_round()


def experts_matmul(launch: KernelCall) -> Iterator[Step]:
    capacity, n, k, *_ = launch.args["sizes"]
    first, num_rows = of_piece(launch, capacity)
    tensors = [each for name in ("w", "first_ptr", "ends_ptr") for each in launch.tensor(name)]
    yield Step(
        reads=[*launch.part_of("rows_ptr", first * k, (num_rows * k,), (1,)), *tensors],
        writes=launch.part_of("out_ptr", first * n, (num_rows * n,), (1,)),
        work=Work(flops=2 * num_rows * k * n),
    )


def of_piece(launch: KernelCall, capacity: int) -> tuple[int, int]:
    """(first row, number of rows), as if all experts had alike."""
    experts, begin, end = launch.args["PIECE"]
    first = capacity * begin // experts
    return first, capacity * end // experts - first


def with_notes(launch: KernelCall, owner: int, first: int, num_rows: int, row_bytes: int, scored: bool) -> list[Region]:
    """Rows in a slot, the rows that were sent for them, and their scores."""
    capacity = launch.args["capacity"]
    slot = launch.part(owner, 0, 1, 1)
    memory, start = slot.memory, slot.start
    notes = start + -(-capacity * row_bytes // 4) * 4
    found = [Region(memory, start + first * row_bytes, num_rows * row_bytes)]
    return found + [Region(memory, notes + 4 * (i * capacity + first), 4 * num_rows) for i in range(1 + scored)]


def return_rows(launch: KernelCall) -> Iterator[Step]:
    """As if rows were of all ranks' choices alike, or more than the slots hold."""
    name, pulls = "rows_ptr" if "rows_ptr" in launch.args else "h", launch.group.pulls
    sizes = launch.args.get("sizes")
    capacity, n = (sizes.M, sizes.N) if sizes else (launch.args["capacity"], launch.args["N"])
    numel, itemsize = capacity // launch.group_size * n, launch.itemsize(name)
    flops = 2 * numel * sizes.K if sizes else 0
    yield Step(
        reads=[launch.word(EPOCH)], writes=[launch.part(launch.rank, 0, capacity * n, itemsize)] if pulls else []
    )
    for dst_rank in [launch.rank, *peers_of(launch.rank, launch.group_size)[:-1]]:
        inputs = [t for each in (name, "w", "first_ptr", "filled_ptr", "returns_ptr") for t in launch.tensor(each)]
        step = Step(reads=inputs)
        step.work = launch.store(Work(flops=flops), launch.rank if pulls else dst_rank, numel * itemsize)
        if not pulls:
            step.writes.append(launch.part(dst_rank, launch.rank, numel, itemsize))
        yield step
    yield launch.signal_all()


def add_rows(launch: KernelCall) -> Iterator[Step]:
    yield from launch.wait_all()
    owners = range(launch.group_size) if launch.group.pulls else [launch.rank]
    numel, itemsize = launch.args["capacity"] * launch.args["N"], launch.itemsize("y_ptr")
    slots = [launch.part(owner, 0, numel, itemsize) for owner in owners]
    reads = [
        *slots,
        *(t for name in ("scores_ptr", "places_ptr", "indices_ptr", "sums_ptr") for t in launch.tensor(name)),
    ]
    yield Step(reads=reads, writes=[*launch.tensor("y_ptr"), *launch.tensor("received_ptr")])
    yield launch.end_round()


def local(launch: KernelCall) -> Iterator[Step]:
    """All tensors are read and written."""
    tensors = [each for name in launch.args if name.endswith("_ptr") for each in launch.tensor(name)]
    yield Step(reads=tensors, writes=tensors)


EFFECTS: dict[str, Callable[[KernelCall], Iterator[Step]]] = {
    "push_matmul_kernel": push,
    "pack_kernel": pack,
    "gather_matmul_kernel": gather_matmul,
    "unpack_kernel": unpack,
    "reduce_kernel": reduce,
    "reduce_norm_kernel": reduce,
    "unpack_norm_kernel": unpack_norm,
    "norm_kernel": norm,
    "begin_push_kernel": begin_push,
    "signal_kernel": signal,
    "wait_source_kernel": wait_source,
    "finish_kernel": finish,
    "send_rows_kernel": send_rows,
    "take_rows_kernel": take_rows,
    "return_rows_kernel": return_rows,
    "grouped_matmul_kernel": return_rows,
    "experts_matmul_kernel": experts_matmul,
    "add_rows_kernel": add_rows,
    **{f"{each}_kernel": local for each in ("count", "scan", "plan", "shift", "return", "place")},
}


def _rows(launch: KernelCall, src_rank: int) -> list[Region]:
    """The rows of the result that a round makes from src_rank's chunk."""
    spans, num_m, num_n = launch.spans, launch.args["sizes"].M, launch.args["sizes"].N
    first, sizes, strides = 0, [num_n], [1]
    for span, step in ((spans.batches, num_m * num_n), (spans.rows, num_n)):
        first += span.first(src_rank) * step
        sizes += [span.outer, span.inner]
        strides += [span.outer_stride * step, step]
    return launch.part_of("out_ptr", first, sizes, strides)
