"""Compile the Triton kernels as the host launches them, for architectures that are not here.

    python -m tests.helpers.compile_only FOLDER

It runs the launch functions on tensors without memory (device "meta") under a driver that names a target and launches
nothing; so arguments, specialization and tile sizes are those of a real launch. It writes each kernel's PTX to FOLDER
and prints what the kernel needs as JSON, one object per kernel. It must run without TRITON_INTERPRET.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedcomm.bench import launch_now
from fusedcomm.bench.gpu_check.compiling import compiling
from fusedcomm.memory import topology
from fusedcomm.memory.segment import HeaderLayout
from fusedcomm.plan import routed_rounds, routing
from fusedcomm.plan.builder import Device, Memory
from fusedcomm.plan.geometry import norm, shapes
from fusedcomm.plan.geometry.exchange import Exchange
from tests.helpers import ptx_order, scaled_rounds
from tests.helpers.ptx_order import main_loops, narrow_products
from tests.helpers.token_rows import run_kernel
from tests.helpers.virtual_ranks import unpack_and_norm

RANK, GROUP_SIZE = 1, 4
NUM_SMS = 132
ARCHITECTURES = (80, 90, 100)
# programs; others: 1
IN_SM = {"reduce_kernel": 2, "norm_kernel": 2, "send_rows_kernel": 4, "return_rows_kernel": 4, "add_rows_kernel": 2}

WIDTHS = {16: "v4.b32", 8: "v2.b32", 4: "b32", 2: "b16"}  # in bytes; words of the protocol are b64
COUNTED = {
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mma_sync": r"\bmma\.sync",
    "tma_loads": r"\bcp\.async\.bulk\.tensor\.\dd\.shared",
    "tma_stores": r"\bcp\.async\.bulk\.tensor\.\dd\.global",
    "cp_async": r"\bcp\.async\.c[ag]\.shared",
    **{f"loads_{size}": rf"\bld\.global\.{kind} " for size, kind in WIDTHS.items()},
    **{f"copies_{size}": rf"\bcp\.async\.c[ag]\.shared\.global [^;]*, 0x{size:x}," for size in WIDTHS},
    **{f"stores_{size}": rf"\bst\.global\.{kind} " for size, kind in WIDTHS.items()},
    "sleeps": r"\bnanosleep",
    "local": r"\b(ld|st)\.local",
}


@dataclass(frozen=True)
class KernelReport:
    """What a kernel was compiled to.

    ``stack`` > 0: spilled registers; ``spills_in_loops``: accesses to them in main loops. ``loops``: main loops;
    ``joined``: those that run through tiles as well; ``barriers``: the fewest of a step, in the loop with most.
    ``products``: lines of source that multiply run-time values in 32 bits.
    """

    name: str
    arch: int
    triton: str
    kernel: str
    num_warps: int
    registers: int
    stack: int
    spills_in_loops: int
    shared: int
    loops: int
    joined: int
    barriers: int
    counts: dict[str, int]
    order: list[str]
    products: list[str]


class MetaWorkspace:
    def __init__(self, group_size: int = GROUP_SIZE) -> None:
        self.rank, self.group_size = RANK, group_size
        self.segments = torch.empty(group_size, dtype=torch.int64, device="meta")
        self.slot_bytes = 1 << 29  # as much as the largest gather below takes
        layout = HeaderLayout(group_size)
        self.segment_layout = layout.for_kernels
        segment = torch.empty(layout.segment_bytes(self.slot_bytes), dtype=torch.uint8, device="meta")
        self.buffers, self.device = [segment] * group_size, segment.device
        self.kernels = dict[int, Any]()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def memory_facts(self) -> Memory:
        return Memory(RANK, self.group_size, self.slot_bytes, self.slot_bytes, self.slot_bytes, self.segment_layout)

    def device_facts(self) -> Device:
        return Device(
            architecture=topology.architecture(self.device),
            triton=topology.triton_version(),
            num_sms=NUM_SMS,
            allow_tf32=topology.tf32_allowed(),
        )


@dataclass(frozen=True)
class PushRound:
    """A call of matmul_all_to_all whose round is compiled."""

    lead: tuple[int, ...]
    k: int
    n: int
    gather_dim: int
    scatter_dim: int
    out_shape: tuple[int, ...] | None = None
    batched: bool = False
    transposed: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        def meta(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self.dtype, device="meta")

        w = meta(*(self.lead[:-1] if self.batched else ()), self.k, self.n)
        if self.transposed:
            w = meta(*w.shape[:-2], self.n, self.k).mT
        return meta(*self.lead, self.k), w, meta(self.n) if self.bias else None

    def push(self) -> None:
        x, w, bias = self.tensors()
        launch_now.push(x, w, bias, self._spans(), MetaWorkspace(), 1)

    def unpack(self) -> None:
        out = torch.empty(self._exchange().out_shape, dtype=self.dtype, device="meta")
        launch_now.unpack(out, self._spans(), MetaWorkspace(), 1)

    def _exchange(self) -> Exchange:
        x, w, _ = self.tensors()
        dims = self.gather_dim, self.scatter_dim
        return shapes.matmul_all_to_all(x.shape, w.shape, self.out_shape, *dims, GROUP_SIZE)

    def _spans(self) -> Any:
        return self._exchange().rounds(1 << 62)[0]


@dataclass(frozen=True)
class GatherRound:
    """A call of all_gather_matmul, or with a scatter_dim of all_to_all_matmul, whose round is compiled."""

    shape: tuple[int, ...]  # shape of each rank's x
    n: int
    gather_dim: int
    scatter_dim: int | None = None
    batched: bool = False
    transposed: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    end_round: bool = True

    def pack(self) -> None:
        x, exchange = self._meta(*self.shape), self._exchange()
        (spans,) = exchange.rounds(1 << 62)
        launch_now.pack(x, spans, MetaWorkspace(), 1, own=exchange.splits_columns)

    def gather(self) -> None:
        exchange = self._exchange()
        w = self._meta(*self._w_shape())
        if self.transposed:
            w = self._meta(*w.shape[:-2], self.n, w.shape[-2]).mT
        bias = self._meta(self.n) if self.bias else None
        (spans,) = exchange.rounds(1 << 62)
        out = self._meta(*exchange.out_shape)
        own = exchange.splits_columns
        launch_now.gather_matmul(out, w, bias, spans, MetaWorkspace(), 1, end_round=self.end_round, own=own)

    def _meta(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def _w_shape(self) -> tuple[int, ...]:
        """w's shape. K is what is left of x's last dims after a leading dim for the batches, and one for the rows."""
        shape = list(self.shape)
        shape[self.gather_dim] *= GROUP_SIZE
        if self.scatter_dim is not None:
            shape[self.scatter_dim] //= GROUP_SIZE
        num_lead = 2 if len(shape) > 2 else 1
        return (*(shape[: num_lead - 1] if self.batched else ()), math.prod(shape[num_lead:]), self.n)

    def _exchange(self) -> Exchange:
        if self.scatter_dim is None:
            return shapes.all_gather_matmul(self.shape, [self._w_shape()], self.gather_dim, GROUP_SIZE)
        dims = self.gather_dim, self.scatter_dim
        return shapes.all_to_all_matmul(self.shape, self._w_shape(), *dims, GROUP_SIZE)


def reduce(
    dtype: torch.dtype, bias: bool = False, scale: float = 1.0, group_size: int = GROUP_SIZE, residual: bool = False
) -> None:
    """Launch the reduction of a matmul_reduce_scatter with 16384 rows in all."""
    exchange = shapes.matmul_reduce_scatter((4 * 4096, 1024), (1024, 4096), "sum", 0, group_size)
    (spans,) = exchange.rounds(1 << 62)
    out = torch.empty(exchange.out_shape, dtype=dtype, device="meta")
    vector = torch.empty(4096, dtype=dtype, device="meta") if bias else None
    added = torch.empty_like(out) if residual else None
    launch_now.reduce(out, spans, vector, scale, MetaWorkspace(group_size), 1, residual=added)


def reduce_norm(n: int, dtype: torch.dtype = torch.bfloat16, group_size: int = 8) -> None:
    """Launch the sum and the norm of 64 rows, with everything that it may take."""
    (spans,) = norm.one_shot((64, n), 0, 1e-6, group_size).rounds(1 << 62)
    normed, out, residual = torch.empty(3, 64, n, dtype=dtype, device="meta").unbind()
    weight, bias = torch.empty(2, n, dtype=dtype, device="meta").unbind()
    launch_now.reduce_norm(normed, out, residual, weight, bias, spans, 1e-6, MetaWorkspace(group_size), 1)


def norm_rows(n: int, dtype: torch.dtype = torch.bfloat16) -> None:
    normed, x = torch.empty(2, 8192, n, dtype=dtype, device="meta").unbind()
    launch_now.norm(normed, x, torch.empty(n, dtype=dtype, device="meta"), 1e-6, MetaWorkspace())


def unpack_norm(n: int, own: bool = True) -> None:
    """Launch the copy and the norm of 1024 rows from 4 ranks."""
    (spans,) = norm.two_shot((1024, n), None, 1e-6, GROUP_SIZE).rounds(1 << 62)
    normed, out = torch.empty(2, 1024, n, dtype=torch.bfloat16, device="meta").unbind()
    unpack_and_norm(normed, out, torch.empty_like(out[0]), spans, MetaWorkspace(), 1, own)


def token_rows(
    kernel: str, n: int = 4096, dtype: torch.dtype = torch.bfloat16, scores: bool = True, transposed: bool = False
) -> None:
    """Launch one of the kernels of a dispatch or combine of 8192 tokens to 64 experts, 8 each."""
    k, capacity, combines = 8, 16384, kernel not in ("send_rows", "take_rows")
    packed = torch.empty(routing.packed_shape(8192 * k, 64, GROUP_SIZE), dtype=torch.int64, device="meta")
    rows = torch.empty(capacity if combines else 8192, n, dtype=dtype, device="meta")
    weights = torch.empty(8192 * k, device="meta") if scores else None
    if not combines:
        run_kernel(kernel, routed_rounds.send, MetaWorkspace(), 1, rows, weights, packed, k=k, capacity=capacity)
        return
    w = torch.empty(64 // GROUP_SIZE, n, n, dtype=dtype, device="meta") if kernel == "grouped_matmul" else None
    w = w.mT if transposed and w is not None else w
    facts = {"num_tokens": 8192, "return_received": scores}
    run_kernel(kernel, routed_rounds.combine, MetaWorkspace(), 1, rows, w, weights, packed, k=k, **facts)


def dispatch(kernel: str, n: int = 4096, dtype: torch.dtype = torch.bfloat16, transposed: bool = False) -> None:
    """Launch one of the kernels that place these tokens, or send and multiply their second piece."""
    ids, x = torch.empty(8192 * 8, dtype=torch.int64, device="meta"), torch.empty(8192, n, dtype=dtype, device="meta")
    w = torch.empty(64 // GROUP_SIZE, n, n, dtype=dtype, device="meta")
    facts = {"num_experts": 64, "k": 8, "capacity": 16384, "alignment": 8, "num_pieces": 2}
    run_kernel(kernel, routed_rounds.dispatch, MetaWorkspace(), 1, x, ids, w.mT if transposed else w, **facts)


def finish() -> None:
    out = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    launch_now.finish(out, MetaWorkspace(), 1, end_round=True)


START = PushRound((16, 16192), 4096, 8192, 1, 2, (16, 512), batched=True)  # the start program
LINEAR = PushRound((16384,), 4096, 8192, 0, 1, transposed=True, bias=True)
TOKENS = GatherRound((4096, 4096), 8192, 0)  # the gather of sequence parallelism
ULYSSES = GatherRound((4, 16384, 8, 128), 4096, 2, 1)  # back from heads to tokens
PACKED_QKV = PushRound((4, 4096), 4096, 12288, 1, 3, (3, 32, 128), bias=True)


def problems(arch: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Launches with every row of the tile tables where it needs most (with a bias), and with every way to load."""
    yield "push", START.push
    yield "push transposed bias", LINEAR.push
    yield "push fp16 packed bias", dataclasses.replace(PACKED_QKV, dtype=torch.float16).push
    yield "push pointers", PushRound((16384,), 4100, 8192, 0, 1, bias=True).push
    yield "push batched ragged", PushRound((16, 4096), 4104, 8192, 1, 2, batched=True).push
    yield "push cut anywhere", PushRound((4096,), 4096, GROUP_SIZE * 2098, 0, 1, bias=True).push
    yield "push cut at fours", PushRound((4096,), 4096, GROUP_SIZE * 524, 0, 1, bias=True).push
    yield "push of eights", PushRound((4104,), 4104, GROUP_SIZE * 1032, 0, 1, bias=True).push
    yield "push odd", PushRound((4096,), 4101, GROUP_SIZE * 2099, 0, 1, bias=True).push
    yield "push rows scattered", PushRound((1024, 16), 4096, 8192, 2, 1).push
    for m in (4096, 2048, 1024, 256):  # smaller and smaller tiles
        yield f"push {m} rows", PushRound((m,), 4096, 1024, 0, 1, bias=True).push
        yield f"push {m} rows transposed", PushRound((m,), 4096, 1024, 0, 1, transposed=True, bias=True).push
    single = PushRound((4096,), 1024, 4096, 0, 1, bias=True, dtype=torch.float32)
    yield "push fp32", single.push
    yield "push tf32", lambda: with_tf32(single.push)
    yield "unpack", START.unpack
    yield "unpack fp32", dataclasses.replace(LINEAR, dtype=torch.float32).unpack
    yield from gathers()
    if arch >= 90:
        yield from scaled_rounds.rounds(MetaWorkspace)
    yield "pack", ULYSSES.pack
    yield "pack fp32", dataclasses.replace(TOKENS, dtype=torch.float32).pack
    yield "reduce", lambda: reduce(torch.bfloat16)
    yield "reduce of 8 ranks", lambda: reduce(torch.bfloat16, group_size=8)
    yield "reduce of 8 ranks bias", lambda: reduce(torch.bfloat16, bias=True, group_size=8)
    yield "reduce average bias", lambda: reduce(torch.bfloat16, bias=True, scale=1 / GROUP_SIZE)
    yield "reduce fp32 bias", lambda: reduce(torch.float32, bias=True)
    yield "reduce residual", lambda: reduce(torch.bfloat16, residual=True)
    for n in (1032, 8192, 16384):
        yield f"reduce and norm {n}", partial(reduce_norm, n)
        yield f"unpack and norm {n}", partial(unpack_norm, n)
    yield "norm own rows", partial(unpack_norm, 8192, own=False)  # before the first wait
    yield "norm 8192", partial(norm_rows, 8192)
    yield "reduce and norm fp32", partial(reduce_norm, 4096, torch.float32)
    yield "reduce and norm of 16 ranks", partial(reduce_norm, 16384, group_size=16)
    for kernel in ("send rows", "take rows", "return rows", "grouped matmul", "add rows"):
        yield kernel, partial(token_rows, kernel.replace(" ", "_"))
        yield f"{kernel} fp32 odd", partial(token_rows, kernel.replace(" ", "_"), 4100, torch.float32, scores=False)
    for n in (4096, 4104, 4099):
        yield f"grouped matmul transposed {n}", partial(token_rows, "grouped_matmul", n, transposed=True)
    yield "grouped matmul stored", partial(dispatch, "experts_matmul", transposed=True)
    yield "grouped matmul stored odd", partial(dispatch, "experts_matmul", 4099)
    yield "grouped matmul stored fp32 odd", partial(dispatch, "experts_matmul", 4100, torch.float32)
    yield from ((f"{kernel} rows of a piece", partial(dispatch, f"{kernel}_rows")) for kernel in ("send", "take"))
    yield "add rows odd", partial(token_rows, "add_rows", 4099)
    yield "return choices", partial(token_rows, "return")
    yield from (
        (f"{kernel} choices", partial(dispatch, kernel)) for kernel in ("count", "scan", "plan", "shift", "place")
    )
    yield "finish", finish
    yield "wait source", lambda: launch_now.wait_source(0, MetaWorkspace(), 1)
    yield "begin push", lambda: launch_now.begin_push(MetaWorkspace())
    yield "signal", lambda: launch_now.signal(MetaWorkspace(), None, 1)
    yield "wait", lambda: launch_now.wait(MetaWorkspace(), 1)


def gathers() -> Iterator[tuple[str, Callable[[], None]]]:
    """Launches that gather rows, batches or K, with every row of the tile tables and every way to load w."""
    yield "gather", TOKENS.gather
    yield "gather rows transposed bias", dataclasses.replace(TOKENS, transposed=True, bias=True).gather
    yield "gather rows batched fp16", GatherRound((16, 1024, 4096), 8192, 1, batched=True, dtype=torch.float16).gather
    yield "gather first of two", dataclasses.replace(TOKENS, end_round=False).gather
    yield "gather of eights", GatherRound((4096, 4104), 8200, 0, bias=True).gather
    yield "gather odd", GatherRound((4096, 4101), 8201, 0, bias=True).gather
    yield "gather ragged", GatherRound((4096, 4100), 8200, 0, bias=True).gather
    yield "gather K", ULYSSES.gather
    yield "gather K transposed bias", dataclasses.replace(ULYSSES, transposed=True, bias=True).gather
    yield "gather K short runs", GatherRound((4, 4096, 128, 16), 4096, 3, 1).gather
    yield "gather K of eights", GatherRound((1024, 1032), 4104, 1, bias=True).gather
    yield "gather K 1024 rows", GatherRound((1024, 1024), 1024, 1, bias=True).gather
    for m in (512, 256, 64):  # smaller and smaller tiles
        yield f"gather {m} rows", GatherRound((m, 4096), 1024, 0, bias=True).gather
        yield f"gather {m} rows transposed", GatherRound((m, 4096), 1024, 0, transposed=True, bias=True).gather
    single = dataclasses.replace(TOKENS, dtype=torch.float32, bias=True)
    yield "gather fp32", single.gather
    yield "gather tf32", lambda: with_tf32(single.gather)
    yield "gather K fp32", dataclasses.replace(ULYSSES, dtype=torch.float32).gather


def with_tf32(start: Callable[[], None]) -> None:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        start()
    finally:
        matmul.fp32_precision = before


def resources(cubin: Path) -> tuple[int, int]:
    """Registers and stack bytes per thread."""
    usage = _cuobjdump("--dump-resource-usage", cubin)
    numbers = [re.search(rf"{key}:(\d+)", usage) for key in ("REG", "STACK", "LOCAL")]
    assert all(numbers), usage
    registers, stack, local = (int(match.group(1)) for match in numbers if match)
    return registers, stack + local


def spills_in_loops(cubin: Path) -> int:
    """Accesses to spilled registers in the innermost loops that multiply."""
    code = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", _cuobjdump("-sass", cubin), re.MULTILINE)
    instructions = [(int(address, 16), text) for address, text in code]
    loops = []
    for at, text in instructions:
        branch = re.search(r"\bBRA\b.* (0x[0-9a-f]+)", text)
        if branch and int(branch.group(1), 16) < at:
            loops.append((int(branch.group(1), 16), at))

    def found(pattern: str, loop: tuple[int, int]) -> int:
        return sum(loop[0] <= at <= loop[1] and bool(re.search(pattern, text)) for at, text in instructions)

    multiply = [loop for loop in loops if found(r"\b(HMMA|[HQ]GMMA|UTC\w*MMA|FFMA)\b", loop)]
    assert multiply, "no loop that multiplies"
    inner = [(a, b) for a, b in multiply if not any((a, b) != (c, d) and a <= c and d <= b for c, d in multiply)]
    return sum(found(r"\b(LDL|STL)\b", loop) for loop in inner)


def _cuobjdump(what: str, cubin: Path) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), what, str(cubin)], check=True, capture_output=True, text=True).stdout


def report(name: str, arch: int, kernel: Any, folder: Path) -> KernelReport:
    import triton

    ptx = kernel.asm["ptx"]
    (folder / f"{name.replace(' ', '_')}.{arch}.ptx").write_text(ptx)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        registers, stack = resources(Path(file.name))
        multiplies = name.startswith(("push", "gather", "grouped"))
        in_loops = spills_in_loops(Path(file.name)) if stack and multiplies else 0
    loops = main_loops(ptx)
    return KernelReport(
        name=name,
        arch=arch,
        triton=triton.__version__,
        kernel=kernel.metadata.name,
        num_warps=kernel.metadata.num_warps,
        registers=registers,
        stack=stack,
        spills_in_loops=in_loops,
        shared=kernel.metadata.shared,
        loops=len(loops),
        joined=sum(loop.stores for loop in loops),
        barriers=max((loop.barriers for loop in loops), default=0),
        counts={key: len(re.findall(pattern, ptx)) for key, pattern in COUNTED.items()},
        order=ptx_order.violations(
            ptx, reads_after_wait=name.startswith(("unpack", "gather", "reduce", "take", "add"))
        ),
        products=narrow_products(kernel.asm["ttir"]),
    )


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for arch in ARCHITECTURES:
        done = set()
        for name, start in problems(arch):
            with compiling(arch) as compiled:
                start()
            (kernel,) = compiled
            if kernel.hash not in done:
                done.add(kernel.hash)
                print(json.dumps(dataclasses.asdict(report(name, arch, kernel, folder))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
