"""The speed section of benchmarks/gpu_check.py: each kernel by itself, and whole ops of virtual ranks on one GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_cases import ALGORITHMS, FINGERPRINT, OPS, GpuCase, loaded_group
from fusedcomm.algorithms import kernel_launch
from fusedcomm.geometry import shapes
from fusedcomm.runtime.segment import FINGERPRINT_BITS
from fusedcomm.runtime.workspace import Workspace
from fusedcomm.testing.virtual import VirtualGroup

DTYPE = torch.bfloat16
REPEATS = 4
GOAL = 0.85  # share of the speed of cuBLAS, and of a copy for the reduction, at GOAL_SHAPE
COLD_L2_BYTES = 256 << 20
Variants = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class MatmulShape:
    name: str
    batches: int  # 0: w is 2-D
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * max(1, self.batches) * self.m * self.n * self.k


GOAL_SHAPE = MatmulShape("8192 x 4096 x 4096", 0, 8192, 4096, 4096)
SHAPES = [
    GOAL_SHAPE,
    MatmulShape("start program, batch 4 of 16", 4, 16192, 8192, 4096),
    MatmulShape("4096 x 4096 x 4096", 0, 4096, 4096, 4096),
    MatmulShape("16384 x 3072 x 1024", 0, 16384, 3072, 1024),
    MatmulShape("2048 x 8192 x 8192", 0, 2048, 8192, 8192),
    MatmulShape("ragged 8000 x 4104 x 4104", 0, 8000, 4104, 4104),
    MatmulShape("small 1024 x 1024 x 1024", 0, 1024, 1024, 1024),
]
TINY = MatmulShape("dry run", 0, 32, 32, 32)


def check_speed(device: torch.device) -> dict[str, Any]:
    """Measure and report. A section fails by wrong values alone, not by a goal."""
    cuda = device.type == "cuda"
    sizes, group_size = (SHAPES, 4) if cuda else ([TINY], 1)
    matmuls = {
        shape.name: {"push_matmul": push_speed(shape, device), "gather_matmul": gather_speed(shape, device)}
        for shape in sizes
    }
    reductions = {f"R={size}": reduce_speed(sizes[0], size, device) for size in ((2, 8) if cuda else (1,))}
    ops = {op: op_speed(op, sizes[0], group_size, device) for op in OPS}
    ratios = {name: each["launch_free_ratio_to_cublas"] for name, each in matmuls[sizes[0].name].items()}
    ratios |= {f"reduce {name}": each["ratio_to_copy"] for name, each in reductions.items()}
    goals = {name: {"ratio": ratio, "goal": GOAL, "met": ratio >= GOAL} for name, ratio in ratios.items()}
    return {"goals": goals, "matmuls": matmuls, "reductions": reductions, "ops": ops}


def operands(shape: MatmulShape, device: torch.device) -> tuple[Tensor, Tensor]:
    batch = (shape.batches,) if shape.batches else ()
    x = torch.randn(*batch, shape.m, shape.k, device=device, dtype=DTYPE)
    w = torch.randn(*batch, shape.k, shape.n, device=device, dtype=DTYPE)
    return x, w


def push_speed(shape: MatmulShape, device: torch.device) -> dict[str, float]:
    """The push kernel in a group of one rank against torch.matmul: the same flops, no peer."""
    x, w = operands(shape, device)
    exchange = shapes.matmul_all_to_all(x.shape, w.shape, None, x.ndim - 2, x.ndim - 1, 1)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace = VirtualGroup(1, exchange.chunk_numel * x.itemsize, device).workspaces[0]
    start = workspace.layout.slot(1, workspace.slot_bytes)  # round 1, as the epoch word never moves here
    y = torch.matmul(x, w)
    ours = workspace.buffers[0][start : start + y.numel() * y.itemsize].view(y.dtype).view(y.shape)
    return against_cublas(shape, x, w, ours, lambda: kernel_launch.push(x, w, None, spans, workspace, FINGERPRINT))


def gather_speed(shape: MatmulShape, device: torch.device) -> dict[str, float]:
    """The gather kernel in a group of one rank, which has sent already, against torch.matmul."""
    x, w = operands(shape, device)
    exchange = shapes.all_gather_matmul(x.shape, [w.shape], x.ndim - 2, 1)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace = VirtualGroup(1, exchange.chunk_numel * x.itemsize, device).workspaces[0]
    ours = torch.empty(exchange.out_shape, device=device, dtype=DTYPE)
    kernel_launch.pack(x, spans.pack, workspace, FINGERPRINT)
    result = against_cublas(
        shape,
        x,
        w,
        ours,
        lambda: kernel_launch.gather_matmul(ours, w, None, spans, workspace, FINGERPRINT, end_round=False),
    )
    workspace.check("gather_matmul")
    return result


def against_cublas(shape: MatmulShape, x: Tensor, w: Tensor, ours: Tensor, run: Callable[[], None]) -> dict[str, float]:
    """Compare ``run()``, which computes x @ w into the tensor before it, with cuBLAS."""
    y = torch.matmul(x, w)
    run()
    error = ((ours.float() - y.float()).norm() / y.float().norm()).item()
    assert error < 1e-2, f"{shape.name}: relative error {error}"
    variants: Variants = {"cublas": lambda: torch.matmul(x, w, out=y), "ours": run}
    repeated = {f"{name} repeated": repeat(variant, 1 + REPEATS) for name, variant in variants.items()}
    times = interleaved({**variants, **repeated}, x.device)
    # What one more call costs where many are queued: neither the start of a kernel nor the gap to an event counts.
    net = {name: (times[f"{name} repeated"] - times[name]) / REPEATS for name in variants}
    return {
        "cublas_ms": times["cublas"],
        "ours_ms": times["ours"],
        "ratio_to_cublas": times["cublas"] / times["ours"],
        "ours_tflops": shape.flops / times["ours"] / 1e9,
        "cublas_launch_free_ms": net["cublas"],
        "ours_launch_free_ms": net["ours"],
        "launch_free_ratio_to_cublas": net["cublas"] / net["ours"],
        "relative_error": error,
    }


def reduce_speed(shape: MatmulShape, group_size: int, device: torch.device) -> dict[str, float]:
    """One rank's reduction of chunks that are there, against a copy that moves as many bytes."""
    exchange = shapes.matmul_reduce_scatter((shape.m, shape.k), (shape.k, shape.n), "sum", 0, group_size)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace = VirtualGroup(group_size, exchange.chunk_numel * group_size * DTYPE.itemsize, device).workspaces[0]
    layout, buffer, numel = workspace.layout, workspace.buffers[0], exchange.chunk_numel
    start, flags = layout.slot(1, workspace.slot_bytes), layout.flag(1, 0)
    parts = buffer[start : start + group_size * numel * DTYPE.itemsize].view(DTYPE).view(group_size, numel)
    parts.normal_()
    buffer[flags : flags + 8 * group_size].view(torch.int64).fill_(1 << FINGERPRINT_BITS | FINGERPRINT)
    epoch = buffer[layout.epoch : layout.epoch + 8].view(torch.int64)
    out = torch.empty(exchange.out_shape, device=device, dtype=DTYPE)
    source = torch.empty((group_size + 1) * numel // 2, device=device, dtype=DTYPE).normal_()
    copy = torch.empty_like(source)

    def reduce() -> None:
        epoch.zero_()  # round 1 again
        kernel_launch.reduce(out, spans.pack, None, 1.0, workspace, FINGERPRINT)

    def copied() -> None:
        epoch.zero_()
        copy.copy_(source)

    reduce()
    workspace.check("reduce")
    assert torch.equal(out.view(-1), parts.float().sum(0).to(DTYPE)), "wrong sums"
    times = interleaved({"ours": reduce, "copy": copied}, device)
    workspace.check("reduce")
    return {
        "ours_ms": times["ours"],
        "copy_ms": times["copy"],
        "ratio_to_copy": times["copy"] / times["ours"],
        "ours_gb_per_s": (group_size + 1) * numel * DTYPE.itemsize / times["ours"] / 1e6,
    }


def op_case(op: str, shape: MatmulShape) -> GpuCase:
    """The case whose tensors on one rank have ``shape``, or those of all ranks where x is gathered."""
    if op in ("all_to_all_matmul", "all_gather_matmul"):
        gather_dim = 1 if op == "all_to_all_matmul" else 0  # all_to_all: K is gathered, rows are scattered
        return GpuCase(op, shape.name, (shape.m, shape.k), (shape.n,), gather_dim)
    return GpuCase(op, shape.name, (shape.m, shape.k), (shape.n,), scatter_dim=int(op == "matmul_all_to_all"))


def op_speed(op: str, shape: MatmulShape, group_size: int, device: torch.device) -> dict[str, float]:
    """All ranks of a virtual group on one GPU, each with m / R rows: the whole op against what users run today."""
    m = shape.m if op == "all_to_all_matmul" else shape.m // group_size
    case = op_case(op, MatmulShape(shape.name, 0, m, shape.n, shape.k))
    every = [case.normal(group_size, DTYPE, device) for _ in range(group_size)]
    m_local = m // group_size if op == "all_to_all_matmul" else m
    local = [torch.randn(m_local, shape.k, device=device, dtype=DTYPE) for _ in range(group_size)]

    def run(algorithm: str) -> Callable[[], list[list[Tensor]]]:
        group = loaded_group(group_size, case, DTYPE, algorithm, device)
        groups[algorithm] = group

        def call(workspace: Workspace, inputs: Any) -> list[Tensor]:
            return case.run(workspace, algorithm, inputs)

        return lambda: group.run(call, every)

    groups: dict[str, VirtualGroup] = {}
    variants: Variants = {
        "unfused": lambda: case.program(every),
        "roof": lambda: [torch.matmul(x, i.ws[0]) for x, i in zip(local, every, strict=True)],
    }
    variants |= {name: run(name) for name in (ALGORITHMS if device.type == "cuda" else ("fused",))}
    want = case.program(every)
    for name, group in groups.items():
        outs = variants[name]()
        group.check(op)
        for (out, *_), (wanted, *_) in zip(outs, want, strict=True):
            torch.testing.assert_close(out, wanted, rtol=2e-2, atol=1e-1 * shape.k**0.5)
    times = interleaved(variants, device)
    for group in groups.values():
        group.check(op)
    return {f"R{group_size}_{name}_ms": ms for name, ms in times.items()}


def repeat(variant: Callable[[], Any], times: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(times):
            variant()

    return repeated


def interleaved(variants: Variants, device: torch.device, rounds: int = 15) -> dict[str, float]:
    """Milliseconds, median over rounds; every variant once per round, after two warm-ups each, on a cold L2."""
    cuda = device.type == "cuda"
    flush = torch.empty(COLD_L2_BYTES if cuda else 1, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for variant in [*variants.values()] * 2 if cuda else ():
        variant()
        torch.cuda.synchronize()
    for _ in range(rounds if cuda else 1):
        for name, variant in variants.items():
            flush.zero_()
            times[name].append(_event_ms(variant) if cuda else _wall_ms(variant))
    return {name: statistics.median(each) for name, each in times.items()}


def _event_ms(variant: Callable[[], Any]) -> float:
    """Time on the GPU alone: all launches are queued before the first one runs."""
    for cycles in (20_000_000, 200_000_000):  # about 10 ms; more where the host was held up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        variant()
        queued = not start.query()
        end.record()
        torch.cuda.synchronize()
        if queued:
            return start.elapsed_time(end)
    raise AssertionError("the host took longer to launch than the GPU was kept waiting")


def _wall_ms(variant: Callable[[], Any]) -> float:
    start = time.perf_counter()
    variant()
    return (time.perf_counter() - start) * 1e3
