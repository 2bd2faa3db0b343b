"""Seconds of a call by each algorithm, on one rank, from a few constants of the machine: what the planner compares.

There are R ranks. A chunk is what goes to one peer; parts that differ in size count as if all were the largest, so that
all ranks find the same. Each round of a workspace takes overheads and latencies again. Ranks that compete for one
memory are left out.

    matmul      the roofline: max(FLOP / rate, bytes / memory) + overhead; the sum on a CPU core, which does one or the
                other. FLOP are those of whole tiles: a GPU computes waves of them, 128 x 128 or 64 x 64, each with an
                overhead, with K split where they leave SMs idle; a CPU core 16 rows
    copy        bytes of the result / bandwidth + overhead; `unpack` from a slot into the result
    collective  Hockney: latency + bytes that a rank sends / bandwidth, by kind
    unfused     matmul + collective + copies of the layout
    chunked     R matmuls of a chunk, c, beside R - 1 transfers, l = latency + chunk / link, whose last signal takes s:
                  push    max(R c, s + c + (R - 1) l, s + (R - 1) c + l) + copy-out of R - 1 chunks; on a CPU, whose
                          matmuls write to the peers, R c + copy-out
                  gather  max(R c, s + (R - 1) l + c); their sum on a CPU
                  one matmul for all chunks (few rows, or sums over sources in 16 bits): first all transfers and the
                  copy-out; on a GPU, as an all_reduce, in pieces of which each hides the next
    fused       max(matmul of the kernel, bytes sent / stores) + link latency + copy-out. In a gather along rows cuBLAS
                takes the own chunk; along K only the last wave of tiles has all chunks. Runs too short for copy engines
                are packed in front of it. Few rows: cuBLAS's matmul, not beside, and a copy-out
    pipelined   `in_pieces`
    reduce      (R + 1) / 2 copies in place of the copy-out; an all_reduce then sends the sum to R - 1 peers, but where
                whole terms go to all (few rows with a norm behind), which is matmul + sends + reduce
    host        seconds to issue a call, and each of its chunks: on a CPU they come on top, a GPU works beside
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from fusedcomm.plan.cost import links
from fusedcomm.plan.cost.links import INTER, INTRA, Reach, sent_bytes
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.cut import Cut
from fusedcomm.plan.geometry.exchange import FEW_ROWS, LEAST_COPIED, Exchange, num_pieces

_OPS = {  # of each kind of collective, beside the collective alone
    "all_to_all": ("matmul_all_to_all", "all_to_all_matmul", "scaled_matmul_all_to_all", "scaled_all_to_all_matmul"),
    "all_gather": ("all_gather_matmul", "scaled_all_gather_matmul"),
    "reduce_scatter": ("matmul_reduce_scatter", "matmul_reduce_scatter_norm", "scaled_matmul_reduce_scatter"),
    "all_reduce": ("matmul_all_reduce", "matmul_all_reduce_norm", "all_reduce_norm", "scaled_matmul_all_reduce"),
}
KINDS = {op: kind for kind, ops in _OPS.items() for op in (*ops, kind)}
FLOAT8, WIDE_FLOAT8, FAST_FLOAT8, BLOCKS = "float8", "wide float8", "fast float8", "float8 in blocks"
# Rates over those of bfloat16, of cuBLAS and the Triton kernel, on an H200. Torch scales and rounds wide products by
# kernels behind cuBLAS (chosen), and dequantises blocks.
_FLOAT8_RATES = {FLOAT8: (2.0, 1.18), WIDE_FLOAT8: (1.0, 1.18), FAST_FLOAT8: (2.0, 2.0), BLOCKS: (0.0, 0.9)}
ITEMSIZE = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2, **dict.fromkeys(_FLOAT8_RATES, 1)}
DEFAULT, TUNED = "default", "tuned"
SMALL_BYTES = 64 << 10  # what arrives from a peer in a few microseconds, a launch's time; chosen, not measured
_USUAL_WIDTH = {"cuda": 4096, "cpu": 1024}  # K, and N; chosen
_GPU_TILES, _CPU_TILE_ROWS = (128, 64), 16
_OF_A_ROUND = "matmul_overhead", "copy_overhead", "link_latency", "signal_latency", "chunk_overhead"
_COPIED = 1 / 2  # of the host's time for a chunk: copy and signal alone, as a fused gather by copy engines issues them
_MIN_SPLIT_K = 512  # the shortest part of K that cuBLAS gives to an SM of its own
_RAGGED = 0.55  # rate of a fused kernel where K or columns are no multiple of 16, on an H200
SUMMED = {"cuda": 0.75, "cpu": 1.0}  # rate of a sum to `unpack`'s: 3.14, 2.84, 2.86 to 3.87 TB/s for R = 2, 4, 8


@dataclass(frozen=True)
class Constants:
    """Rates of one rank's machine, in seconds, bytes per second and FLOP per second.

    Mappings go by dtype, kind of collective or algorithm. A dtype is torch's name, or "tf32" for float32 whose matmuls
    may round their inputs.
    """

    source: str  # DEFAULT or TUNED
    device_type: str
    num_sms: int  # 1 on a CPU
    matmul_flops: Mapping[str, float]
    fused_flops: Mapping[str, float]  # of the Triton kernel; empty on a CPU, where only tests run it
    memory_bandwidth: float
    matmul_overhead: float
    wave_overhead: Mapping[str, float]  # of a wave of tiles beside its sums, by cuBLAS ("unfused") and Triton ("fused")
    copy_bandwidth: float
    copy_overhead: float
    unpack_bandwidth: float
    link_bandwidth: float
    link_latency: float
    signal_latency: float  # of a signal behind a copy, beside a matmul; 0 on a CPU
    store_bandwidth: float
    backend_bandwidth: Mapping[str, float]
    backend_latency: Mapping[str, float]
    call_overhead: Mapping[str, float]  # of the host
    chunk_overhead: float  # likewise, of each chunk of `chunked`
    piece_overhead: float  # likewise, of a piece of `pipelined` beside its chunks

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def __hash__(self) -> int:  # quick, because the plan of every call needs it
        return hash(self.digest)

    @staticmethod
    def from_json(data: Any, source: str, device_type: str) -> Constants:
        """Raises ValueError unless ``data`` is what ``asdict`` gives for such constants that a machine can have."""
        _check("", data, asdict(DEFAULTS[device_type]) | {"source": source})
        return Constants(**data)

    @property
    def on_cpu(self) -> bool:
        return self.device_type == "cpu"

    def matmul(self, dtype: str, batches: float, m: float, k: float, n: float, fused: bool = False) -> float:
        """Seconds of [m, k] @ [k, n], ``batches`` times; in the Triton kernel if ``fused``."""
        rates = self.fused_flops if fused else self.matmul_flops
        if dtype in _FLOAT8_RATES:
            over = 0.0 if self.on_cpu else _FLOAT8_RATES[dtype][fused]
            rates = {dtype: over * rates["bfloat16"] if over else rates["float32"]}
        rate = rates[dtype]
        memory = batches * (m * k + k * n + m * n) * ITEMSIZE[dtype] / self.memory_bandwidth
        if self.on_cpu:
            rows = math.ceil(m / _CPU_TILE_ROWS) * _CPU_TILE_ROWS
            return 2 * batches * rows * k * n / rate + memory + self.matmul_overhead
        if fused and (k % 16 or n % 16):
            rate *= _RAGGED
        for tile in _GPU_TILES:
            num_tiles = batches * math.ceil(m / tile) * math.ceil(n / tile)
            if num_tiles >= self.num_sms:
                break
        splits = max(1, min(self.num_sms // max(num_tiles, 1), 1 if fused else k // _MIN_SPLIT_K))
        wave = 2 * k * self.num_sms * tile**2 / splits / rate + self.wave_overhead["fused" if fused else "unfused"]
        return max(math.ceil(num_tiles / self.num_sms) * wave, memory) + self.matmul_overhead

    def copy(self, num_bytes: float) -> float:
        return num_bytes / self.copy_bandwidth + self.copy_overhead

    def unpack(self, num_bytes: float) -> float:
        return num_bytes / self.unpack_bandwidth + self.copy_overhead

    def reduce(self, chunk_bytes: float, group_size: int) -> float:
        """Seconds of a sum of group_size chunks: it reads all of them, and writes one."""
        return self.unpack((group_size + 1) / 2 * chunk_bytes / SUMMED[self.device_type])

    def transfer(self, num_bytes: float) -> float:
        return num_bytes / self.link_bandwidth + self.link_latency

    def collective(self, kind: str, chunk_bytes: float, group_size: int) -> float:
        return sent_bytes(kind, chunk_bytes, group_size) / self.backend_bandwidth[kind] + self.backend_latency[kind]


def _check(name: str, value: Any, default: Any) -> None:
    """Raises ValueError unless ``value`` is within a factor of a million of ``default``: no machine has other numbers.

    Overheads and latencies may be from 0 to 1 second; texts must be equal.
    """
    if isinstance(default, dict):
        if not isinstance(value, dict) or sorted(value) != sorted(default):
            raise ValueError(f"{name or 'constants'} must have exactly the keys {', '.join(default)}")
        for key in default:
            _check(f"{name}[{key}]" if name else key, value[key], default[key])
    elif isinstance(default, str):
        if value != default:
            raise ValueError(f"its {name} must be {default}, got {value!r:.40}")
    else:
        is_time = name.partition("[")[0].endswith(("overhead", "latency"))
        small, large = (0.0, 1.0) if is_time else (default / 1e6, default * 1e6)
        kinds = (int,) if isinstance(default, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not small <= value <= large:  # NaN is not
            raise ValueError(f"{name} must be a number in [{small:g}, {large:g}], got {value!r:.40}")


# "cuda", behind each line: [M] one H200, 2026-11-26, bench/results/gpu-h200-2026-11-26-kernels.json and -native.json;
# [P] published for NVLink 4 or in proportion to it; [C] chosen. "cpu": two ranks of one thread on 2 cores of an AMD
# EPYC, torch 2.13, gloo, 2026-11-21 and 24: the roofs behind docs/benchmark.md, `fusedcomm tune`, and for calls and
# chunks `fusedcomm bench overhead`, rounded.
_NUMBERS: dict[str, tuple[Any, Any]] = {
    "num_sms": (132, 1),
    # [M] bfloat16, six shapes of K 1024 to 8192 within 2 %; float32 and tf32 in proportion [C]
    "matmul_flops": (
        {"float32": 52e12, "tf32": 415e12, "float16": 855e12, "bfloat16": 855e12},
        {"float32": 100e9, "float16": 2e9, "bfloat16": 400e9},
    ),
    "fused_flops": ({"float32": 27e12, "tf32": 360e12, "float16": 855e12, "bfloat16": 855e12}, {}),  # [M] likewise
    "memory_bandwidth": (4.1e12, 8e9),  # [M] a copy
    "matmul_overhead": (3e-6, 2e-6),  # [M] 1024^3: 6.3 us, fused 7.6 to 9.1
    "wave_overhead": ({"unfused": 0.6e-6, "fused": 1e-6}, {"unfused": 0.0, "fused": 0.0}),  # [M] as matmul_flops
    "copy_bandwidth": (2.05e12, 2.5e9),  # [M] 4.12 TB/s; each byte is read and written
    "copy_overhead": (3e-6, 20e-6),  # [C] a kernel's
    "unpack_bandwidth": (1.9e12, 10e9),  # [M] unpack 3.87, pack 3.72 TB/s
    # [P] copy engines on twice this NVLink send 335, 560, 695 GB/s at 4, 16, 64 MB: 755 GB/s behind 7 us
    "link_bandwidth": (375e9, 10e9),
    "link_latency": (7e-6, 20e-6),
    "signal_latency": (30e-6, 0.0),  # [M] a stream write beside a matmul that fills the GPU
    "store_bandwidth": (250e9, 10e9),  # [C] less than copy engines
    "backend_bandwidth": (  # [P] NCCL
        {"all_to_all": 330e9, "all_gather": 360e9, "reduce_scatter": 360e9, "all_reduce": 450e9},
        {"all_to_all": 1e9, "all_gather": 0.75e9, "reduce_scatter": 0.5e9, "all_reduce": 1.2e9},
    ),
    "backend_latency": (dict.fromkeys(KINDS.values(), 25e-6), dict.fromkeys(KINDS.values(), 500e-6)),  # [C]
    # [M] public calls of 2 processes (-native), torch.mm 14 to 27 us: fused 54 to 110, chunked 115 to 132, of which a
    # chunk is half a torch.mm by bench/results/host-cost.json. [C] unfused: a torch.mm and a collective of NCCL
    "call_overhead": ({"unfused": 65e-6, "chunked": 100e-6, "fused": 65e-6}, {"unfused": 200e-6, "chunked": 5e-6}),
    "chunk_overhead": (10e-6, 2e-6),
    "piece_overhead": (80e-6, 300e-6),  # [C]
}
DEFAULTS = {
    device_type: Constants(DEFAULT, device_type, **{name: values[i] for name, values in _NUMBERS.items()})
    for i, device_type in enumerate(("cuda", "cpu"))
}


@functools.lru_cache(maxsize=1024)  # by the exchange's identity: `geometry` keeps one for the shapes of a call
def estimate(
    op: str, exchange: Exchange, dtype: str, constants: Constants, multiplied: str | None = None, num_rounds: int = 1
) -> Mapping[str, float]:
    """Seconds by algorithm, for those that ``constants`` has numbers for. Sizes must be plain ints.

    ``dtype``: of the payload. ``multiplied``: of x and w, if it is another.
    """
    pieces = TimedCall(op, exchange, dtype, constants, multiplied).pieces  # which the formulas of `chunked` count
    times = {"unfused": 1, "chunked": max(1, num_rounds / pieces), "fused": max(num_rounds, pieces)}
    found: dict[str, float] = {}
    for name in times if constants.fused_flops else ("unfused", "chunked"):
        of_rounds = replace(constants, **{each: times[name] * getattr(constants, each) for each in _OF_A_ROUND})
        found[name] = getattr(TimedCall(op, exchange, dtype, of_rounds, multiplied), name)()
    return found


@functools.lru_cache(maxsize=1024)
def usual_call(kind: str, chunk_numel: int, group_size: int, device_type: str) -> tuple[str, Exchange]:
    """(op, exchange) of a call with such chunks, and the matmul of a usual model beside it.

    Ranks decide by it together, whatever matmul each of them has.
    """
    width = max(1, min(_USUAL_WIDTH[device_type], chunk_numel))
    op, rows, w = _OPS[kind][0], -(-chunk_numel // width), (width, width)
    part, whole = (rows, width), (group_size * rows, width)
    if kind == "all_to_all":
        return op, shapes.matmul_all_to_all(part, (width, group_size * width), None, 0, 1, group_size)
    if kind == "all_gather":
        return op, shapes.all_gather_matmul(part, [w], 0, group_size)
    if kind == "reduce_scatter":
        return op, shapes.matmul_reduce_scatter(whole, w, "sum", 0, group_size)
    return op, shapes.matmul_all_reduce(whole, w, "sum", group_size)


@functools.lru_cache(maxsize=64)
def across_hosts(constants: Constants, at: Reach, inter: float | None = None) -> Constants:
    """With collectives as `links` estimates them where a group spans hosts, or GPUs without NVLink.

    ``inter``: bytes per second of one rank between hosts, if they are known.
    """
    gpus = links.PCIE_BANDWIDTH if at.link == links.PCIE else links.INTER_BANDWIDTH
    inter = inter or (links.CPU_INTER_BANDWIDTH if constants.on_cpu else gpus)
    rates, latencies = {}, {}
    for kind, inside in constants.backend_bandwidth.items():
        bandwidth = {INTRA: inside, INTER: inter}
        rates[kind] = links.rate(kind, at, bandwidth)
        latencies[kind] = max(constants.backend_latency[kind], links.seconds(kind, 0.0, at, bandwidth)[0])
    return replace(constants, backend_bandwidth=rates, backend_latency=latencies)


def pads(kind: str, cut: Cut, outer_bytes: int, device_type: str) -> bool:
    """Whether `unfused` pads parts of different sizes to the largest, in place of an all_to_all of the parts as they
    are, by the default constants: the same on all ranks, and in every graph.

    A GPU sends parts one by one. On CPUs over gloo padding took 1.1 to 3 times as long from 2 MiB on, with 2 and 3
    ranks. ``outer_bytes``: bytes for each element of the dims that are cut.
    """
    size, constants = cut.group_size, DEFAULTS[device_type]
    if size == 1 or constants.on_cpu:
        return False
    gathered, scattered = ((1,) * size if parts is None else parts.sizes for parts in cut[1:])
    largest, num_gathered, num_scattered = outer_bytes * max(gathered) * max(scattered), sum(gathered), sum(scattered)
    padded = constants.collective(kind, largest, size)
    padded += constants.copy(largest if kind == "all_gather" else size * largest)
    by_rank = zip(gathered, scattered, strict=True)
    moved = max(max(g * num_scattered, s * num_gathered) - g * s for g, s in by_rank)  # sent or received
    as_they_are = constants.collective("all_to_all", outer_bytes * moved / (size - 1), size)
    as_they_are += constants.copy(outer_bytes * max(gathered) * num_scattered) + (size - 1) * constants.link_latency
    if kind == "reduce_scatter":
        as_they_are += constants.reduce(largest, size)
    return padded < as_they_are


def decode_reason(op: str, exchange: Exchange, chunk_bytes: int, constants: Constants) -> str | None:
    """Why a call on a GPU has nothing to hide its exchange behind, as in decoding; None if it has, or is measured."""
    if constants.on_cpu or constants.source != DEFAULT:
        return None
    few_rows = KINDS[op] != "all_to_all" and exchange.chunk_numel < FEW_ROWS * _USUAL_WIDTH[constants.device_type]
    if few_rows or chunk_bytes < SMALL_BYTES:
        return f"{chunk_bytes / 1024:.3g} KiB per peer, a decode size: nothing to hide, default numbers"
    return None


class TimedCall:
    """The formulas of this module for a call."""

    def __init__(
        self, op: str, exchange: Exchange, dtype: str, constants: Constants, multiplied: str | None = None
    ) -> None:
        self.chunk_bytes, in_pieces = exchange.chunk_numel * ITEMSIZE[dtype], exchange.comes_in_pieces(ITEMSIZE[dtype])
        self.pieces = num_pieces(self.chunk_bytes) if in_pieces and not constants.on_cpu else 1  # of `chunked`
        self.exchange = exchange = exchange.for_all
        self.kind, self.num_ranks, self.dtype, self.constants = KINDS[op], exchange.group_size, dtype, constants
        self.multiplied = multiplied or dtype
        self.ns = [shape[-1] for shape in exchange.out_shapes]  # of each w
        if not exchange.gathers:
            self.ns = [math.prod(exchange.shape[exchange.num_lead :])]
        self.to_all = exchange.gathers and self.kind == "all_reduce"  # whole terms, which every rank adds up
        if exchange.is_plain or (self.to_all and exchange.k == 0):
            self.ns = []
        self.at_once = exchange.few_rows or exchange.is_plain  # one matmul for all chunks, or none
        float8_by_kernel = _FLOAT8_RATES if exchange.gathers else (BLOCKS,)
        self.by_cublas = exchange.by_cublas and self.multiplied not in float8_by_kernel
        self.all_bytes = self.num_ranks * self.chunk_bytes

    def unfused(self) -> float:
        constants = self.constants
        payload = self.chunk_bytes if self.to_all else self.all_bytes
        exchange = constants.collective(self.kind, payload / self.num_ranks, self.num_ranks)
        exchange += self._num_layout_copies() * constants.copy(payload)
        return self._issued("unfused", self.matmul() + exchange)

    def chunked(self) -> float:
        if self.to_all:
            sends = self.constants.signal_latency + (self.num_ranks - 1) * self.constants.transfer(self.chunk_bytes)
            return self._issued("chunked", self._sum_of_all(sends), self.num_ranks)
        num_chunks = self.num_ranks * self.pieces * (2 if self.kind == "all_reduce" else 1)
        device = self._chunked_gather() if self.exchange.gathers else self._chunked_push()
        return self._issued("chunked", device, num_chunks)

    def fused(self) -> float:
        constants, sent = self.constants, (self.num_ranks - 1) * self.chunk_bytes
        stores = sent / constants.store_bandwidth
        again = constants.copy_overhead + stores + constants.link_latency
        if self.to_all:
            return self._issued("fused", self._sum_of_all(again))
        if not self.exchange.gathers:
            matmul = max(self.chunk_matmul(self.num_ranks, fused=True), stores)
            if self.by_cublas:
                matmul = self.matmul() + constants.copy_overhead + stores
            after = constants.link_latency + self._after(self.chunk_bytes, self.num_ranks, again)
            return self._issued("fused", matmul + after)
        by_copy = self.exchange.sent_run * ITEMSIZE[self.dtype] >= LEAST_COPIED
        device = constants.link_latency + self._fused_gather(sent, by_copy)
        return self._issued("fused", device, by_copy * _COPIED * self.num_ranks)

    def _sum_of_all(self, sends: float) -> float:
        return self.matmul() + sends + self.constants.reduce(self.chunk_bytes, self.num_ranks)

    def _issued(self, algorithm: str, device: float, num_chunks: float = 0.0) -> float:
        """The call's seconds, of those that the device takes and those that its host takes to issue it.

        Of two calls whose host takes as long, the one that keeps a GPU for less time is better: graphs need no host.
        """
        host = self.constants.call_overhead[algorithm] + num_chunks * self.constants.chunk_overhead
        return host + device if self.constants.on_cpu else max(host, device) + min(host, device) / 1000

    def _fused_gather(self, sent: float, by_copy: bool) -> float:
        constants, rows = self.constants, not self.exchange.splits_columns
        sends = sent / (constants.link_bandwidth if by_copy else constants.store_bandwidth)
        if self.by_cublas or self.exchange.is_plain:
            return constants.copy_overhead + sends + constants.unpack(self.all_bytes) + self.matmul()
        if rows:
            matmul = self.chunk_matmul() + self.chunk_matmul(self.num_ranks - 1, fused=True)
        else:
            matmul = self.matmul(fused=True)
        if not by_copy:  # the own chunk of K is packed too
            packed = 0.0 if rows else self.all_bytes / constants.unpack_bandwidth
            return constants.copy_overhead + max(sends, packed) + matmul
        if rows:
            return constants.copy_overhead + max(matmul, sends)
        return constants.copy(self.chunk_bytes) + matmul + max(0.0, sends - matmul / self._waves())

    def _chunked_push(self) -> float:
        constants, others, more = self.constants, self.num_ranks - 1, self.pieces - 1
        sent, signal = self.chunk_bytes / self.pieces, constants.signal_latency
        transfer, after = constants.transfer(sent), self._after(sent, others)  # the own chunk is where it belongs
        if self.exchange.multiplies_once or self.at_once:
            sends = (others + constants.on_cpu) * transfer
            return self.matmul() + sends + signal + after + more * (others * transfer + after)
        each = self.chunk_matmul(pieces=self.pieces)
        matmuls = self.num_ranks * each
        piece = max(matmuls, signal + each + others * transfer, signal + others * each + transfer)
        return (matmuls if constants.on_cpu else piece) + after + more * max(matmuls, others * transfer + after)

    def _chunked_gather(self) -> float:
        constants = self.constants
        transfers = (self.num_ranks - 1) * constants.transfer(self.chunk_bytes) + constants.signal_latency
        if self.at_once or self.exchange.takes_all(ITEMSIZE[self.dtype]):
            arrival, matmul = transfers + constants.unpack(self.all_bytes), self.matmul()
            return arrival / self.pieces + max(matmul, (1 - 1 / self.pieces) * arrival + matmul / self.pieces)
        each, num = self.chunk_matmul(), self.num_ranks
        return transfers + num * each if constants.on_cpu else max(num * each, transfers + each)

    def _after(self, chunk_bytes: float, num_unpacked: int, again: float = 0.0) -> float:
        """The copy-out of chunks, or their sum, which an all_reduce sends (``again``: by a kernel) and copies out."""
        constants, size = self.constants, self.num_ranks
        if self.kind == "all_to_all":
            return constants.unpack(num_unpacked * chunk_bytes)
        reduced = constants.reduce(chunk_bytes, size)
        if self.kind == "all_reduce":
            reduced += (again or (size - 1) * constants.transfer(chunk_bytes)) + constants.unpack(size * chunk_bytes)
        return reduced

    def matmul(self, pieces: int = 1, fused: bool = False) -> float:
        rows = self.exchange.num_rows / pieces / (self.num_ranks if self.to_all else 1)
        sizes = (self.exchange.num_batches, rows, self.exchange.k)
        return sum(self.constants.matmul(self.multiplied, *sizes, n, fused) for n in self.ns)

    def chunk_matmul(self, num_chunks: int = 1, pieces: int = 1, fused: bool = False) -> float:
        """Seconds of num_chunks in one kernel: tiles end with the chunks, and rows are cut into pieces."""
        exchange = self.exchange
        batches, m, k, part = float(num_chunks * exchange.num_batches), exchange.num_rows / pieces, exchange.k, 1
        if exchange.splits_rows:
            m /= self.num_ranks
        elif not exchange.splits_columns:
            batches /= self.num_ranks
        elif exchange.gathers:
            k //= self.num_ranks
        else:
            part = self.num_ranks
        return sum(self.constants.matmul(self.multiplied, batches, m, k, n / part, fused) for n in self.ns)

    def _waves(self) -> int:
        """The number of waves in which the SMs compute the result, each one tile per wave."""
        rows = self.exchange.num_batches * math.ceil(self.exchange.num_rows / _GPU_TILES[0])
        return sum(max(1, math.ceil(rows * math.ceil(n / _GPU_TILES[0]) / self.constants.num_sms)) for n in self.ns)

    def _num_layout_copies(self) -> int:
        """The copies of `unfused`: before the collective where it scatters an inner dim, after it where it gathers
        one, and one for all_reduce, though only one of x itself still makes it.
        """
        scattered = self.exchange.packed if self.exchange.gathers else (self.exchange.shape, self.exchange.split_dim)
        scatters, gathers = (math.prod(shape[:dim]) > 1 for shape, dim in (scattered, self.exchange.unpacked))
        packs, unpacks = ("all_to_all", "reduce_scatter"), ("all_to_all", "all_gather")
        return (self.kind == "all_reduce") + (scatters and self.kind in packs) + (gathers and self.kind in unpacks)
