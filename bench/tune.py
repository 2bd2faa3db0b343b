"""The measurements of `fusedcomm tune`: the constants of `cost` on this machine, in the ranks of a group, all at once.

    matmul      the rate is the median over sizes; the bandwidth of memory comes from few rows and from few columns, the
                overhead from a tiny matmul
    copies      into new memory, to a peer's slot, into a result; and collectives, by kind: seconds = latency + bytes /
                bandwidth, fitted over sizes by least squares of relative errors, neither below 0
    overheads   how much longer small calls, forced to each algorithm, take than their estimates without overheads, or
                on a GPU the smallest calls' whole time, which is their host's: the median, and for chunked the same fit
                over the number of chunks (matmul_all_reduce has twice as many)

Times are those of `bench.timing`: the slowest rank's, the median over rounds, so the constants are equal on all ranks.
A reference, one matmul, is measured among the variants of every measurement: how much its times differ is the noise.
Nothing is kept where the noise is large or more bytes take less time, because the machine did other things too, nor
where the estimates choose slow algorithms for the measured calls.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm import env
from fusedcomm.bench.op_bench import PROGRAMS, OpData
from fusedcomm.bench.timing import by_host, check_values, measure, repeated
from fusedcomm.memory import group
from fusedcomm.memory.group import resolve
from fusedcomm.memory.group_member import Member, WorkspaceUnavailable
from fusedcomm.memory.vote import agree
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.plan.cost import model, tuned
from fusedcomm.plan.cost.links import sent_bytes
from fusedcomm.plan.cost.model import ITEMSIZE, Constants
from fusedcomm.plan.forced import force_algorithm
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.run import reference

REPEAT = 20  # calls in a measurement, where one takes less time than the start of a measurement differs by
MEASUREMENT_S = 0.02  # how long repeated calls take together: the longer they are, the fewer
LONGEST_S = 0.1  # a call that takes longer is not measured: CPUs can be slow in 16 bit
ROUNDS, QUICK_ROUNDS = 7, 3
REFERENCE_CALLS = 8  # calls of the reference in one measurement: some milliseconds on a CPU
FEWEST_REFERENCES = 10
MOST_NOISE = 0.5  # share of the reference's median; two quiet cores of a cloud had 0.2 to 0.4, busy ones 0.8 to 1.2
MOST_LOSS = 0.1  # share of the time of calls; chosen: algorithms that are this close are equally good
LEAST_S = 1e-7  # the least overhead or latency: nothing that a rank starts takes less
FINGERPRINT = 0x7475  # the fingerprint of the call that makes the workspace large enough
Shape: TypeAlias = tuple[int, int, int]  # [m, k] @ [k, n]
Points: TypeAlias = Sequence[tuple[float, float, float]]  # x, y, and the scale of an error of y


class Unreliable(Exception):
    """Measurements that must not be kept; raised alike on all ranks."""


@dataclass(frozen=True)
class TuneSizes:
    """Matmuls, small calls, and bytes of copies and collectives; a quick run leaves out the last ones."""

    matmuls: tuple[Shape, ...]  # the first is short: its rate tells which others are not too long
    narrow: tuple[Shape, ...]  # few rows or few columns: most of their time they read memory
    num_bytes: tuple[int, ...]
    calls: tuple[Shape, ...]

    @staticmethod
    def of(device_type: str, quick: bool) -> TuneSizes:
        sizes = SIZES[device_type]
        if not quick:
            return sizes
        return TuneSizes(sizes.matmuls[:-1], sizes.narrow, sizes.num_bytes[:-1], sizes.calls[:-1])


SIZES = {
    "cpu": TuneSizes(
        matmuls=((64, 512, 512), (512, 1024, 1024), (256, 1024, 1024), (512, 1024, 512), (1024, 1024, 2048)),
        narrow=((4, 1024, 1024), (4, 2048, 2048), (1024, 1024, 8), (2048, 2048, 8)),
        num_bytes=(64 << 10, 512 << 10, 4 << 20, 40 << 20),  # the last gets new pages at every use
        calls=((16, 64, 64), (16, 1024, 1024), (256, 256, 512), (512, 512, 1024)),
    ),
    "cuda": TuneSizes(
        matmuls=((1024, 1024, 1024), (4096, 4096, 4096), (4096, 4096, 1024), (1024, 4096, 4096), (8192, 4096, 8192)),
        narrow=((16, 8192, 8192), (16, 4096, 16384), (8192, 8192, 16)),
        num_bytes=(64 << 10, 1 << 20, 16 << 20, 128 << 20),
        calls=((64, 512, 512), (256, 1024, 1024), (1024, 1024, 1024), (2048, 2048, 2048)),
    ),
}


@dataclass(frozen=True)
class Point:
    """Seconds of a move of bytes: "copy", "link", "unpack", or a kind of collective."""

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
    def loss(self) -> float:
        """The call's extra time with the algorithm of the least estimate over the fastest: a share."""
        return self.measured[min(self.estimated, key=self.estimated.__getitem__)] / min(self.measured.values()) - 1

    def estimate(self, constants: Constants, num_ranks: int) -> dict[str, float]:
        exchange = exchange_of(self.op, MatmulSize(self.rows, self.k, self.n), num_ranks)
        found = model.estimate(self.op, exchange, self.dtype, constants)
        return {name: found[name] for name in self.measured}


@dataclass(frozen=True)
class Tuned:
    """The constants that came out, and the measurements that they come from."""

    constants: Constants
    points: tuple[Point, ...] = ()
    samples: tuple[Sample, ...] = ()
    noise: float | None = None  # how much the reference's times differ, as a share of their median


def tune(ours: Member, quick: bool, on_done: Callable[[int], None] = lambda done: None) -> Tuned:
    """Measure the constants; a collective. Raises, on all ranks alike, WorkspaceUnavailable where a measured algorithm
    cannot run, ValuesDiffer, or Unreliable. ``on_done`` gets the number of PARTS measured.
    """
    bench = _Bench(ours, TuneSizes.of(ours.device.type, quick), QUICK_ROUNDS if quick else ROUNDS)
    constants = replace(model.DEFAULTS[ours.device.type], source=model.TUNED)
    for done, part in enumerate(PARTS):
        constants = part(bench, constants)
        check_noise(bench.references)
        on_done(done + 1)
    samples = tuple(replace(each, estimated=each.estimate(constants, ours.group_size)) for each in bench.samples)
    return Tuned(constants, tuple(bench.points), samples, noise(bench.references))


def noise(references: Sequence[float]) -> float:
    """The distance of the first and the last decile of a reference's times, as a share of their median."""
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
    """Why not to keep constants: their estimates choose slow algorithms. None if they do not."""
    if not samples or (found := statistics.mean(each.loss for each in samples)) <= MOST_LOSS:
        return None
    return (
        f"with the algorithms that the estimates choose, the {len(samples)} calls measured take {found:.0%} longer "
        f"than with the fastest ones, and must take at most {MOST_LOSS:.0%} longer"
    )


class _Bench:
    def __init__(self, ours: Member, sizes: TuneSizes, rounds: int) -> None:
        self.ours, self.sizes, self.rounds = ours, sizes, rounds
        self.device, self.num_ranks = ours.device, ours.group_size
        self.samples: list[Sample] = []
        self.points: list[Point] = []
        self.references: list[float] = []  # times of the reference, one per measurement
        self.dtype = "bfloat16" if ours.device.type == "cuda" else "float32"  # alike with TF32 and without
        self._reference = self._matmul(sizes.matmuls[0], self.dtype)

    def seconds(
        self, variants: dict[Any, Callable[[], Any]], repeat: int = 1, with_host: bool = False
    ) -> dict[Any, float]:
        """Seconds of one call of each variant; on a GPU its device's alone, unless ``with_host``."""
        measured: dict[Any, Callable[[], Any]] = {
            key: partial(repeated, each, repeat) for key, each in variants.items()
        }
        measured["reference"] = partial(repeated, self._reference, REFERENCE_CALLS)
        clock = by_host if with_host or self.device.type == "cpu" else None
        times = measure(measured, self.device, rounds=self.rounds, warmup=2, clock=clock)
        reference = times.pop("reference").median
        if self.device.type == "cpu" or not with_host:
            self.references.append(reference)
        return {key: timing.median / repeat for key, timing in times.items()}

    def move(self, variants: dict[tuple[str, int], Callable[[], Any]]) -> dict[str, dict[int, float]]:
        """Seconds by kind of move and by its bytes."""
        found: dict[str, dict[int, float]] = {}
        for (what, num_bytes), t in self.seconds(variants).items():
            self.points.append(Point(what, num_bytes, t))
            found.setdefault(what, {})[num_bytes] = t
        return found

    def matmuls(self, dtype: str, sizes: Sequence[Shape], repeat: int = 1) -> dict[Any, float]:
        with _precision(dtype):
            return self.seconds({size: self._matmul(size, dtype) for size in sizes}, repeat)

    def _matmul(self, size: Shape, dtype: str) -> Callable[[], Tensor]:
        m, k, n = size
        return partial(torch.mm, self.random(m, k).to(_torch_dtype(dtype)), self.random(k, n).to(_torch_dtype(dtype)))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device)


def _matmul(bench: _Bench, constants: Constants) -> Constants:
    """The bandwidth comes first, as if the sums of narrow matmuls took no time; rates come from the rest of the time.

    The Triton kernel's rates are in proportion to cuBLAS's.
    """
    overhead = bench.matmuls(bench.dtype, [(8, 8, 8)], REPEAT)[8, 8, 8]
    narrow = bench.matmuls(bench.dtype, bench.sizes.narrow, REPEAT)
    read = {(m, k, n): (m * k + k * n + m * n) * ITEMSIZE[bench.dtype] for m, k, n in narrow}
    bandwidth = statistics.median(read[size] / max(t - overhead, t / 2) for size, t in narrow.items())
    before, flops = constants, {}
    constants = replace(constants, memory_bandwidth=bandwidth, matmul_overhead=overhead)
    if bench.device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(bench.device).multi_processor_count
        constants = replace(constants, num_sms=num_sms, memory_bandwidth=math.inf)
    no_sums = replace(constants, matmul_flops=dict.fromkeys(before.matmul_flops, math.inf))
    for dtype in before.matmul_flops:
        rates: list[float] = []
        for size in bench.sizes.matmuls:
            if not rates or MatmulSize(*size).flops / rates[0] < LONGEST_S:
                t = bench.matmuls(dtype, [size])[size]
                rates.append(MatmulSize(*size).flops / max(t - no_sums.matmul(dtype, 1, *size), t / 2))
        flops[dtype] = statistics.median(rates[1:] or rates)
    fused = {dtype: rate * flops[dtype] / before.matmul_flops[dtype] for dtype, rate in before.fused_flops.items()}
    return replace(constants, matmul_flops=flops, fused_flops=fused, memory_bandwidth=bandwidth)


def _copies(bench: _Bench, constants: Constants) -> Constants:
    slot = _slot_of_a_peer(bench)
    variants: dict[tuple[str, int], Callable[[], Any]] = {}
    for num_bytes in bench.sizes.num_bytes:
        sent = bench.random(bench.num_ranks, num_bytes // 4 // bench.num_ranks // 64, 64)
        arrived = sent.movedim(0, 1)
        variants["copy", num_bytes] = arrived.contiguous
        if num_bytes <= slot.nbytes:
            variants["unpack", num_bytes] = partial(torch.empty(arrived.shape, device=bench.device).copy_, arrived)
            variants["link", num_bytes] = partial(slot[: sent.numel()].view(sent.shape).copy_, sent)
    found = {what: line(times) for what, times in bench.move(variants).items()}
    copy, copy_overhead = found["copy"]
    link, latency = found.get("link", (constants.link_bandwidth, constants.link_latency))  # none fits a small slot
    unpack, _ = found.get("unpack", (constants.unpack_bandwidth, 0.0))
    constants = replace(constants, copy_bandwidth=copy, copy_overhead=copy_overhead, unpack_bandwidth=unpack)
    return replace(constants, link_bandwidth=link, link_latency=latency)


def _slot_of_a_peer(bench: _Bench) -> Tensor:
    ours = bench.ours
    with ours.lock:
        slot_bytes = min(max(bench.sizes.num_bytes), ours.max_slot_bytes)
        workspace = ours.workspace_for(slot_bytes, "fusedcomm.tune", FINGERPRINT)
    start = workspace.layout.slot(workspace.epoch + 1, workspace.slot_bytes)
    peer = workspace.buffers[(ours.rank + 1) % bench.num_ranks]
    return peer[start : start + workspace.slot_bytes].view(torch.float32)


def _collectives(bench: _Bench, constants: Constants) -> Constants:
    """Collectives are called as `unfused` does, on blocks that need no packing, and fitted over the bytes sent."""
    num_ranks, group = bench.num_ranks, (bench.num_ranks, resolve(None)[1])
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "all_to_all": lambda blocks: reference.exchange(blocks, 1, 0, *group),
        "all_gather": lambda blocks: reference.all_gather(blocks[0], 0, *group),
        "reduce_scatter": lambda blocks: reference.reduce_scatter(blocks, "sum", 0, *group),
        "all_reduce": lambda blocks: reference.all_reduce(blocks, "sum", *group),
    }
    data = [bench.random(num_ranks, num_bytes // num_ranks // 4) for num_bytes in bench.sizes.num_bytes]
    latency, bandwidth = {}, {}
    for kind, call in calls.items():
        times = bench.move({(kind, blocks.nbytes): partial(call, blocks) for blocks in data})[kind]
        if kind == "all_reduce":  # the functional all_reduce copies too, which the model counts apart
            times = {num_bytes: max(t - constants.copy(num_bytes), t / 4) for num_bytes, t in times.items()}
        sent = {int(sent_bytes(kind, num_bytes // num_ranks, num_ranks)): t for num_bytes, t in times.items()}
        bandwidth[kind], latency[kind] = line(sent)
    return replace(constants, backend_latency=latency, backend_bandwidth=bandwidth)


def _overheads(bench: _Bench, constants: Constants) -> Constants:
    on_gpu = bench.device.type == "cuda"
    calls = dict.fromkeys(constants.call_overhead, 0.0)
    without = replace(constants, call_overhead=calls, chunk_overhead=0.0)
    names = ["unfused", "chunked"]
    if constants.fused_flops and bench.ours.topology.no_fused is None:
        names.append("fused")
    points: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for op, size, dtype in itertools.product(PROGRAMS, bench.sizes.calls, ("float32", "bfloat16")):
        data = _data(bench, op, size, dtype, names)
        sample = Sample(op, data.size.rows, data.size.k, data.size.n, dtype, dict.fromkeys(names, 0.0), {})
        estimated = sample.estimate(without, bench.num_ranks)
        if (longest := max(estimated.values())) > LONGEST_S:
            continue
        repeat = max(1, min(REPEAT, int(MEASUREMENT_S / longest)))
        times = bench.seconds({name: data.forced(name) for name in names}, repeat, with_host=True)
        bench.samples.append(replace(sample, measured=times))
        if on_gpu and size != bench.sizes.calls[0]:
            continue  # its device may have been slower than its host
        count = bench.num_ranks * (2 if op == "matmul_all_reduce" else 1)
        for name, t in times.items():
            points[name].append((count, t - (0.0 if on_gpu else estimated[name]), t))
    found = {name: max(statistics.median(extra for _, extra, _ in points[name]), LEAST_S) for name in names}
    found["chunked"], chunk = affine(points["chunked"])
    return replace(constants, call_overhead={**constants.call_overhead, **found}, chunk_overhead=chunk)


def exchange_of(op: str, size: MatmulSize, num_ranks: int) -> Exchange:
    """The geometry of a bench's call."""
    x, w = torch.empty(PROGRAMS[op].x_shape(size, num_ranks), device="meta"), torch.empty(size.k, size.n, device="meta")
    return PROGRAMS[op].exchange(x, w, num_ranks)


PARTS = (_matmul, _copies, _collectives, _overheads)


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, "float32" if name == "tf32" else name)


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
    x, y, scale = np.array(points).T
    weights, least = scale**-2, LEAST_S / float(x.max())
    b, a = np.polyfit(x, y, 1, w=1 / scale) if np.ptp(x) else (0.0, 0.0)
    if b < least:
        return max(float(np.average(y, weights=weights)), LEAST_S), least
    if a < LEAST_S:
        return LEAST_S, max(float((weights * x * y).sum() / (weights * x * x).sum()), least)
    return float(a), float(b)


def _data(bench: _Bench, op: str, size: Shape, dtype: str, names: Sequence[str]) -> OpData:
    """A call, its values checked with every algorithm of ``names``; each of them must be able to run."""
    program = PROGRAMS[op]
    data = OpData(program, program.divisible(MatmulSize(*size), bench.num_ranks), _torch_dtype(dtype), bench.device)
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


def write_for_all(constants: Constants, key: dict[str, Any], pg: ProcessGroup) -> None:
    """A collective: every rank writes, as hosts need not share the folder, and then reads. Raises OSError on all ranks
    alike. A shared folder is safe, as a file is replaced in one step.
    """
    error = ""
    try:
        tuned.write(constants, key)
    except OSError as failure:
        error = f"cannot write {failure.filename}: {failure.strerror}"
    dist.barrier(pg)
    own, store = {"error": error, "same": tuned.read(key) == constants}, group.store(pg, f"tune/{key['device_type']}")
    facts = agree(store, pg.rank(), pg.size(), own, what="fusedcomm tune")
    for r, fact in enumerate(facts):
        if fact["error"]:
            raise OSError(f"rank {r} {fact['error']}")
    if others := [r for r, fact in enumerate(facts) if not fact["same"]]:
        raise OSError(f"ranks {others} do not read what they wrote to {env.cache_dir()}")
