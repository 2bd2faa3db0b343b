"""Each kernel by itself, in the workspace of one rank: matmuls against cuBLAS, pack, unpack and reduce against a copy.

A part fails by wrong values alone: `speeds` has the goals. `compile_kernels` makes the same problems on device "meta".
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.device_clock import Variants, interleaved
from fusedcomm.bench.gpu_check.gpu_calls import FINGERPRINT
from fusedcomm.bench.timing import repeated
from fusedcomm.memory.segment import FINGERPRINT_BITS
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.testing import launch_now
from fusedcomm.testing.virtual import VirtualGroup

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
REDUCED = (2, 4, 8)  # ranks


@dataclass(frozen=True)
class KernelProblem:
    """A kernel, ready to run on inputs that are there already, and the tensor that it writes."""

    workspace: Workspace
    out: Tensor
    run: Callable[[], None]
    before: Callable[[], Any] = lambda: None  # each run: it is round 1 again


def cases(device: torch.device) -> child.Cases:
    cuda = device.type == "cuda"
    matmuls = SHAPES if cuda else [TINY]
    first: child.Cases = {
        f"{name} {matmuls[0].name}": partial(_matmul, matmuls[0], kernel, device) for name, kernel in MATMULS.items()
    }
    first |= {"pack": partial(_pack, device), "unpack": partial(_unpack, device)}
    first |= {f"reduce R={size}": partial(_reduce, matmuls[0], size, device) for size in REDUCED}
    return first | {
        f"{name} {shape.name}": partial(_matmul, shape, kernel, device)
        for shape in matmuls[1:]
        for name, kernel in MATMULS.items()
    }


def push(x: Tensor, w: Tensor) -> KernelProblem:
    """The push kernel in a group of one rank: the flops of torch.matmul, no peer."""
    exchange = shapes.matmul_all_to_all(x.shape, w.shape, None, x.ndim - 2, x.ndim - 1, 1)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace = _workspace(exchange, x)
    start = workspace.layout.slot(1, workspace.slot_bytes)  # round 1, as the epoch word never moves here
    numel = x.shape[:-1].numel() * w.shape[-1]
    out = workspace.buffers[0][start : start + numel * x.itemsize].view(x.dtype).view(*x.shape[:-1], w.shape[-1])
    return KernelProblem(workspace, out, lambda: launch_now.push(x, w, None, spans, workspace, FINGERPRINT))


def gather(x: Tensor, w: Tensor) -> KernelProblem:
    """The gather kernel in a group of one rank, which has sent already."""
    exchange = shapes.all_gather_matmul(x.shape, [w.shape], x.ndim - 2, 1)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace = _workspace(exchange, x)
    out = x.new_empty(exchange.out_shape)
    launch_now.pack(x, spans, workspace, FINGERPRINT)
    return KernelProblem(
        workspace,
        out,
        lambda: launch_now.gather_matmul(out, w, None, spans, workspace, FINGERPRINT, end_round=False),
    )


MATMULS: dict[str, Callable[..., KernelProblem]] = {"push": push, "gather": gather}


def unpack_exchange(cuda: bool) -> tuple[Exchange, int]:
    """A batch of the start program between 4 ranks: 66 MB from each. In the interpreter, a little."""
    if not cuda:
        return shapes.matmul_all_to_all((1, 8, 16), (1, 16, 64), [8, 8], 1, 2, 4), 4
    return shapes.matmul_all_to_all((1, 16192, 4096), (1, 4096, 8192), [16, 512], 1, 2, 4), 4


def unpack(exchange: Exchange, group_size: int, device: torch.device) -> tuple[KernelProblem, Tensor]:
    """Rank 0's copy-out of chunks that are there, and these chunks [R, ...]."""
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace, parts = _arrived(exchange, group_size, device)
    out = torch.empty(exchange.out_shape, device=device, dtype=DTYPE)
    run = partial(launch_now.unpack, out, spans, workspace, FINGERPRINT)
    return KernelProblem(workspace, out, run, _epoch(workspace).zero_), parts.view(group_size, *exchange.block)


def pack(device: torch.device) -> tuple[KernelProblem, Tensor]:
    """Rank 0's part of sending x between 4 ranks, in runs of 4 KiB, and x as chunks [R, rows, columns]."""
    rows, columns = (16192, 2048) if device.type != "cpu" else (16, 64)
    exchange = shapes.all_to_all_matmul((1, rows, 4 * columns), (columns, 8), 1, 2, 4)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace, slots = _arrived(exchange, 4, device)
    x = torch.randn(1, rows, 4 * columns, device=device, dtype=DTYPE)
    run = partial(launch_now.pack, x, spans, workspace, FINGERPRINT)
    return KernelProblem(workspace, slots[0], run), x.view(rows, 4, columns).transpose(0, 1)


def reduce(shape: MatmulShape, group_size: int, device: torch.device) -> tuple[KernelProblem, Tensor]:
    """Rank 0's reduction of chunks that are there, and these chunks [R, numel]."""
    exchange = shapes.matmul_reduce_scatter((shape.m, shape.k), (shape.k, shape.n), "sum", 0, group_size)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace, parts = _arrived(exchange, group_size, device)
    out = torch.empty(exchange.out_shape, device=device, dtype=DTYPE)
    run = partial(launch_now.reduce, out, spans, None, 1.0, workspace, FINGERPRINT)
    return KernelProblem(workspace, out, run, _epoch(workspace).zero_), parts


def _workspace(exchange: Exchange, x: Tensor) -> Workspace:
    return VirtualGroup(1, exchange.chunk_numel * x.itemsize, x.device).workspaces[0]


def _arrived(exchange: Exchange, group_size: int, device: torch.device) -> tuple[Workspace, Tensor]:
    """Rank 0's workspace in round 1, when all chunks are there, with all SMs; and the chunks [R, numel]."""
    numel = exchange.chunk_numel
    workspace = VirtualGroup(group_size, numel * group_size * DTYPE.itemsize, device).workspaces[0]
    workspace.num_sms = VirtualGroup(1, 128, device).workspaces[0].num_sms  # of the whole GPU
    workspace.shares_gpu = False
    layout, buffer = workspace.layout, workspace.buffers[0]
    start, flags = layout.slot(1, workspace.slot_bytes), layout.flag(1, 0)
    parts = buffer[start : start + group_size * numel * DTYPE.itemsize].view(DTYPE).view(group_size, numel)
    parts.normal_()
    buffer[flags : flags + 8 * group_size].view(torch.int64).fill_(1 << FINGERPRINT_BITS | FINGERPRINT)
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
    variants: Variants = {"cublas": lambda: torch.matmul(x, w, out=y), "kernel": problem.run}
    often = {f"{name} repeated": partial(repeated, variant, 1 + REPEATS) for name, variant in variants.items()}
    times = interleaved({**variants, **often}, device)
    problem.workspace.check("matmul")
    # The cost of one more call where many are queued: neither the start of a kernel nor the gap to an event counts.
    net = {name: (times[f"{name} repeated"] - times[name]) / REPEATS for name in variants}
    return {
        "cublas_ms": times["cublas"],
        "kernel_ms": times["kernel"],
        "kernel_tflops": shape.flops / times["kernel"] / 1e9,
        "cublas_launch_free_ms": net["cublas"],
        "kernel_launch_free_ms": net["kernel"],
        "relative_error": error,
        "ratio": net["cublas"] / net["kernel"],
    }


def _unpack(device: torch.device) -> dict[str, Any]:
    exchange, group_size = unpack_exchange(device.type == "cuda")
    problem, parts = unpack(exchange, group_size, device)
    problem.run()
    assert torch.equal(problem.out, torch.cat(list(parts), 1)), "wrong values"
    return _rates("unpack", problem, 2 * parts.numel() * parts.itemsize)


def _pack(device: torch.device) -> dict[str, Any]:
    problem, chunks = pack(device)
    problem.run()
    assert torch.equal(problem.out, chunks[0].reshape(-1)), "wrong values"
    return _rates("pack", problem, 2 * chunks.numel() * chunks.itemsize)


def _reduce(shape: MatmulShape, group_size: int, device: torch.device) -> dict[str, Any]:
    problem, parts = reduce(shape, group_size, device)
    problem.run()
    assert torch.equal(problem.out.view(-1), parts.float().sum(0).to(DTYPE)), "wrong sums"
    return _rates("reduce", problem, (group_size + 1) * parts[0].numel() * DTYPE.itemsize)


def _rates(kernel: str, problem: KernelProblem, num_bytes: int) -> dict[str, Any]:
    """Terabytes per second, read and written, beside a copy of as many bytes."""
    device = problem.out.device
    source = torch.empty(num_bytes // 2 // DTYPE.itemsize, device=device, dtype=DTYPE).normal_()
    to = torch.empty_like(source)
    times = interleaved({SHIPPED: problem.run, "copy": lambda: to.copy_(source)}, device, problem.before)
    problem.workspace.check(kernel)
    rates = {name: num_bytes / ms / 1e9 for name, ms in times.items()}
    return {**rates, "ratio": times["copy"] / times[SHIPPED]}


if __name__ == "__main__":
    child.main(cases)
