"""The host's time for a call, beside torch.mm's: public calls in 2 processes that share one GPU."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import ALGORITHMS, OPS, GpuCall, first_of
from fusedcomm.bench.gpu_check.pools import Pools, need_segments

DTYPE = torch.bfloat16
GROUP_SIZE = 2
WARM_UPS, CALLS, TIMES = 4, 4, 9  # few calls at a time, so that no queue is full


def calls(cuda: bool) -> list[GpuCall]:
    return [GpuCall(GROUP_SIZE, DTYPE, first_of(op, cuda)) for op in OPS]


def cases(device: torch.device) -> child.Cases:
    pools = Pools(device.type)
    return {f"2 ranks {name}": partial(_measured, pools, device.type, name) for name in reversed(ALGORITHMS)}


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


def matmul(device: torch.device, synchronize: Callable[[], Any]) -> float:
    x, w = torch.ones(512, 512, dtype=DTYPE, device=device), torch.ones(512, 1024, dtype=DTYPE, device=device)
    return microseconds(partial(torch.mm, x, w), synchronize)


def microseconds(call: Callable[[], Any], synchronize: Callable[[], Any]) -> float:
    """The median."""
    times = []
    for _ in range(WARM_UPS):
        call()
    for _ in range(TIMES):
        synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    child.main(cases)
