"""What `fusedcomm tune` measures: the constants of `cost` on this machine, in the ranks of a group, all at once.

    matmul      the rate is the median over sizes, whole and cut as chunks are; the bandwidth of memory comes from few
                rows and from few columns, the overhead from a tiny matmul
    copies      into new memory, to a peer's slot, from a slot into a result; and collectives, by kind: seconds =
                latency + bytes / bandwidth, fitted over sizes by least squares of relative errors, neither below 0
    fused       on GPUs: the rate of a call with much arithmetic per byte sent, and how fast one with little stores
    overheads   how much longer small calls, forced to each algorithm, take than their estimates without overheads: the
                median, and for chunked the same fit over the number of chunks (matmul_all_reduce has twice as many)

Times are those of `bench.timing`: the slowest rank's, the median over rounds, so the constants are equal on all ranks.

A reference, one matmul, is measured among the variants of every measurement. How much its times differ is the noise of
all of them. Where the noise is large, or more bytes take less time, nothing is kept, because the machine did other
things too. Nor is anything kept where the estimates choose slow algorithms for the calls that were measured.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm import env, reference
from fusedcomm.algorithms.planner import force_algorithm
from fusedcomm.bench.op_bench import OpData
from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.bench.timing import check_values, measure
from fusedcomm.cost import model, tuned
from fusedcomm.cost.model import ITEMSIZE, KINDS, Constants
from fusedcomm.geometry import shapes
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.runtime import group
from fusedcomm.runtime.group import resolve
from fusedcomm.runtime.group_member import Member, WorkspaceUnavailable
from fusedcomm.runtime.vote import agree

REPEAT = 20  # calls in a measurement, where one takes less time than the start of a measurement differs by
MEASUREMENT_S = 0.02  # how long repeated calls take together: the longer they are, the fewer
LONGEST_S = 0.1  # a call that takes longer is not measured: CPUs can be slow in 16 bit
ROUNDS, QUICK_ROUNDS = 7, 3
CROSSOVER_K_N = (1024, 4096)
CROSSOVER_ROWS = tuple(1 << power for power in range(17))
REFERENCE_CALLS = 8  # calls of the reference in one measurement: some milliseconds on a CPU
FEWEST_REFERENCES = 10
MOST_NOISE = 0.5  # share of the reference's median; two quiet cores of a cloud had 0.2 to 0.4, busy ones 0.8 to 1.2
MOST_LOSS = 0.1  # share of the time of calls; chosen: algorithms that are this close are equally good
LEAST_S = 1e-7  # the least overhead or latency: nothing that a rank starts takes less
FINGERPRINT = 0x7475  # the fingerprint of the call that makes the workspace large enough
Points = Sequence[tuple[float, float, float]]  # x, y, and what an error of y is relative to


@dataclass(frozen=True)
class TuneSizes:
    """What is measured: [m, k, n] of matmuls, bytes of copies and collectives."""

    probe: tuple[int, int, int]  # its rate tells which of ``matmuls`` are not too long
    matmuls: tuple[tuple[int, int, int], ...]
    narrow: tuple[tuple[int, int, int], ...]  # few rows or few columns: most of their time they read memory
    num_bytes: tuple[int, ...]
    calls: tuple[tuple[int, int, int], ...]  # small calls
    much_arithmetic: tuple[int, int, int]
    much_sent: tuple[int, int, int]

    @staticmethod
    def of(device_type: str, quick: bool) -> TuneSizes:
        if device_type == "cpu":
            return TuneSizes(
                probe=(64, 512, 512),
                matmuls=((512, 1024, 1024), (256, 1024, 1024), (512, 1024, 512), *[(1024, 1024, 2048)][quick:]),
                narrow=((4, 1024, 1024), (4, 2048, 2048), (1024, 1024, 8), (2048, 2048, 8)),
                num_bytes=(64 << 10, 512 << 10, 4 << 20, *[40 << 20][quick:]),  # the last gets new pages at every use
                calls=((16, 64, 64), (16, 1024, 1024), (256, 256, 512), *[(512, 512, 1024)][quick:]),
                much_arithmetic=(0, 0, 0),
                much_sent=(0, 0, 0),
            )
        return TuneSizes(
            probe=(1024, 1024, 1024),
            matmuls=((4096, 4096, 4096), (4096, 4096, 1024), (1024, 4096, 4096), *[(8192, 4096, 8192)][quick:]),
            narrow=((16, 8192, 8192), (16, 4096, 16384), (8192, 8192, 16)),
            num_bytes=(64 << 10, 1 << 20, 16 << 20, *[128 << 20][quick:]),
            calls=((64, 512, 512), (256, 1024, 1024), (1024, 1024, 1024), *[(2048, 2048, 2048)][quick:]),
            much_arithmetic=(4096, 16384, 2048),
            much_sent=(8192, 128, 8192),
        )


@dataclass(frozen=True)
class Crossover:
    """From ``rows`` on ``algorithm`` is estimated to be the fastest."""

    op: str
    dtype: str
    rows: int
    algorithm: str


@dataclass(frozen=True)
class Point:
    """Something that moves bytes, as measured: "copy", "link", "unpack", or a kind of collective."""

    what: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Sample:
    """A call: its seconds by algorithm, as measured and as estimated by the constants that came out."""

    op: str
    rows: int
    k: int
    n: int
    dtype: str
    measured: dict[str, float]
    estimated: dict[str, float]

    @property
    def chosen(self) -> str:
        return min(self.estimated, key=self.estimated.__getitem__)


@dataclass(frozen=True)
class Tuned:
    """The constants that came out, and the measurements that they come from."""

    constants: Constants
    points: tuple[Point, ...]
    samples: tuple[Sample, ...]
    noise: float  # how much the reference's times differ, as a share of their median


class Unreliable(Exception):
    """What was measured must not be kept; raised alike on all ranks."""


def tune(ours: Member, quick: bool, on_done: Callable[[int], None] = lambda done: None) -> Tuned:
    """Measure the constants; a collective. Raises, on all ranks alike, WorkspaceUnavailable where an algorithm cannot
    run that is measured, ValuesDiffer, or Unreliable.

    ``on_done`` gets the number of parts measured, of NUM_PARTS.
    """
    bench = _Bench(ours, TuneSizes.of(ours.device.type, quick), QUICK_ROUNDS if quick else ROUNDS)
    constants = replace(model.DEFAULTS[ours.device.type], source=model.TUNED)
    for done, part in enumerate(PARTS):
        constants = part(bench, constants)
        check_noise(bench.references)
        on_done(done + 1)
    samples = tuple(replace(each, estimated=estimate(each, constants, ours.group_size)) for each in bench.samples)
    return Tuned(constants, tuple(bench.points), samples, noise(bench.references))


def noise(references: Sequence[float]) -> float:
    """How far the first and the last decile of a reference's times are apart, as a share of their median."""
    deciles = statistics.quantiles(references, n=10, method="inclusive")
    return (deciles[-1] - deciles[0]) / statistics.median(references)


def check_noise(references: Sequence[float]) -> None:
    """Raise Unreliable where references differ too much, as soon as there are enough of them to say so."""
    if len(references) >= FEWEST_REFERENCES and (found := noise(references)) > MOST_NOISE:
        raise Unreliable(
            f"one matmul, measured {len(references)} times among the rest, differed by {found:.0%} of its median "
            f"(first to last decile), and must differ by at most {MOST_NOISE:.0%}"
        )


def misfit(samples: Sequence[Sample]) -> str | None:
    """How much longer calls take with the algorithms of the least estimates than with the fastest, if that is much."""
    losses = [each.measured[each.chosen] / min(each.measured.values()) - 1 for each in samples]
    if not losses or (found := statistics.mean(losses)) <= MOST_LOSS:
        return None
    return (
        f"with the algorithms that the estimates choose, the {len(losses)} calls measured take {found:.0%} longer "
        f"than with the fastest ones, and must take at most {MOST_LOSS:.0%} longer"
    )


class _Bench:
    def __init__(self, ours: Member, sizes: TuneSizes, rounds: int) -> None:
        self.ours, self.sizes, self.rounds = ours, sizes, rounds
        self.device, self.num_ranks = ours.device, ours.group_size
        self.samples: list[Sample] = []
        self.points: list[Point] = []
        self.references: list[float] = []  # times of the reference, one per measurement
        m, k, n = sizes.probe
        dtype = "bfloat16" if ours.device.type == "cuda" else "float32"  # bfloat16 takes as long with TF32 as without
        self._x, self._w = self.random(m, k, dtype=dtype), self.random(k, n, dtype=dtype)

    def seconds(self, variants: dict[Any, Callable[[], Any]], repeat: int = 1) -> dict[Any, float]:
        """How long one call of each variant takes."""

        def repeated(variant: Callable[[], Any]) -> Callable[[], None]:
            def calls() -> None:
                for _ in range(repeat):
                    variant()

            return calls

        def reference() -> None:
            for _ in range(REFERENCE_CALLS):
                torch.mm(self._x, self._w)

        named = {str(i): repeated(variant) for i, variant in enumerate(variants.values())}
        times = measure({**named, "reference": reference}, self.device, rounds=self.rounds, warmup=2)
        self.references.append(times["reference"].median)
        return {key: times[str(i)].median / repeat for i, key in enumerate(variants)}

    def random(self, *shape: int, dtype: str = "float32") -> Tensor:
        return torch.randn(shape, device=self.device).to(torch_dtype(dtype))

    def bytes(self, num_bytes: int) -> Tensor:
        return self.random(num_bytes // 4)

    def matmuls(self, dtype: str, sizes: Sequence[tuple[int, int, int]], repeat: int = 1) -> dict[Any, float]:
        def variant(m: int, k: int, n: int) -> Callable[[], Any]:
            x, w = self.random(m, k, dtype=dtype), self.random(k, n, dtype=dtype)
            return lambda: torch.mm(x, w)

        with _precision(dtype):
            return self.seconds({size: variant(*size) for size in sizes}, repeat)


def _matmul(bench: _Bench, constants: Constants) -> Constants:
    """The bandwidth comes first, as if the sums of narrow matmuls took no time; rates come from what is left."""
    sizes, cuda = bench.sizes, bench.device.type == "cuda"
    overhead = bench.matmuls("float32", [(8, 8, 8)], REPEAT)[8, 8, 8]
    narrow = bench.matmuls("float32", sizes.narrow, REPEAT)
    bandwidth = statistics.median(_num_bytes(size, "float32") / max(t - overhead, t / 2) for size, t in narrow.items())

    def rate(dtype: str, of: Sequence[tuple[int, int, int]]) -> float:
        rates = []
        for size, t in bench.matmuls(dtype, of).items():
            beside = 0.0 if cuda else _num_bytes(size, dtype) / bandwidth
            rates.append(MatmulSize(*size).flops / max(t - overhead - beside, t / 2))
        return statistics.median(rates)

    flops = {}
    for dtype in constants.matmul_flops:
        probed = rate(dtype, [sizes.probe])
        short = [size for size in sizes.matmuls if MatmulSize(*size).flops / probed < LONGEST_S]
        flops[dtype] = rate(dtype, short) if short else probed
    return replace(
        constants,
        num_sms=_num_sms(bench.device),
        matmul_flops=flops,
        memory_bandwidth=bandwidth,
        matmul_overhead=overhead,
    )


def _num_sms(device: torch.device) -> int:
    """The fewest SMs that a rank's GPU has: what is measured, and for how long, must be the same on all."""
    if device.type == "cpu":
        return 1
    count = torch.tensor(torch.cuda.get_device_properties(device).multi_processor_count, device=device)
    dist.all_reduce(count, dist.ReduceOp.MIN)
    return int(count)


def _num_bytes(size: tuple[int, int, int], dtype: str) -> int:
    m, k, n = size
    return (m * k + k * n + m * n) * ITEMSIZE[dtype]


def _copies(bench: _Bench, constants: Constants) -> Constants:
    from fusedcomm.algorithms.transport import transport_of

    ours, num_ranks = bench.ours, bench.num_ranks
    with ours.lock:
        slot_bytes = min(max(bench.sizes.num_bytes), ours.max_slot_bytes)
        workspace = ours.workspace_for(slot_bytes, "fusedcomm.tune", FINGERPRINT)
    start = workspace.layout.slot(workspace.epoch + 1, workspace.slot_bytes)
    transport, peer = transport_of(workspace), (ours.rank + 1) % num_ranks

    def slot(rank: int, num_bytes: int) -> Tensor:
        return workspace.buffers[rank][start : start + num_bytes].view(torch.float32)

    def variants(num_bytes: int) -> dict[Any, Callable[[], Any]]:
        t, rows = bench.bytes(num_bytes), num_bytes // 4 // num_ranks // 64
        blocks = t[: rows * num_ranks * 64].view(rows, num_ranks, 64)
        arrived = slot(ours.rank, rows * num_ranks * 64 * 4).view(num_ranks, rows, 64).movedim(0, 1)
        return {
            ("copy", num_bytes): lambda: blocks.movedim(1, 0).contiguous(),
            ("link", num_bytes): lambda: slot(peer, num_bytes).copy_(t),
            ("unpack", num_bytes): lambda: transport.result(t, blocks.shape).copy_(arrived),
        }

    sizes = [num_bytes for num_bytes in bench.sizes.num_bytes if num_bytes <= workspace.slot_bytes]
    times = bench.seconds({key: each for num_bytes in sizes for key, each in variants(num_bytes).items()})
    bench.points += [Point(what, num_bytes, t) for (what, num_bytes), t in times.items()]
    fits = {
        name: line({num_bytes: t for (what, num_bytes), t in times.items() if what == name})
        for name in ("copy", "link", "unpack")
    }
    return replace(
        constants,
        copy_bandwidth=fits["copy"][0],
        copy_overhead=fits["copy"][1],
        unpack_bandwidth=fits["unpack"][0],
        link_bandwidth=fits["link"][0],
        link_latency=fits["link"][1],
    )


def _collectives(bench: _Bench, constants: Constants) -> Constants:
    """Collectives are called as `unfused` does, on blocks that need no packing, and fitted over the bytes sent."""
    num_ranks, group_name = bench.num_ranks, resolve(None)[1]
    group = (num_ranks, group_name)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "all_to_all": lambda blocks: reference.exchange(blocks, 1, 0, *group),
        "all_gather": lambda blocks: reference.all_gather(blocks[0], 0, *group),
        "reduce_scatter": lambda blocks: reference.reduce_scatter(blocks, "sum", 0, *group),
        "all_reduce": lambda blocks: reference.all_reduce(blocks, "sum", *group),
    }
    sizes = [num_bytes // num_ranks // 4 * 4 for num_bytes in bench.sizes.num_bytes]
    data = {chunk: bench.bytes(chunk * num_ranks).view(num_ranks, -1) for chunk in sizes}

    def variant(kind: str, chunk: int) -> Callable[[], Any]:
        return lambda: calls[kind](data[chunk])

    latency, bandwidth = {}, {}
    for kind in calls:
        times = bench.seconds({chunk: variant(kind, chunk) for chunk in sizes})
        bench.points += [Point(kind, chunk * num_ranks, t) for chunk, t in times.items()]
        sent = (num_ranks - 1) * (2 if kind == "all_reduce" else 1)
        if kind == "all_reduce":  # the functional all_reduce copies too, which the model counts apart
            times = {chunk: max(t - constants.copy(chunk * num_ranks), t / 4) for chunk, t in times.items()}
        bandwidth[kind], latency[kind] = line({chunk * sent: t for chunk, t in times.items()})
    return replace(constants, backend_latency=latency, backend_bandwidth=bandwidth)


def _fused(bench: _Bench, constants: Constants) -> Constants:
    """Only the copy-out is subtracted from the times of forced calls, so what comes out is on the safe side."""
    if not constants.fused_flops:
        return constants

    def seconds(dtype: str, size: tuple[int, int, int]) -> float:
        with _precision(dtype):
            data = _data(bench, "matmul_all_to_all", size, dtype, ["fused"])
            return bench.seconds({"": data.forced("fused")})[""]

    much, sent = MatmulSize(*bench.sizes.much_arithmetic), MatmulSize(*bench.sizes.much_sent)
    flops = {dtype: much.flops / seconds(dtype, bench.sizes.much_arithmetic) for dtype in constants.fused_flops}
    t, all_bytes = seconds("bfloat16", bench.sizes.much_sent), sent.rows * sent.n * ITEMSIZE["bfloat16"]
    remote_bytes = all_bytes * (bench.num_ranks - 1) / bench.num_ranks
    return replace(
        constants, fused_flops=flops, store_bandwidth=remote_bytes / max(t - constants.unpack(all_bytes), t / 4)
    )


def _overheads(bench: _Bench, constants: Constants) -> Constants:
    without = replace(constants, call_overhead=dict.fromkeys(constants.call_overhead, 0.0), chunk_overhead=0.0)
    names = [name for name in constants.call_overhead if name != "fused" or bench.ours.topology.no_fused is None]
    points: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for op, size, dtype in itertools.product(KINDS, bench.sizes.calls, ("float32", "bfloat16")):
        data = _data(bench, op, size, dtype, names)
        sample = Sample(op, data.size.rows, data.size.k, data.size.n, dtype, dict.fromkeys(names, 0.0), {})
        estimates = estimate(sample, without, bench.num_ranks)
        longest = max(estimates.values())
        if longest > LONGEST_S:
            continue
        repeat = max(1, min(REPEAT, int(MEASUREMENT_S / longest)))
        times = bench.seconds({name: data.forced(name) for name in names}, repeat)
        bench.samples.append(replace(sample, measured=times))
        num_chunks = bench.num_ranks * (2 if op == "matmul_all_reduce" else 1)
        for name in names:
            points[name].append((num_chunks, times[name] - estimates[name], times[name]))
    call = {name: max(statistics.median(y for _, y, _ in points[name]), LEAST_S) for name in names}
    call["chunked"], chunk = affine(points["chunked"])
    return replace(constants, call_overhead={**constants.call_overhead, **call}, chunk_overhead=chunk)


def crossovers(constants: Constants, num_ranks: int) -> list[Crossover]:
    """From how many rows on which algorithm is estimated to be the fastest, at the K and N of ``CROSSOVER_K_N``."""
    found: list[Crossover] = []
    for op, dtype in itertools.product(KINDS, ("float32", "bfloat16")):
        before = ""
        for rows in CROSSOVER_ROWS:
            size = PROGRAMS[op].divisible(MatmulSize(rows, *CROSSOVER_K_N), num_ranks)
            estimates = model.estimate(op, exchange_of(op, size, num_ranks), dtype, constants)
            fastest = min(estimates, key=estimates.__getitem__)
            if fastest != before:
                found.append(Crossover(op, dtype, size.rows, fastest))
            before = fastest
    return found


PARTS = (_matmul, _copies, _collectives, _fused, _overheads)
NUM_PARTS = len(PARTS)


def line(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Bandwidth and latency from times by number of bytes. Raises Unreliable."""
    latency, per_byte = affine([(num_bytes, t, t) for num_bytes, t in seconds.items()])
    if per_byte <= LEAST_S / max(seconds):
        times = ", ".join(f"{num_bytes}: {t * 1e6:.0f} us" for num_bytes, t in seconds.items())
        raise Unreliable(f"more bytes must take more time, got {times}")
    return 1 / per_byte, latency


def affine(points: Points) -> tuple[float, float]:
    """a and b of y = a + b x, fitted by least squares of the errors, each relative to its point's third number.

    a is at least LEAST_S, and so is b times the largest x.
    """
    least = LEAST_S / max(x for x, _, _ in points)
    weights = [1 / scale**2 for _, _, scale in points]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _, _) in zip(weights, points, strict=True)) / total
    y_mean = sum(w * y for w, (_, y, _) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, (x, _, _) in zip(weights, points, strict=True))
    moved = sum(w * (x - x_mean) * (y - y_mean) for w, (x, y, _) in zip(weights, points, strict=True))
    b = moved / spread if spread else 0.0
    a = y_mean - b * x_mean
    if b < least:
        return max(y_mean, LEAST_S), least
    if a < LEAST_S:
        square = sum(w * x * x for w, (x, _, _) in zip(weights, points, strict=True))
        return LEAST_S, max(sum(w * x * y for w, (x, y, _) in zip(weights, points, strict=True)) / square, least)
    return a, b


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, "float32" if name == "tf32" else name)


def estimate(sample: Sample, constants: Constants, num_ranks: int) -> dict[str, float]:
    exchange = exchange_of(sample.op, MatmulSize(sample.rows, sample.k, sample.n), num_ranks)
    estimates = model.estimate(sample.op, exchange, sample.dtype, constants)
    return {name: estimates[name] for name in sample.measured}


def exchange_of(op: str, size: MatmulSize, num_ranks: int) -> Exchange:
    """The geometry of a bench's call."""
    program = PROGRAMS[op]
    x, w = program.x_shape(size, num_ranks), (size.k, size.n)
    between: dict[str, list[Any]] = {
        "matmul_all_to_all": [None],
        "matmul_reduce_scatter": ["sum"],
        "matmul_all_reduce": ["sum"],
    }
    dims = program.dims(torch.empty(x, device="meta"))
    return getattr(shapes, op)(x, (w,) if op == "all_gather_matmul" else w, *between.get(op, []), *dims, num_ranks)


def _data(bench: _Bench, op: str, size: tuple[int, int, int], dtype: str, names: Sequence[str]) -> OpData:
    """A call whose values have been checked with every algorithm of ``names``; each of them must be able to run."""
    program = PROGRAMS[op]
    data = OpData(program, program.divisible(MatmulSize(*size), bench.num_ranks), torch_dtype(dtype), bench.device)
    for name in names:
        with force_algorithm(name):
            plan = data.plan()
        if plan.algorithm != name:
            raise WorkspaceUnavailable(str(plan))
    check_values({name: data.forced(name) for name in names}, data.check)
    data.randomize()
    return data


@contextlib.contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """Inside, matmuls use TF32 for "tf32", and full float32 for others."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def write_for_all(constants: Constants, device: torch.device, pg: ProcessGroup) -> Path:
    """A collective: rank 0 writes, then every rank reads the same numbers. Raises OSError on all ranks alike."""
    rank, group_size, error = pg.rank(), pg.size(), ""
    if rank == 0:
        try:
            tuned.write(constants, device, group_size)
        except OSError as failure:
            error = f"cannot write {failure.filename}: {failure.strerror}"
    dist.barrier(pg)
    found = tuned.read(device, group_size)
    own = {"error": error, "digest": found.digest if found else None}
    facts = agree(group.store(pg, f"tune/{device.type}"), rank, group_size, own, what="fusedcomm tune")
    if facts[0]["error"]:
        raise OSError(facts[0]["error"])
    others = [r for r, fact in enumerate(facts) if fact["digest"] != constants.digest]
    if others:
        raise OSError(f"ranks {others} do not read what rank 0 wrote: all ranks must share {env.cache_dir()}")
    return tuned.path_of(tuned.key(device, group_size))
