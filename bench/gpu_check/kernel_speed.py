"""Each kernel by itself, in the workspace of one rank: matmuls against cuBLAS, pack, unpack and reduce against a copy.

A part fails by wrong values alone: `speeds` has the goals. `compile_kernels` makes the same problems on device "meta".
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedcomm.bench import launch_now
from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.device_clock import Variants, interleaved
from fusedcomm.bench.gpu_check.gpu_calls import FINGERPRINT
from fusedcomm.bench.timing import repeated
from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.memory.segment import FINGERPRINT_BITS
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.exchange import Exchange

DTYPE = torch.bfloat16
REPEATS = 4
SHIPPED = "as shipped"


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

    def operands(self, device: torch.device) -> tuple[Tensor, Tensor]:
        batch = (self.batches,) if self.batches else ()
        x = torch.randn(*batch, self.m, self.k, device=device, dtype=DTYPE)
        return x, torch.randn(*batch, self.k, self.n, device=device, dtype=DTYPE)


SHAPES = [
    MatmulShape("8192 x 4096 x 4096", 0, 8192, 4096, 4096),
    MatmulShape("start program, batch 4 of 16", 4, 16192, 8192, 4096),
    MatmulShape("4096 x 4096 x 4096", 0, 4096, 4096, 4096),
    MatmulShape("16384 x 3072 x 1024", 0, 16384, 3072, 1024),
    MatmulShape("2048 x 8192 x 8192", 0, 2048, 8192, 8192),
    MatmulShape("ragged 8000 x 4104 x 4104", 0, 8000, 4104, 4104),
    MatmulShape("small 1024 x 1024 x 1024", 0, 1024, 1024, 1024),
]
TINY = MatmulShape("dry run", 0, 32, 32, 32)


@dataclass(frozen=True)
class KernelProblem:
    """A kernel, ready to run on inputs that are there already, and the tensor that it writes."""

    workspace: Workspace
    out: Tensor
    run: Callable[[], None]


@dataclass(frozen=True)
class MoveProblem(KernelProblem):
    """A kernel that only moves and adds: what it must write, and the bytes that it reads and writes."""

    want: Callable[[], Tensor]
    num_bytes: int
    before: Callable[[], Any] = lambda: None  # each run: it is round 1 again


def cases(device: torch.device) -> child.Cases:
    matmuls: child.Cases = {
        f"{name} {shape.name}": partial(_matmul, shape, kernel, device)
        for shape in (SHAPES if device.type == "cuda" else [TINY])
        for name, kernel in MATMULS.items()
    }
    return matmuls | {name: partial(_move, kernel, device) for name, kernel in MOVES.items()}


def jobs() -> Iterator[tuple[str, Callable[[], None]]]:
    """The launches, on tensors without memory."""
    for shape in SHAPES:
        for name, kernel in MATMULS.items():
            yield f"{name} {shape.name}", partial(_launch_matmul, kernel, shape)
    for name, move in MOVES.items():
        yield name, partial(_launch_move, move)


def _launch_matmul(kernel: Callable[..., KernelProblem], shape: MatmulShape) -> None:
    kernel(*shape.operands(torch.device("meta"))).run()


def _launch_move(kernel: Callable[..., MoveProblem]) -> None:
    kernel(torch.device("meta")).run()


def push(x: Tensor, w: Tensor) -> KernelProblem:
    """The push kernel in a group of one rank: the flops of torch.matmul, no peer."""
    exchange = shapes.matmul_all_to_all(x.shape, w.shape, None, x.ndim - 2, x.ndim - 1, 1)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace, slot = alone(exchange, x.dtype, x.device)
    out = slot.view(*x.shape[:-1], w.shape[-1])
    return KernelProblem(workspace, out, lambda: launch_now.push(x, w, None, spans, workspace, FINGERPRINT))


def gather(x: Tensor, w: Tensor) -> KernelProblem:
    """The gather kernel in a group of one rank, which has sent already."""
    exchange = shapes.all_gather_matmul(x.shape, [w.shape], x.ndim - 2, 1)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace, _ = alone(exchange, x.dtype, x.device)
    out = x.new_empty(exchange.out_shape)
    launch_now.pack(x, spans, workspace, FINGERPRINT)
    run = partial(launch_now.gather_matmul, out, w, None, spans, workspace, FINGERPRINT, end_round=False)
    return KernelProblem(workspace, out, run)


def unpack(device: torch.device) -> MoveProblem:
    """Rank 0's copy-out of a batch of the start program between 4 ranks: 66 MB from each."""
    tokens, k, heads, dim = (8, 16, 8, 8) if device.type == "cpu" else (16192, 4096, 16, 512)
    exchange = shapes.matmul_all_to_all((1, tokens, k), (1, k, heads * dim), [heads, dim], 1, 2, 4)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace, parts = _arrived(exchange, 4, device)
    parts, out = parts.view(4, *exchange.block), torch.empty(exchange.out_shape, device=device, dtype=DTYPE)
    run = partial(launch_now.unpack, out, spans, workspace, FINGERPRINT)
    return MoveProblem(workspace, out, run, lambda: torch.cat([*parts], 1), 2 * parts.nbytes, _epoch(workspace).zero_)


def pack(device: torch.device) -> MoveProblem:
    """Rank 0's part of sending x between 4 ranks, in runs of 4 KiB."""
    rows, columns = (16192, 2048) if device.type != "cpu" else (16, 64)
    exchange = shapes.all_to_all_matmul((1, rows, 4 * columns), (columns, 8), 1, 2, 4)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace, slots = _arrived(exchange, 4, device)
    x = torch.randn(1, rows, 4 * columns, device=device, dtype=DTYPE)
    run = partial(launch_now.pack, x, spans, workspace, FINGERPRINT)
    return MoveProblem(workspace, slots[0], run, lambda: x[0, :, :columns].reshape(-1), 2 * x.nbytes)


def reduce(group_size: int, device: torch.device) -> MoveProblem:
    """Rank 0's reduction of chunks that are there."""
    shape = TINY if device.type == "cpu" else SHAPES[0]
    exchange = shapes.matmul_reduce_scatter((shape.m, shape.k), (shape.k, shape.n), "sum", 0, group_size)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace, parts = _arrived(exchange, group_size, device)
    out = torch.empty(exchange.out_shape, device=device, dtype=DTYPE)
    run = partial(launch_now.reduce, out, spans, None, 1.0, workspace, FINGERPRINT)
    num_bytes = parts.nbytes + parts[0].nbytes

    def want() -> Tensor:
        return parts.float().sum(0).to(DTYPE).view(out.shape)

    return MoveProblem(workspace, out, run, want, num_bytes, _epoch(workspace).zero_)


MATMULS: dict[str, Callable[[Tensor, Tensor], KernelProblem]] = {"push": push, "gather": gather}
MOVES: dict[str, Callable[[torch.device], MoveProblem]] = {
    "pack": pack,
    "unpack": unpack,
    **{f"reduce R={size}": partial(reduce, size) for size in (2, 4, 8)},
}


def alone(exchange: Exchange, dtype: torch.dtype, device: torch.device) -> tuple[Workspace, Tensor]:
    """The workspace of a group of one rank, and its chunk, which a push writes."""
    workspace = VirtualGroup(1, exchange.chunk_numel * dtype.itemsize, device).workspaces[0]
    return workspace, _slot(workspace, exchange.chunk_numel, dtype)


def _slot(workspace: Workspace, numel: int, dtype: torch.dtype) -> Tensor:
    """A launch of round 1: the epoch word never moves here."""
    start = workspace.layout.slot(1, workspace.slot_bytes)
    return workspace.buffers[0][start : start + numel * dtype.itemsize].view(dtype)


def _arrived(exchange: Exchange, group_size: int, device: torch.device) -> tuple[Workspace, Tensor]:
    """Rank 0's workspace in round 1, when all chunks are there, with all SMs; and the chunks [R, numel]."""
    numel = exchange.chunk_numel
    workspace = VirtualGroup(group_size, numel * group_size * DTYPE.itemsize, device).workspaces[0]
    workspace.num_sms = VirtualGroup(1, 128, device).workspaces[0].num_sms  # of the whole GPU
    workspace.shares_gpu = False
    flags = workspace.layout.flag(1, 0)
    parts = _slot(workspace, group_size * numel, DTYPE).view(group_size, numel)
    parts.normal_()
    signals = workspace.buffers[0][flags : flags + 8 * group_size].view(torch.int64)
    signals.fill_(1 << FINGERPRINT_BITS | FINGERPRINT)
    return workspace, parts


def _epoch(workspace: Workspace) -> Tensor:
    start = workspace.layout.epoch
    return workspace.buffers[workspace.rank][start : start + 8].view(torch.int64)


def _matmul(shape: MatmulShape, kernel: Callable[..., KernelProblem], device: torch.device) -> dict[str, Any]:
    """Compare a kernel that computes x @ w with cuBLAS."""
    x, w = shape.operands(device)
    problem = kernel(x, w)
    y = torch.matmul(x, w)
    problem.run()
    error = ((problem.out.float() - y.float()).norm() / y.float().norm()).item()
    assert error < 1e-2, f"{shape.name}: relative error {error}"
    found = beside("cublas", lambda: torch.matmul(x, w, out=y), problem, shape.flops)
    return found | {"relative_error": error}


def beside(name: str, library: Callable[[], Any], problem: KernelProblem, flops: int) -> dict[str, Any]:
    """Times of a kernel and of a library's call. Without launch: the cost of one more call where many are queued, as
    neither the start of a kernel nor the gap to an event counts then.
    """
    variants: Variants = {name: library, "kernel": problem.run}
    often = {f"{name} repeated": partial(repeated, variant, 1 + REPEATS) for name, variant in variants.items()}
    times = interleaved({**variants, **often}, problem.out.device)
    problem.workspace.check("matmul")
    net = {name: (times[f"{name} repeated"] - times[name]) / REPEATS for name in variants}
    return {
        **{f"{each}_ms": times[each] for each in variants},
        **{f"{each}_launch_free_ms": net[each] for each in variants},
        "kernel_tflops": flops / times["kernel"] / 1e9,
        "ratio": net[name] / net["kernel"],
    }


def _move(kernel: Callable[[torch.device], MoveProblem], device: torch.device) -> dict[str, Any]:
    """Terabytes per second, read and written, beside a copy of as many bytes."""
    problem = kernel(device)
    problem.run()
    assert torch.equal(problem.out, problem.want()), "wrong values"
    source = torch.empty(problem.num_bytes // 2 // DTYPE.itemsize, device=device, dtype=DTYPE).normal_()
    to = torch.empty_like(source)
    times = interleaved({SHIPPED: problem.run, "copy": lambda: to.copy_(source)}, device, problem.before)
    problem.workspace.check("moves")
    rates = {name: problem.num_bytes / ms / 1e9 for name, ms in times.items()}
    return {**rates, "ratio": times["copy"] / times[SHIPPED]}
