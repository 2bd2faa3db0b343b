"""What only a GPU can tell of the design: what runs beside a cuBLAS matmul, what strided copies cost, and the host.

The bandwidth of an unpack is a case of `kernel_speed`; `host_time` is that of public calls.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.device_clock import interleaved
from fusedcomm.bench.gpu_check.gpu_calls import ALGORITHMS, FINGERPRINT, OPS, GpuCall, GpuInputs, first_of
from fusedcomm.bench.gpu_check.host_time import microseconds
from fusedcomm.runtime import signals
from fusedcomm.runtime.workspace import Workspace
from fusedcomm.testing.virtual import VirtualGroup

DTYPE = torch.bfloat16
MATMUL = (32768, 8192, 8192)  # rows, columns, K: about 6 ms of an H100
TIMES = 5
HOST_GROUP_SIZE = 8
RUNS = 16  # a strided copy with long runs has so many


def calls(cuda: bool) -> list[GpuCall]:
    if not cuda:  # the interpreter takes a quarter of a second for a call
        return [GpuCall(1, DTYPE, first_of(OPS[0], cuda))]
    return [GpuCall(HOST_GROUP_SIZE, DTYPE, first_of(op, cuda)) for op in OPS]


def cases(device: torch.device) -> child.Cases:
    return {
        "beside a matmul": partial(beside_matmul, device),
        "strided copies": partial(strided_copies, device),
        "host time": partial(virtual_host_time, device),
    }


def beside_matmul(device: torch.device) -> dict[str, Any]:
    """Whether small work on another stream runs while one cuBLAS matmul fills the GPU, and what it costs the matmul.

    Each is launched a quarter of the matmul's time after the matmul has begun, by the host, so that no stream has
    anything in common with the matmul's.
    """
    if device.type != "cuda":
        raise child.Skipped("a CPU has no streams")
    rows, columns, k = MATMUL
    x, w = torch.randn(rows, k, device=device, dtype=DTYPE), torch.randn(k, columns, device=device, dtype=DTYPE)
    y = torch.matmul(x, w)
    matmul = partial(torch.matmul, x, w, out=y)
    alone = interleaved({"matmul": matmul}, device)["matmul"]
    found: dict[str, Any] = {"matmul_ms": alone}
    for priority in (0, -1):
        stream = torch.cuda.Stream(device, priority=priority)
        for name, work in works(device).items():
            try:
                found[f"{name}, priority {priority}"] = _beside(matmul, alone, work, stream)
            except (RuntimeError, TypeError, AttributeError) as error:  # torch's own call has other forms elsewhere
                if name != "stream write":
                    raise
                found[f"{name}, priority {priority}"] = {"error": f"{type(error).__name__}: {error}"}
    return found


def works(device: torch.device) -> dict[str, Callable[[], Any]]:
    """What `chunked` queues beside its matmuls, and what could take its place."""
    workspace = VirtualGroup(1, 128, device).workspaces[0]
    word = torch.zeros(32, dtype=torch.uint32, device=device)
    small = torch.zeros(1 << 15, dtype=DTYPE, device=device)
    return {
        "signal kernel": partial(signals.signal, workspace, None, FINGERPRINT),
        "stream write": lambda: torch._C._distributed_c10d._SymmetricMemory.stream_write_value32(word, 0, 1),
        "copy of 64 KiB": partial(torch.empty_like(small).copy_, small),
        **copies(device),
    }


def copied_shape(device: torch.device) -> tuple[int, int]:
    """64 MiB; in the rehearsal 1 KiB."""
    return (32768, 1024) if device.type == "cuda" else (32, 16)


def copies(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Copies to contiguous memory."""
    rows, columns = copied_shape(device)
    wide = torch.randn(rows, 2 * columns, dtype=DTYPE, device=device)
    to = torch.empty(rows, columns, dtype=DTYPE, device=device)
    long_runs, parts = wide.view(RUNS, -1)[:, : to.numel() // RUNS], to.view(RUNS, -1)

    def one_per_run() -> None:
        for part, run in zip(parts, long_runs, strict=True):
            part.copy_(run)

    return {
        "contiguous copy": partial(to.copy_, wide[: rows // 2].view(rows, columns)),
        "copy of runs of 2 KiB": partial(to.copy_, wide[:, :columns]),
        "copy of runs of 4 MiB": partial(parts.copy_, long_runs),
        "one copy per run of 4 MiB": one_per_run,
    }


def strided_copies(device: torch.device) -> dict[str, float]:
    """GB/s, read and written, within one GPU. The slots of virtual and of shared GPUs are such memory."""
    num_bytes = 2 * math.prod(copied_shape(device)) * DTYPE.itemsize
    return {name: num_bytes / ms / 1e6 for name, ms in interleaved(copies(device), device).items()}


def virtual_host_time(device: torch.device) -> dict[str, float]:
    """Microseconds of the host for a rank's call, without the dispatcher and the planner, beside torch.mm's.

    One host launches the calls of all ranks in turn.
    """
    cuda = device.type == "cuda"
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    found = {}
    for call, algorithm in product(calls(cuda), ALGORITHMS if cuda else ("fused",)):
        group = call.group(algorithm, device)
        inputs = [call.inputs(rank, device, 0) for rank in range(call.group_size)]
        run = partial(group.run, partial(_run, call, algorithm), inputs)
        found[f"{call} {algorithm}"] = microseconds(run, synchronize) / call.group_size
        group.check(call.case.op)
    x = torch.ones(64, 64, dtype=DTYPE, device=device)
    return {**found, "torch.mm": microseconds(partial(torch.mm, x, x), synchronize)}


def _run(call: GpuCall, algorithm: str, workspace: Workspace, inputs: GpuInputs) -> list[torch.Tensor]:
    return call.case.run(workspace, algorithm, inputs)


def _beside(
    matmul: Callable[[], Any], alone_ms: float, work: Callable[[], Any], stream: torch.cuda.Stream
) -> dict[str, Any]:
    """Medians in milliseconds. ``beside``: how often the work was over before the matmul."""
    with torch.cuda.stream(stream):
        work()  # its kernels are loaded
    took, ended, matmuls = [], [], []
    for _ in range(TIMES):
        start, end, before, after = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        torch.cuda.synchronize()
        start.record()
        matmul()
        end.record()
        while not start.query():
            pass
        time.sleep(alone_ms / 4 / 1e3)
        with torch.cuda.stream(stream):
            before.record()
            work()
            after.record()
        torch.cuda.synchronize()
        took.append(before.elapsed_time(after))
        ended.append(start.elapsed_time(after))
        matmuls.append(start.elapsed_time(end))
    beside = sum(work_end < matmul_end for work_end, matmul_end in zip(ended, matmuls, strict=True))
    return {
        "beside": f"{beside} of {TIMES}",
        "took_ms": statistics.median(took),
        "matmul_ms": statistics.median(matmuls),
    }


if __name__ == "__main__":
    child.main(cases)
