"""Seconds of a call by each algorithm, on one rank, from a few constants of the machine: what the planner compares.

There are R ranks. A chunk is what goes to one peer, or the mean of that; where parts differ in size, the slowest rank
counts (`shares`). Rounds beyond the first, and ranks that compete for one memory, are left out.

    matmul      the roofline: max(FLOP / rate, bytes / memory) + overhead; the sum on a CPU core, which does one or the
                other. FLOP are those of whole tiles: a GPU computes waves of them, 128 x 128 or 64 x 64, with K split
                where they leave SMs idle; a CPU core 16 rows
    copy        bytes of the result / bandwidth + overhead; `unpack` from a slot into the result
    collective  Hockney: latency + bytes that a rank sends / bandwidth, by kind
    unfused     matmul + collective + copies of the layout. Parts of different sizes: `_uneven_exchange`
    chunked     R matmuls of a chunk, c, beside R - 1 transfers, l = latency + chunk / link:
                  push    max(R c, c + (R - 1) l, (R - 1) c + l) + copy-out of R - 1 chunks; l = 0 on a CPU, whose
                          matmuls write to the peers
                  gather  max(R c, (R - 1) l + c); their sum on a CPU
                  one matmul for all chunks (few rows, or sums over sources in 16 bits): first all transfers and the
                  copy-out, on a GPU in pieces of which each hides the next
    fused       max(matmul of the kernel, bytes sent / stores) + link latency + copy-out. In a gather along rows cuBLAS
                takes the own chunk; along K only the last wave of tiles has all chunks. Runs too short for copy engines
                are packed in front of it
    pipelined   `in_pieces`
    reduce      (R + 1) / 2 copies in place of the copy-out; an all_reduce then sends the sum to R - 1 peers
    host        seconds to issue a call, and each of its chunks: on a CPU they come on top, a GPU works beside
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

from fusedcomm.plan.cost.links import (
    CPU_INTER_BANDWIDTH,
    INTER,
    INTER_BANDWIDTH,
    INTRA,
    Reach,
    rate,
    seconds,
    sent_bytes,
)
from fusedcomm.plan.cost.shares import Share, mean_to_a_peer, shares_of, traffic_of
from fusedcomm.plan.geometry.cut import Cut
from fusedcomm.plan.geometry.exchange import FEW_ROWS, LEAST_COPIED, Exchange, num_pieces

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
_GPU_TILES, _CPU_TILE_ROWS = (128, 64), 16
_COPIED = 1 / 4  # of the host's time for a chunk: copy and signal alone, as a fused gather by copy engines issues them
_MIN_SPLIT_K = 512  # the shortest part of K that cuBLAS gives to an SM of its own

# Seconds of a GPU's host: a public call, and the calls of the driver and of cuBLAS in it. Estimated from an H200's
# torch.mm and from this package's plans on a driver that takes no time.
_CALL, _LAUNCH, _COPY, _WRITE, _EVENT, _CUBLAS = 15e-6, 2.5e-6, 2.5e-6, 1.2e-6, 0.7e-6, 13e-6


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
    fused_flops: Mapping[str, float]  # of the Triton kernel; empty on a CPU, where only tests run it
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
    call_overhead: Mapping[str, float]  # of the host
    chunk_overhead: float  # likewise, of each chunk of `chunked`
    piece_overhead: float  # likewise, of a piece of `pipelined` beside its chunks

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
        for name in names[2:]:
            _check(name, data[name], getattr(DEFAULTS[device_type], name))
        return Constants(**data)

    @property
    def on_cpu(self) -> bool:
        return self.device_type == "cpu"

    def matmul(self, dtype: str, batches: float, m: float, k: float, n: float, fused: bool = False) -> float:
        """Seconds of [m, k] @ [k, n], ``batches`` times; in the Triton kernel if ``fused``."""
        rate = (self.fused_flops if fused else self.matmul_flops)[dtype]
        memory = batches * (m * k + k * n + m * n) * ITEMSIZE[dtype] / self.memory_bandwidth
        compute = 2 * k * self._computed(batches, m, n, 1 if fused else k // _MIN_SPLIT_K) / rate
        return (compute + memory if self.on_cpu else max(compute, memory)) + self.matmul_overhead

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
        if self.on_cpu:
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
    is_time = name.partition("[")[0].endswith(("overhead", "latency"))
    small, large = (0.0, 1.0) if is_time else (default / 1e6, default * 1e6)
    kinds = (int,) if isinstance(default, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not small <= value <= large:  # NaN is not
        raise ValueError(f"{name} must be a number in [{small:g}, {large:g}], got {value!r:.40}")


# "cuda" is one H200, 2026-11-26, for bfloat16, copies and kernels; its NVLink of 450 GB/s each way is what is published
# in use; other rates are in proportion, and latencies of links are chosen. "cpu" is two ranks of one thread on 2 cores
# of an AMD EPYC, torch 2.13, gloo, 2026-11-21 and 24: the roofs behind docs/benchmark.md, `fusedcomm tune`, and for
# calls and chunks `fusedcomm bench overhead`, rounded.
_NUMBERS: dict[str, tuple[Any, Any]] = {
    "num_sms": (132, 1),
    "matmul_flops": (
        {"float32": 52e12, "tf32": 400e12, "float16": 820e12, "bfloat16": 820e12},
        {"float32": 100e9, "float16": 2e9, "bfloat16": 400e9},
    ),
    "fused_flops": ({"float32": 25e12, "tf32": 330e12, "float16": 785e12, "bfloat16": 785e12}, {}),
    "memory_bandwidth": (4.1e12, 8e9),
    "matmul_overhead": (3e-6, 2e-6),
    "copy_bandwidth": (2e12, 2.5e9),  # each byte is read and written
    "copy_overhead": (3e-6, 20e-6),
    "unpack_bandwidth": (1.8e12, 10e9),
    "link_bandwidth": (370e9, 10e9),
    "link_latency": (5e-6, 20e-6),
    "store_bandwidth": (250e9, 10e9),
    "backend_bandwidth": (
        {"all_to_all": 330e9, "all_gather": 360e9, "reduce_scatter": 360e9, "all_reduce": 450e9},
        {"all_to_all": 1e9, "all_gather": 0.75e9, "reduce_scatter": 0.5e9, "all_reduce": 1.2e9},
    ),
    "backend_latency": (dict.fromkeys(KINDS.values(), 25e-6), dict.fromkeys(KINDS.values(), 500e-6)),
    "call_overhead": (
        {
            "unfused": _CALL + _CUBLAS + _LAUNCH + 2 * _EVENT,
            "chunked": _CALL + 2 * _LAUNCH + 6 * _EVENT,
            "fused": _CALL + 2 * _LAUNCH + 2 * _EVENT,
        },
        {"unfused": 200e-6, "chunked": 5e-6},
    ),
    "chunk_overhead": (_CUBLAS + _COPY + _WRITE + 3 * _EVENT, 2e-6),
    "piece_overhead": (80e-6, 300e-6),
}
DEFAULTS = {
    device_type: Constants(DEFAULT, device_type, **{name: values[i] for name, values in _NUMBERS.items()})
    for i, device_type in enumerate(("cuda", "cpu"))
}


@functools.lru_cache(maxsize=1024)  # by the exchange's identity: `geometry` keeps one for the shapes of a call
def estimate(op: str, exchange: Exchange, dtype: str, constants: Constants) -> Mapping[str, float]:
    """Seconds by algorithm, for those that ``constants`` has numbers for. Sizes must be plain ints."""
    calls = [TimedCall(op, exchange, share, dtype, constants) for share in shares_of(exchange)]
    names = ("unfused", "chunked", *(["fused"] if constants.fused_flops else []))
    return {name: max(getattr(call, name)() for call in calls) for name in names}


@functools.lru_cache(maxsize=64)
def across_hosts(constants: Constants, at: Reach, inter: float | None = None) -> Constants:
    """With collectives as `links` estimates them where a group spans hosts.

    ``inter``: bytes per second of one rank between hosts, if they are known.
    """
    inter = inter or (CPU_INTER_BANDWIDTH if constants.on_cpu else INTER_BANDWIDTH)
    by_link = {kind: {INTRA: inside, INTER: inter} for kind, inside in constants.backend_bandwidth.items()}
    rates = {kind: rate(kind, at, bandwidth) for kind, bandwidth in by_link.items()}
    hops = {kind: seconds(kind, 0.0, at, bandwidth)[0] for kind, bandwidth in by_link.items()}
    latencies = {kind: max(inside, hops[kind]) for kind, inside in constants.backend_latency.items()}
    return replace(constants, backend_bandwidth=rates, backend_latency=latencies)


def pads(kind: str, cut: Cut, outer_bytes: int, device_type: str) -> bool:
    """Whether `unfused` pads parts of different sizes to blocks of one size, by the default constants.

    It is the same on all ranks, and in every graph. ``outer_bytes``: bytes for each element of the dims that are cut.
    """
    padded, as_they_are = _uneven_exchange(kind, cut, outer_bytes, DEFAULTS[device_type])
    return padded < as_they_are


def _uneven_exchange(kind: str, cut: Cut, outer_bytes: float, constants: Constants) -> tuple[float, float]:
    """Seconds of an exchange of parts of different sizes, copied together before it: padded to the largest, or by an
    all_to_all of the parts as they are. A GPU sends these one by one; a CPU's ranks share the memory, so that the bytes
    of all count.
    """
    group_size, traffic = cut.group_size, traffic_of(cut)
    if group_size == 1:
        return 0.0, 0.0
    largest = outer_bytes * math.prod([parts.largest for parts in (cut.gathered, cut.scattered) if parts is not None])
    padded = constants.collective(kind, largest, group_size)
    padded += constants.copy(largest if kind == "all_gather" else group_size * largest)
    most = mean_to_a_peer(traffic) if constants.on_cpu else max(each.to_a_peer(group_size) for each in traffic)
    as_they_are = constants.collective("all_to_all", outer_bytes * most, group_size)
    as_they_are += constants.copy(outer_bytes * max(each.sent for each in traffic))
    as_they_are += 0.0 if constants.on_cpu else (group_size - 1) * constants.link_latency
    if kind == "reduce_scatter":
        as_they_are += constants.unpack((group_size + 1) / 2 * largest)
    return padded, as_they_are


def decode_reason(exchange: Exchange, chunk_bytes: int, constants: Constants) -> str | None:
    """Why a call on a GPU has nothing to hide its exchange behind, as in decoding; None if it has, or is measured."""
    if constants.on_cpu or constants.source != DEFAULT:
        return None
    if exchange.few_rows:
        rows = exchange.num_rows // exchange.group_size
        return f"{rows} rows per rank, fewer than {FEW_ROWS}: nothing to hide, default numbers"
    if chunk_bytes < SMALL_BYTES:
        return f"{chunk_bytes / 1024:.3g} KiB per peer, less than {SMALL_BYTES >> 10}: nothing to hide, default numbers"
    return None


class TimedCall:
    """The formulas of this module for the share of one rank."""

    def __init__(self, op: str, exchange: Exchange, share: Share, dtype: str, constants: Constants) -> None:
        self.exchange, self.constants, self.dtype = exchange.for_all, constants, dtype
        self.cut, self.share = exchange.cut, share
        self.kind, self.num_ranks = KINDS[op], exchange.group_size
        self.chunk_bytes = share.chunk_numel * ITEMSIZE[dtype]
        self.all_bytes = self.num_ranks * self.chunk_bytes
        self.takes_all = exchange.takes_all(ITEMSIZE[dtype])

    def unfused(self) -> float:
        constants = self.constants
        if self.cut is None:
            exchange = constants.collective(self.kind, self.chunk_bytes, self.num_ranks)
            exchange += self._num_layout_copies() * constants.copy(self.all_bytes)
        else:
            outer_bytes = self.exchange.outer_numel * ITEMSIZE[self.dtype]
            exchange = min(_uneven_exchange(self.kind, self.cut, outer_bytes, constants))
            exchange += 0.0 if self.kind == "reduce_scatter" else constants.copy(self.all_bytes)
        return self._issued("unfused", self.matmul() + exchange)

    def chunked(self) -> float:
        num_rounds = 2 if self.kind == "all_reduce" else self._pieces()
        chunks = num_rounds * self.num_ranks * self.constants.chunk_overhead
        if self.exchange.gathers:
            return self._issued("chunked", self._chunked_gather(), chunks)
        copy_out = self._after(self.all_bytes - self.chunk_bytes)  # the own chunk is where it belongs
        return self._issued("chunked", self._chunked_push() + copy_out, chunks)

    def fused(self) -> float:
        constants, sent = self.constants, (self.num_ranks - 1) * self.chunk_bytes
        if not self.exchange.gathers:
            matmul = max(self.chunk_matmuls(self.share.num_products, fused=True), sent / constants.store_bandwidth)
            return self._issued("fused", matmul + constants.link_latency + self._after(self.all_bytes))
        by_copy = self.exchange.sent_run * ITEMSIZE[self.dtype] >= LEAST_COPIED
        copies = by_copy * _COPIED * self.num_ranks * constants.chunk_overhead
        return self._issued("fused", constants.link_latency + self._fused_gather(sent, by_copy), copies)

    def _issued(self, algorithm: str, device: float, chunks: float = 0.0) -> float:
        """The call's seconds, of those that the device takes and those that its host takes to issue it."""
        host = self.constants.call_overhead[algorithm] + chunks
        return host + device if self.constants.on_cpu else max(host, device)

    def _fused_gather(self, sent: float, by_copy: bool) -> float:
        constants, rows = self.constants, not self.exchange.splits_columns
        if rows:
            matmul = self.chunk_matmuls(1) + self.chunk_matmuls(self.share.num_products - 1, fused=True)
        else:
            matmul = self.matmul(fused=True)
        if not by_copy:
            return constants.copy_overhead + sent / constants.store_bandwidth + matmul
        if rows:
            return constants.copy_overhead + max(matmul, sent / constants.link_bandwidth)
        late = max(0.0, sent / constants.link_bandwidth - matmul / self._waves())
        return constants.copy(self.chunk_bytes) + matmul + late

    def _chunked_push(self) -> float:
        num_ranks, share, on_cpu = self.num_ranks, self.share, self.constants.on_cpu
        transfer = self.constants.transfer(self.chunk_bytes)
        if share.at_once:
            return self.matmul() + (num_ranks if on_cpu else num_ranks - 1) * transfer
        each = self.chunk_matmuls(1)
        if on_cpu:
            return share.num_products * each + share.num_copies * transfer
        all_but_one = (share.num_products - 1) * each
        return max(all_but_one + each, each + (num_ranks - 1) * transfer, all_but_one + transfer)

    def _chunked_gather(self) -> float:
        transfers = (self.num_ranks - 1) * self.constants.transfer(self.chunk_bytes)
        if self.share.at_once or self.takes_all:
            arrival, pieces = transfers + self.constants.unpack(self.all_bytes), self._pieces()
            return arrival / pieces + max(self.matmul(), (1 - 1 / pieces) * arrival + self.matmul() / pieces)
        each = self.chunk_matmuls(1)
        matmuls = self.share.num_products * each
        return transfers + matmuls if self.constants.on_cpu else max(matmuls, transfers + each)

    def _pieces(self) -> int:
        """The number of rounds into which `chunked` cuts a call that would fit one."""
        return num_pieces(int(self.chunk_bytes)) if self.takes_all and not self.constants.on_cpu else 1

    def _after(self, num_bytes: float) -> float:
        """The copy-out of ``num_bytes``, or the sum of what has arrived and the way to everyone's result."""
        constants, num_ranks = self.constants, self.num_ranks
        if self.kind == "all_to_all":
            return constants.unpack(num_bytes)
        reduced = constants.unpack((num_ranks + 1) / 2 * self.chunk_bytes)
        if self.kind == "reduce_scatter":
            return reduced
        return reduced + (num_ranks - 1) * constants.transfer(self.chunk_bytes) + constants.unpack(self.all_bytes)

    def matmul(self, pieces: int = 1, fused: bool = False) -> float:
        sizes = (self.share.num_batches, self.share.num_rows / pieces, self.share.k)
        return sum(self.constants.matmul(self.dtype, *sizes, n, fused) for n in self.share.ns)

    def chunk_matmuls(self, num_chunks: int, pieces: int = 1, fused: bool = False) -> float:
        """Of chunks whose rows are cut into pieces; ``fused``: in one kernel whose tiles end with the chunks."""
        exchange, share = self.exchange, self.share
        batches, m, k, part = float(share.num_batches), float(share.num_rows), float(share.k), 1.0
        if exchange.splits_rows:
            m *= share.part
        elif not exchange.splits_columns:
            batches *= share.part
        elif exchange.gathers:
            k *= share.part
        else:
            part = share.part
        batches *= num_chunks if fused else 1
        each = sum(self.constants.matmul(self.dtype, batches, m / pieces, k, n * part, fused) for n in share.ns)
        return each if fused else num_chunks * each

    def _waves(self) -> int:
        """The number of waves in which the SMs compute the result, each one tile per wave."""
        share, tile = self.share, _GPU_TILES[0]
        rows = share.num_batches * math.ceil(share.num_rows / tile)
        return sum(max(1, math.ceil(rows * math.ceil(n / tile) / self.constants.num_sms)) for n in share.ns)

    def _num_layout_copies(self) -> int:
        """The copies of `unfused`: before the collective where it scatters an inner dim, after it where it gathers
        one, and one for all_reduce, as it is functional.
        """
        scattered = self.exchange.packed if self.exchange.gathers else (self.exchange.shape, self.exchange.split_dim)
        scatters, gathers = (math.prod(shape[:dim]) > 1 for shape, dim in (scattered, self.exchange.unpacked))
        packs, unpacks = ("all_to_all", "reduce_scatter"), ("all_to_all", "all_gather")
        return (self.kind == "all_reduce") + (scatters and self.kind in packs) + (gathers and self.kind in unpacks)
