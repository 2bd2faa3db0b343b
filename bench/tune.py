"""What `fusedcomm tune` measures: the constants of `cost` on this machine, in the ranks of a group, all at once.

    matmul      the rate is the median over sizes, whole and cut as chunks are; the bandwidth of memory comes from few
                rows and from few columns, the overhead from a tiny matmul
    copies      into new memory, to a peer's slot, from a slot into a result; and collectives, by kind: seconds =
                latency + bytes / bandwidth, fitted over sizes by least squares of relative errors, neither below 0
    fused       on GPUs: the rate of a call with much arithmetic per byte sent, and how fast one with little stores
    overheads   how much longer small calls, forced to each algorithm, take than their estimates without overheads: the
                median, and for chunked the same fit over the number of chunks (matmul_all_reduce has twice as many)

A group without workspace, as one across hosts, measures what unfused and pipelined take: copies between tensors of its
own, and for a piece of pipelined, by its number of pieces, how much longer it takes than its estimate.

Times are those of `bench.timing`: the slowest rank's, the median over rounds, so the constants are equal on all ranks.

A reference, one matmul, is measured among the variants of every measurement. How much its times differ is the noise of
all of them. Where the noise is large, or more bytes take less time, nothing is kept, because the machine did other
things too. Nor is anything kept where the estimates choose slow algorithms for the calls that were measured.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm import env, reference
from fusedcomm.algorithms import pipelined
from fusedcomm.algorithms.planner import force_algorithm
from fusedcomm.bench.estimates import estimates, exchange_of, names_of
from fusedcomm.bench.fits import LEAST_S, Unreliable, affine, line
from fusedcomm.bench.op_bench import OpData
from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.bench.timing import check_values, measure
from fusedcomm.cost import in_pieces, model, tuned
from fusedcomm.cost.model import ITEMSIZE, KINDS, Constants
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.runtime import group
from fusedcomm.runtime.group import resolve
from fusedcomm.runtime.group_member import Member, WorkspaceUnavailable
from fusedcomm.runtime.vote import agree
from fusedcomm.runtime.workspace import Call

REPEAT = 20  # calls in a measurement, where one takes less time than the start of a measurement differs by
MEASUREMENT_S = 0.02  # how long repeated calls take together: the longer they are, the fewer
LONGEST_S = 0.1  # a call that takes longer is not measured: CPUs can be slow in 16 bit
ROUNDS, QUICK_ROUNDS = 7, 3
REFERENCE_CALLS = 8  # calls of the reference in one measurement: some milliseconds on a CPU
FEWEST_REFERENCES = 10
MOST_NOISE = 0.5  # share of the reference's median; two quiet cores of a cloud had 0.2 to 0.4, busy ones 0.8 to 1.2
MOST_LOSS = 0.1  # share of the time of calls; chosen: algorithms that are this close are equally good
FINGERPRINT = 0x7475  # the fingerprint of the call that makes the workspace large enough
Copies = Callable[[int], dict[tuple[str, int], Callable[[], Any]]]  # by what is copied, for a number of bytes
PIECES = (2, 8, 32)  # the numbers of pieces that are measured


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
    samples = tuple(replace(each, estimated=_estimated(each, constants, ours.group_size)) for each in bench.samples)
    return Tuned(constants, tuple(bench.points), samples, noise(bench.references))


def num_hosts_of(ours: Member) -> int:
    """The hosts of a group that can have no workspace, else 0: `tuned.key` tells what they measure by it."""
    return 0 if ours.topology.no_workspace is None else ours.topology.num_hosts


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
        self.num_hosts = num_hosts_of(ours)
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
    variants, sizes = _copies_between_tensors(bench) if bench.num_hosts else _copies_of_slots(bench)
    times = bench.seconds({key: each for num_bytes in sizes for key, each in variants(num_bytes).items()})
    bench.points += [Point(what, num_bytes, t) for (what, num_bytes), t in times.items()]
    fits = {
        name: line({num_bytes: t for (what, num_bytes), t in times.items() if what == name})
        for name in dict.fromkeys(what for what, _ in times)
    }
    bandwidth, latency = fits.get("link", (constants.link_bandwidth, constants.link_latency))
    return replace(
        constants,
        copy_bandwidth=fits["copy"][0],
        copy_overhead=fits["copy"][1],
        unpack_bandwidth=fits["unpack"][0],
        link_bandwidth=bandwidth,
        link_latency=latency,
    )


def _copies_of_slots(bench: _Bench) -> tuple[Copies, list[int]]:
    from fusedcomm.algorithms.transport import transport_of

    ours, num_ranks = bench.ours, bench.num_ranks
    with ours.lock:
        slot_bytes = min(max(bench.sizes.num_bytes), ours.max_slot_bytes)
        workspace = ours.workspace_for(slot_bytes, "fusedcomm.tune", FINGERPRINT)
    start = workspace.layout.slot(workspace.epoch + 1, workspace.slot_bytes)
    transport, peer = transport_of(workspace), (ours.rank + 1) % num_ranks

    def slot(rank: int, num_bytes: int) -> Tensor:
        return workspace.buffers[rank][start : start + num_bytes].view(torch.float32)

    def variants(num_bytes: int) -> dict[tuple[str, int], Callable[[], Any]]:
        t, rows = bench.bytes(num_bytes), num_bytes // 4 // num_ranks // 64
        blocks = t[: rows * num_ranks * 64].view(rows, num_ranks, 64)
        arrived = slot(ours.rank, rows * num_ranks * 64 * 4).view(num_ranks, rows, 64).movedim(0, 1)
        return {
            ("copy", num_bytes): lambda: blocks.movedim(1, 0).contiguous(),
            ("link", num_bytes): lambda: slot(peer, num_bytes).copy_(t),
            ("unpack", num_bytes): lambda: transport.result(t, blocks.shape).copy_(arrived),
        }

    return variants, [num_bytes for num_bytes in bench.sizes.num_bytes if num_bytes <= workspace.slot_bytes]


def _copies_between_tensors(bench: _Bench) -> tuple[Copies, list[int]]:
    """What pipelined copies: from what has come into new memory, which is its result."""

    def variants(num_bytes: int) -> dict[tuple[str, int], Callable[[], Any]]:
        rows = num_bytes // 4 // bench.num_ranks // 64
        arrived = bench.random(bench.num_ranks, rows, 64).movedim(0, 1)
        return {
            ("copy", num_bytes): lambda: arrived.contiguous(),
            ("unpack", num_bytes): lambda: torch.empty(arrived.shape, device=bench.device).copy_(arrived),
        }

    return variants, list(bench.sizes.num_bytes)


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
    if bench.num_hosts or not constants.fused_flops:
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
    apart = bench.num_hosts > 0
    if apart:
        constants = replace(constants, chunk_overhead=0.0, piece_overhead=_of_a_piece(bench, constants))
    without = replace(constants, call_overhead=dict.fromkeys(constants.call_overhead, 0.0), chunk_overhead=0.0)
    names = [each for each in names_of(constants, apart) if each != "fused" or bench.ours.topology.no_fused is None]
    points: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for op, size, dtype in itertools.product(KINDS, bench.sizes.calls, ("float32", "bfloat16")):
        with _planned_by(bench, without):
            data = _data(bench, op, size, dtype, names)
            sample = Sample(op, data.size.rows, data.size.k, data.size.n, dtype, dict.fromkeys(names, 0.0), {})
            estimated = _estimated(sample, without, bench.num_ranks)
            longest = max(estimated.values())
            if longest > LONGEST_S:
                continue
            repeat = max(1, min(REPEAT, int(MEASUREMENT_S / longest)))
            times = bench.seconds({name: data.forced(name) for name in names}, repeat)
        bench.samples.append(replace(sample, measured=times))
        num_chunks = bench.num_ranks * (2 if op == "matmul_all_reduce" else 1)
        for name in names:
            points[name].append((num_chunks, times[name] - estimated[name], times[name]))
    call = {name: max(statistics.median(y for _, y, _ in points[name]), LEAST_S) for name in names}
    if not apart:
        call["chunked"], chunk = affine(points["chunked"])
        constants = replace(constants, chunk_overhead=chunk)
    known = {name: call.get(name, before) for name, before in constants.call_overhead.items()}
    return replace(constants, call_overhead=known)


def _of_a_piece(bench: _Bench, constants: Constants) -> float:
    """What a piece takes beside its estimate, chunks included: the median over small calls and numbers of pieces."""
    without, op = replace(constants, chunk_overhead=0.0, piece_overhead=0.0), "matmul_all_to_all"
    found = []
    for sizes in bench.sizes.calls:
        size = PROGRAMS[op].divisible(MatmulSize(*sizes), bench.num_ranks)
        exchange = exchange_of(op, size, bench.num_ranks)
        x, w = bench.random(*PROGRAMS[op].x_shape(size, bench.num_ranks)), bench.random(size.k, size.n)
        calls = {num_pieces: _in_pieces(exchange, num_pieces, x, w) for num_pieces in PIECES}
        for num_pieces, t in bench.seconds(calls).items():
            estimate = in_pieces.seconds(op, exchange, "float32", without, num_pieces)
            found.append((t - estimate) / num_pieces)
    return max(statistics.median(found), LEAST_S)


def _in_pieces(exchange: Exchange, num_pieces: int, x: Tensor, w: Tensor) -> Callable[[], Any]:
    call = Call("matmul_all_to_all", 0, exchange, group_name=resolve(None)[1], num_rounds=num_pieces)
    return lambda: pipelined.push_matmul(call, x, w, None)


@contextlib.contextmanager
def _planned_by(bench: _Bench, constants: Constants) -> Iterator[None]:
    """Inside, a group without workspace cuts calls into as many pieces as its new constants say."""
    ours, before = bench.ours, bench.ours.topology
    if bench.num_hosts:
        ours.topology = replace(before, constants=constants, measured_apart=True)
    try:
        yield
    finally:
        ours.topology = before


PARTS = (_matmul, _copies, _collectives, _fused, _overheads)
NUM_PARTS = len(PARTS)


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, "float32" if name == "tf32" else name)


def _estimated(sample: Sample, constants: Constants, num_ranks: int) -> dict[str, float]:
    size = MatmulSize(sample.rows, sample.k, sample.n)
    return estimates(sample.op, size, sample.dtype, constants, num_ranks, list(sample.measured))


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


def write_for_all(constants: Constants, device: torch.device, pg: ProcessGroup, num_hosts: int = 0) -> Path:
    """A collective: every rank writes, as hosts need not share the folder, and then reads. Raises OSError on all ranks
    alike.

    A file is replaced in one step, so ranks that share a folder do each other no harm.
    """
    rank, group_size, error = pg.rank(), pg.size(), ""
    try:
        tuned.write(constants, device, group_size, num_hosts)
    except OSError as failure:
        error = f"cannot write {failure.filename}: {failure.strerror}"
    dist.barrier(pg)
    found = tuned.read(device, group_size, num_hosts)
    own = {"error": error, "digest": found.digest if found else None}
    facts = agree(group.store(pg, f"tune/{device.type}"), rank, group_size, own, what="fusedcomm tune")
    for r, fact in enumerate(facts):
        if fact["error"]:
            raise OSError(f"rank {r} {fact['error']}")
    others = [r for r, fact in enumerate(facts) if fact["digest"] != constants.digest]
    if others:
        raise OSError(f"ranks {others} do not read what they wrote to {env.cache_dir()}")
    return tuned.path_of(tuned.key(device, group_size, num_hosts))
