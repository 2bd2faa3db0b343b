"""How long the host is busy with a call, beside torch.mm's: public calls in 2 processes that share one GPU, and calls
of 8 virtual ranks in this process, without the dispatcher and the planner.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import ALGORITHMS, OPS, GpuCall, GpuInputs, first_of
from fusedcomm.bench.gpu_check.pools import Pools, need_segments
from fusedcomm.runtime.workspace import Workspace

DTYPE = torch.bfloat16
GROUP_SIZE, NUM_VIRTUAL = 2, 8
CALLS, TIMES = 4, 9  # few calls at a time, so that no queue is full


def calls(cuda: bool) -> list[GpuCall]:
    return [GpuCall(GROUP_SIZE, DTYPE, first_of(op, cuda)) for op in OPS] + virtual_calls(cuda)


def virtual_calls(cuda: bool) -> list[GpuCall]:
    """In the interpreter one, as each takes a quarter of a second."""
    return [GpuCall(NUM_VIRTUAL if cuda else 1, DTYPE, first_of(op, cuda)) for op in (OPS if cuda else OPS[:1])]


def cases(device: torch.device) -> child.Cases:
    pools = Pools(device.type)
    public = {f"2 ranks {name}": partial(_measured, pools, device.type, name) for name in reversed(ALGORITHMS)}
    return {**public, "virtual ranks": partial(virtual, device)}


def _measured(pools: Pools, device_type: str, algorithm: str) -> Any:
    need_segments(device_type)
    return pools.run(GROUP_SIZE, public, device_type, algorithm)


def public(rank: int, device_type: str, algorithm: str) -> dict[str, float]:
    """Microseconds until a call returns, forward."""
    size, device = dist.get_world_size(), torch.device(device_type)
    found = {}
    with fusedcomm.force_algorithm(algorithm, strict=True):
        for case in (first_of(op, device_type == "cuda") for op in OPS):
            inputs = case.inputs(size, rank, DTYPE, device, 0)
            found[case.op] = microseconds(partial(case.call, inputs), fusedcomm.synchronize)
    return {"torch.mm": matmul(device, fusedcomm.synchronize), **found}


def virtual(device: torch.device) -> dict[str, float]:
    """Microseconds for a rank's call. One host launches those of all ranks in turn."""
    cuda = device.type == "cuda"
    synchronize: Callable[[], Any] = torch.cuda.synchronize if cuda else int
    found = {}
    for call, algorithm in product(virtual_calls(cuda), ALGORITHMS if cuda else ("fused",)):
        group = call.group(algorithm, device)
        inputs = [call.inputs(rank, device, 0) for rank in range(call.group_size)]
        run = partial(group.run, partial(_run, call, algorithm), inputs)
        found[f"{call} {algorithm}"] = microseconds(run, synchronize) / call.group_size
        group.check(call.case.op)
    return {"torch.mm": matmul(device, synchronize), **found}


def _run(call: GpuCall, algorithm: str, workspace: Workspace, inputs: GpuInputs) -> list[Tensor]:
    return call.case.run(workspace, algorithm, inputs)


def matmul(device: torch.device, synchronize: Callable[[], Any]) -> float:
    x, w = torch.ones(512, 512, dtype=DTYPE, device=device), torch.ones(512, 1024, dtype=DTYPE, device=device)
    return microseconds(partial(torch.mm, x, w), synchronize)


def microseconds(call: Callable[[], Any], synchronize: Callable[[], Any]) -> float:
    """The median."""
    times = []
    for _ in range(TIMES):
        synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    child.main(cases)
