"""How long a call takes by each algorithm, from a few constants of the machine: the planner compares these times.

A time is that of one call on one rank, in seconds. All ranks are alike, or it is that of the slowest: `shares` says
what each one computes and moves where parts differ in size. R is the number of ranks, and a chunk is what goes to one
peer, or the mean of that.

    matmul      max(tiles * FLOP of a tile / rate, bytes of its operands and result / memory) + overhead: the roofline
                model. A CPU core either computes or waits for memory, so there it is the sum. A GPU computes tiles in
                waves, one tile per SM: 128 x 128, or 64 x 64 where those would not occupy all SMs, with K split where
                these do not either (wave quantisation, as in cuBLAS). A CPU core computes 16 rows at a time. A matmul
                of few rows takes longer to read w than to compute, and one of few columns longer to read x.
    copy        bytes of the result / bandwidth + overhead: `copy` into new memory, as torch makes it around the plain
                collective; `unpack` from a slot into the result
    collective  latency + bytes that a rank sends / bandwidth, by kind: Hockney's model; all_reduce sends each
                chunk twice. Parts of different sizes are padded for it where that takes less time than an all_to_all
                of them as they are: a GPU sends these one by one, each for another latency of the link, an all_gather
                copies its part for every peer first, and a reduce_scatter adds what arrives by itself. CPU ranks share
                the memory, so there the bytes of all count, and not those of the slowest rank
    unfused     matmul, collective, a copy before it unless the first dim is scattered, one after it unless the first
                dim is gathered; all_reduce copies once, as it is functional. Parts of different sizes are copied
                before it, and after it unless they are added
    chunked     R matmuls of a chunk, c each, beside R - 1 transfers, l = latency + chunk / link each, overheads per
                call and per chunk and:
                  push    max(R c, c + (R - 1) l, (R - 1) c + l), then the copy-out of R - 1 chunks
                  gather  max(R c, (R - 1) l + c): the own chunk is there from the start
                  what several ranks get is multiplied once, and on a CPU copied to each
                  K gathered in 16 bits: R - 1 transfers and copy-out, a, then the matmul, m, because sums stay in
                  float32. A GPU does so in p pieces, one beside the other: a / p + max(m, (p - 1) a / p + m / p)
                  few rows cut: a + m, because one matmul reads w once; a push sends after its one matmul
                A CPU does one after the other, and its matmuls of a push write to the peer: l = 0.
    fused       max(matmul by the Triton kernel, (R - 1) chunk / stores) + link latency + copy-out + overhead. A gather
                in runs below 1 MiB leaves an eighth of the SMs to the copies; copy engines send longer ones. Each
                chunk reads w anew where rows are cut, and in a gather cuBLAS takes the own one where it lies. Where
                K is gathered every tile needs all chunks: only the first wave of tiles runs beside the stores, and
                the own chunk is copied first.
    pipelined   see `cost.in_pieces`
    reduce      (R + 1) / 2 copies in place of the copy-out of R chunks: it reads R chunks and writes one. An all_reduce
                then sends the sum to R - 1 peers and copies out R chunks.

The model leaves out rounds beyond the first, which only calls larger than a slot have, the by-product of a gather, and
ranks that compete for one memory, except that `fusedcomm tune` measures all ranks at once.

The default constants of "cuda" are an H100 SXM's data sheet (3.35 TB/s, 132 SMs), what is published of its 450 GB/s of
NVLink each way in use (370 by copies, 330 to 450 by NCCL's collectives, as it counts bus bandwidth), and the matmul
rate that the bounds in docs/ reckon with. The others are chosen, not measured, such that fused wins between 64
KiB and 16 MiB per peer, and chunked from there, where copy engines reach full speed. Those of "cpu" stand for 2 ranks
of one thread each on 2 cores of an AMD EPYC, torch 2.13.0, gloo, 2026-11-21: the rates of matmuls are the roofs behind
the figures of docs/benchmark.md, and the others are from `fusedcomm tune`, rounded; but what a prepared call and its
chunks cost is from `fusedcomm bench overhead`, 2026-11-24: a tiny call takes 7 to 10 us hot and 72 to 86 us cold, and
with these numbers 33 to 77.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from fusedcomm.cost.links import CPU_INTER_BANDWIDTH, INTER, INTER_BANDWIDTH, INTRA, Reach, rate, seconds, sent_bytes
from fusedcomm.cost.shares import Share, mean_to_a_peer, shares_of, traffic_of
from fusedcomm.geometry.cut import Cut
from fusedcomm.geometry.exchange import FEW_ROWS, LEAST_COPIED, Exchange, num_pieces

KINDS = {
    "matmul_all_to_all": "all_to_all",
    "all_to_all_matmul": "all_to_all",
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_reduce": "all_reduce",
}
ITEMSIZE = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
DEFAULT, TUNED = "default", "tuned"
SMALL_BYTES = 64 << 10  # what arrives from a peer in a few microseconds, a launch's time; chosen, not measured
_PACK_BANDWIDTH = 80e9  # bytes per second that an eighth of a GPU's SMs store to peers, by published figures
_GPU_TILES = (128, 64)
_CPU_TILE_ROWS = 16
_MIN_SPLIT_K = 512  # the shortest part of K that cuBLAS gives to an SM of its own


@dataclass(frozen=True)
class Constants:
    """What one rank's machine can do, in seconds, bytes per second and FLOP per second.

    Mappings go by dtype, kind of collective or algorithm. A dtype is torch's name, or "tf32" for float32 whose matmuls
    may round their inputs.
    """

    source: str  # DEFAULT or TUNED
    device_type: str
    num_sms: int  # 1 on a CPU
    matmul_flops: Mapping[str, float]
    fused_flops: Mapping[str, float]  # what the Triton kernel reaches; empty on a CPU, where only tests run it
    memory_bandwidth: float
    matmul_overhead: float
    copy_bandwidth: float
    copy_overhead: float
    unpack_bandwidth: float
    link_bandwidth: float
    link_latency: float
    store_bandwidth: float
    backend_bandwidth: Mapping[str, float]
    backend_latency: Mapping[str, float]
    call_overhead: Mapping[str, float]
    chunk_overhead: float
    piece_overhead: float  # what Python takes for a piece of `pipelined` beside its chunks

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def __hash__(self) -> int:  # quick, because the plan of every call needs it
        return hash(self.digest)

    def to_json(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in asdict(self).items()}

    @staticmethod
    def from_json(data: Any) -> Constants:
        """Raises ValueError unless ``data`` is what ``to_json`` gives for constants that a machine can have."""
        names = [field.name for field in fields(Constants)]
        if not isinstance(data, dict) or sorted(data) != sorted(names):
            raise ValueError(f"constants must have exactly the fields {', '.join(names)}")
        source, device_type = data["source"], data["device_type"]
        if source not in (DEFAULT, TUNED) or device_type not in list(DEFAULTS):  # a list, as JSON may not be hashable
            raise ValueError(f"source and device_type must be known, got {source!r:.40} and {device_type!r:.40}")
        default = DEFAULTS[device_type]
        for name in names[2:]:
            _check(name, data[name], getattr(default, name))
        return Constants(**data)

    # times, in seconds

    def matmul(self, dtype: str, batches: float, m: float, k: float, n: float, fused: bool = False) -> float:
        """[m, k] @ [k, n], ``batches`` times; in the Triton kernel if ``fused``."""
        rate = (self.fused_flops if fused else self.matmul_flops)[dtype]
        memory = batches * (m * k + k * n + m * n) * ITEMSIZE[dtype] / self.memory_bandwidth
        compute = 2 * k * self._computed(batches, m, n, 1 if fused else k // _MIN_SPLIT_K) / rate
        return (compute + memory if self.device_type == "cpu" else max(compute, memory)) + self.matmul_overhead

    def copy(self, num_bytes: float) -> float:
        return num_bytes / self.copy_bandwidth + self.copy_overhead

    def unpack(self, num_bytes: float) -> float:
        return num_bytes / self.unpack_bandwidth + self.copy_overhead

    def transfer(self, num_bytes: float) -> float:
        return num_bytes / self.link_bandwidth + self.link_latency

    def collective(self, kind: str, chunk_bytes: float, group_size: int) -> float:
        return sent_bytes(kind, chunk_bytes, group_size) / self.backend_bandwidth[kind] + self.backend_latency[kind]

    def _computed(self, batches: float, m: float, n: float, most_splits: float) -> float:
        """Elements of the result, plus those of tiles that reach beyond it and of SMs that idle in the last wave."""
        if self.device_type == "cpu":
            return batches * math.ceil(m / _CPU_TILE_ROWS) * _CPU_TILE_ROWS * n
        for tile in _GPU_TILES:
            num_tiles = batches * math.ceil(m / tile) * math.ceil(n / tile)
            if num_tiles >= self.num_sms:
                break
        splits = max(1, min(self.num_sms // max(num_tiles, 1), most_splits))
        return math.ceil(num_tiles / self.num_sms) * self.num_sms * tile**2 / splits


def _check(name: str, value: Any, default: Any) -> None:
    """Raises ValueError unless ``value`` is within a factor of a million of ``default``: no machine has other numbers.

    Overheads and latencies may be from 0 to 1 second.
    """
    if isinstance(default, Mapping):
        if not isinstance(value, dict) or sorted(value) != sorted(default):
            raise ValueError(f"{name} must have exactly the keys {', '.join(default)}")
        for key in default:
            _check(f"{name}[{key}]", value[key], default[key])
        return
    small = 0.0 if name.partition("[")[0].endswith(("overhead", "latency")) else default / 1e6
    large = 1.0 if small == 0 else default * 1e6
    kinds = (int,) if isinstance(default, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not small <= value <= large:  # NaN is not
        raise ValueError(f"{name} must be a number in [{small:g}, {large:g}], got {value!r:.40}")


DEFAULTS = {
    "cuda": Constants(
        source=DEFAULT,
        device_type="cuda",
        num_sms=132,
        matmul_flops={"float32": 52e12, "tf32": 400e12, "float16": 790e12, "bfloat16": 790e12},
        fused_flops={"float32": 25e12, "tf32": 330e12, "float16": 700e12, "bfloat16": 700e12},
        memory_bandwidth=3.35e12,
        matmul_overhead=3e-6,
        copy_bandwidth=1.6e12,  # each byte is read and written
        copy_overhead=3e-6,
        unpack_bandwidth=1.6e12,
        link_bandwidth=370e9,
        link_latency=5e-6,
        store_bandwidth=250e9,
        backend_bandwidth={"all_to_all": 330e9, "all_gather": 360e9, "reduce_scatter": 360e9, "all_reduce": 450e9},
        backend_latency=dict.fromkeys(KINDS.values(), 25e-6),
        call_overhead={"unfused": 0.0, "chunked": 10e-6, "fused": 10e-6},
        chunk_overhead=6e-6,
        piece_overhead=80e-6,
    ),
    "cpu": Constants(
        source=DEFAULT,
        device_type="cpu",
        num_sms=1,
        matmul_flops={"float32": 100e9, "float16": 2e9, "bfloat16": 400e9},
        fused_flops={},
        memory_bandwidth=8e9,
        matmul_overhead=2e-6,
        copy_bandwidth=2.5e9,
        copy_overhead=20e-6,
        unpack_bandwidth=10e9,
        link_bandwidth=10e9,
        link_latency=20e-6,
        store_bandwidth=10e9,
        backend_bandwidth={"all_to_all": 1e9, "all_gather": 0.75e9, "reduce_scatter": 0.5e9, "all_reduce": 1.2e9},
        backend_latency=dict.fromkeys(KINDS.values(), 500e-6),
        call_overhead={"unfused": 200e-6, "chunked": 5e-6},
        chunk_overhead=2e-6,
        piece_overhead=300e-6,
    ),
}


@functools.lru_cache(maxsize=1024)  # by the exchange's identity: `geometry` keeps one for the shapes of a call
def estimate(op: str, exchange: Exchange, dtype: str, constants: Constants) -> Mapping[str, float]:
    """Seconds by algorithm, for those that ``constants`` has numbers for. Sizes must be plain ints."""
    calls = [TimedCall(op, exchange, share, dtype, constants) for share in shares_of(exchange)]
    found = {"unfused": max(call.unfused() for call in calls), "chunked": max(call.chunked() for call in calls)}
    if constants.fused_flops:
        found["fused"] = max(call.fused() for call in calls)
    return found


@functools.lru_cache(maxsize=64)
def across_hosts(constants: Constants, at: Reach, inter: float | None = None) -> Constants:
    """With collectives as `links` estimates them where a group spans hosts.

    ``inter``: bytes per second of one rank between hosts, if they are known.
    """
    inter = inter or (CPU_INTER_BANDWIDTH if constants.device_type == "cpu" else INTER_BANDWIDTH)
    by_link = {kind: {INTRA: inside, INTER: inter} for kind, inside in constants.backend_bandwidth.items()}
    rates = {kind: rate(kind, at, bandwidth) for kind, bandwidth in by_link.items()}
    hops = {kind: seconds(kind, 0.0, at, bandwidth)[0] for kind, bandwidth in by_link.items()}
    latencies = {kind: max(inside, hops[kind]) for kind, inside in constants.backend_latency.items()}
    return replace(constants, backend_bandwidth=rates, backend_latency=latencies)


def pads(kind: str, cut: Cut, outer_bytes: int, device_type: str) -> bool:
    """Whether `unfused` pads parts of different sizes to blocks of one size, by the default constants.

    It is the same on all ranks, and in every graph. ``outer_bytes``: bytes for each element of the dims that are cut.
    """
    return _is_padded(kind, cut, outer_bytes, DEFAULTS[device_type])[0]


def _is_padded(kind: str, cut: Cut, outer_bytes: float, constants: Constants) -> tuple[bool, float]:
    """Whether padding is faster, and the time of the faster exchange with what copies its chunks together."""
    group_size, traffic, on_cpu = cut.group_size, traffic_of(cut), constants.device_type == "cpu"
    if group_size == 1:
        return False, 0.0
    largest = outer_bytes * math.prod([parts.largest for parts in (cut.gathered, cut.scattered) if parts is not None])
    padded = constants.collective(kind, largest, group_size)
    padded += constants.copy(largest if kind == "all_gather" else group_size * largest)
    to_a_peer = outer_bytes * (
        mean_to_a_peer(traffic) if on_cpu else max(each.to_a_peer(group_size) for each in traffic)
    )
    as_they_are = constants.collective("all_to_all", to_a_peer, group_size)
    as_they_are += constants.copy(outer_bytes * max(each.sent for each in traffic))
    as_they_are += 0.0 if on_cpu else (group_size - 1) * constants.link_latency
    if kind == "reduce_scatter":
        as_they_are += constants.unpack((group_size + 1) / 2 * largest)
    return padded < as_they_are, min(padded, as_they_are)


def decode_reason(exchange: Exchange, chunk_bytes: int, constants: Constants) -> str | None:
    """Why a call on a GPU has nothing to hide its exchange behind, as in decoding; None if it has, or is measured."""
    if constants.device_type == "cpu" or constants.source != DEFAULT:
        return None
    if exchange.few_rows:
        rows = exchange.num_rows // exchange.group_size
        return f"{rows} rows per rank, fewer than {FEW_ROWS}: nothing to hide, default numbers"
    if chunk_bytes < SMALL_BYTES:
        return f"{chunk_bytes / 1024:.3g} KiB per peer, less than {SMALL_BYTES >> 10}: nothing to hide, default numbers"
    return None


class TimedCall:
    """The formulas of this module for one call."""

    def __init__(self, op: str, exchange: Exchange, share: Share, dtype: str, constants: Constants) -> None:
        self.exchange, self.constants, self.dtype = exchange.for_all, constants, dtype
        self.cut, self.share, self.ns = exchange.cut, share, share.ns
        self.kind, self.num_ranks = KINDS[op], exchange.group_size
        self.chunk_bytes = share.chunk_numel * ITEMSIZE[dtype]
        self.all_bytes = self.num_ranks * self.chunk_bytes

    def unfused(self) -> float:
        if self.cut is not None:
            return self.matmul() + self._uneven_collective() + self.constants.call_overhead["unfused"]
        num_copies = (self.kind == "all_reduce") + self._scatters_inside() + self._gathers_inside()
        collective = self.constants.collective(self.kind, self.chunk_bytes, self.num_ranks)
        copies = num_copies * self.constants.copy(self.all_bytes)
        return self.matmul() + collective + copies + self.constants.call_overhead["unfused"]

    def _uneven_collective(self) -> float:
        """That of all ranks, and the copy of what has arrived."""
        assert self.cut is not None
        outer_bytes = self.exchange.outer_numel * ITEMSIZE[self.dtype]
        after = 0.0 if self.kind == "reduce_scatter" else self.constants.copy(self.all_bytes)
        return _is_padded(self.kind, self.cut, outer_bytes, self.constants)[1] + after

    def chunked(self) -> float:
        constants, num_rounds = self.constants, 2 if self.kind == "all_reduce" else self._pieces()
        overhead = constants.call_overhead["chunked"] + num_rounds * self.num_ranks * constants.chunk_overhead
        if self.exchange.gathers:
            return overhead + self._chunked_gather()
        return overhead + self._chunked_push() + self._after(own_is_there=True)

    def fused(self) -> float:
        constants, exchange = self.constants, self.exchange
        sent = (self.num_ranks - 1) * self.chunk_bytes
        overhead = constants.link_latency + constants.call_overhead["fused"]
        if exchange.gathers:
            return overhead + self._fused_gather(sent)
        return (
            max(self._fused_matmul(self.share.num_products), sent / constants.store_bandwidth)
            + overhead
            + self._after()
        )

    def _fused_gather(self, sent: float) -> float:
        constants, by_copy = self.constants, self.exchange.sent_run * ITEMSIZE[self.dtype] >= LEAST_COPIED
        rate = constants.link_bandwidth if by_copy else min(constants.store_bandwidth, _PACK_BANDWIDTH)
        slower = 1.0 if by_copy else 8 / 7
        if not self.exchange.splits_columns:
            matmul = self._chunk_matmul() + slower * self._fused_matmul(self.share.num_products - 1)
            return constants.copy_overhead + max(matmul, sent / rate)
        matmul = slower * self.matmul(fused=True)
        own = constants.copy(self.chunk_bytes) if by_copy else constants.copy_overhead
        return own + matmul + max(0.0, sent / rate - matmul / self._waves())

    def _chunked_push(self) -> float:
        num_ranks, share, on_cpu = self.num_ranks, self.share, self.constants.device_type == "cpu"
        transfer = self.constants.transfer(self.chunk_bytes)
        if share.at_once:
            return self.matmul() + (num_ranks if on_cpu else num_ranks - 1) * transfer
        each = self._chunk_matmul()
        if on_cpu:
            return share.num_products * each + share.num_copies * transfer
        all_but_one = (share.num_products - 1) * each
        return max(all_but_one + each, each + (num_ranks - 1) * transfer, all_but_one + transfer)

    def _chunked_gather(self) -> float:
        num_ranks = self.num_ranks
        transfers = (num_ranks - 1) * self.constants.transfer(self.chunk_bytes)
        if self.share.at_once or self._takes_all():
            arrival, pieces = transfers + self.constants.unpack(self.all_bytes), self._pieces()
            return arrival / pieces + max(self.matmul(), (1 - 1 / pieces) * arrival + self.matmul() / pieces)
        each = self._chunk_matmul()
        if self.constants.device_type == "cpu":
            return transfers + self.share.num_products * each
        return max(self.share.num_products * each, transfers + each)

    def _takes_all(self) -> bool:
        """Whether K is gathered in 16 bits: the result cannot hold the sums over sources."""
        return self.exchange.gathers and self.exchange.splits_columns and self.dtype not in ("float32", "tf32")

    def _pieces(self) -> int:
        """The number of rounds into which `chunked` cuts a call that would fit one."""
        return num_pieces(int(self.chunk_bytes)) if self._takes_all() and self.constants.device_type == "cuda" else 1

    def _after(self, own_is_there: bool = False) -> float:
        """What a push does with the chunks that have arrived. ``own_is_there``: the own chunk is where it belongs."""
        constants, num_ranks = self.constants, self.num_ranks
        if self.kind == "all_to_all":
            return constants.unpack(self.all_bytes - own_is_there * self.chunk_bytes)
        reduced = constants.unpack((num_ranks + 1) / 2 * self.chunk_bytes)
        if self.kind == "reduce_scatter":
            return reduced
        return reduced + (num_ranks - 1) * constants.transfer(self.chunk_bytes) + constants.unpack(self.all_bytes)

    def matmul(self, fused: bool = False) -> float:
        sizes = (self.share.num_batches, self.share.num_rows, self.share.k)
        return sum(self.constants.matmul(self.dtype, *sizes, n, fused) for n in self.ns)

    def _chunk_matmul(self) -> float:
        batches, m, k, share = self.chunk()
        return sum(self.constants.matmul(self.dtype, batches, m, k, n * share) for n in self.ns)

    def _fused_matmul(self, num_chunks: int) -> float:
        """The time of one kernel whose tiles end with the chunks."""
        batches, m, k, share = self.chunk()
        batches *= num_chunks
        return sum(self.constants.matmul(self.dtype, batches, m, k, n * share, True) for n in self.ns)

    def _waves(self) -> int:
        """The number of waves in which the SMs compute the result, each one tile per wave."""
        share, tile = self.share, _GPU_TILES[0]
        rows = share.num_batches * math.ceil(share.num_rows / tile)
        return sum(max(1, math.ceil(rows * math.ceil(n / tile) / self.constants.num_sms)) for n in self.ns)

    def chunk(self) -> tuple[float, float, float, float]:
        """Batches, rows, K and share of N of the matmul of one chunk; K is what a gather splits along columns."""
        exchange, part = self.exchange, self.share.part
        batches, m, k = float(self.share.num_batches), float(self.share.num_rows), float(self.share.k)
        if exchange.splits_rows:
            return batches, m * part, k, 1.0
        if not exchange.splits_columns:
            return batches * part, m, k, 1.0
        return (batches, m, k * part, 1.0) if exchange.gathers else (batches, m, k, part)

    def _scatters_inside(self) -> bool:
        """Whether what the collective sends must be packed first."""
        if self.exchange.gathers:
            shape, dim = self.exchange.packed
        else:
            shape, dim = self.exchange.shape, self.exchange.split_dim
        return self.kind in ("all_to_all", "reduce_scatter") and math.prod(shape[:dim]) > 1

    def _gathers_inside(self) -> bool:
        shape, dim = self.exchange.unpacked
        return self.kind in ("all_to_all", "all_gather") and math.prod(shape[:dim]) > 1
