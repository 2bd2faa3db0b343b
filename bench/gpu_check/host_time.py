"""The host's time for a call, beside torch.mm's: public calls in 2 processes that share one GPU."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fusedcomm
from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import ALGORITHMS, first_calls
from fusedcomm.bench.gpu_check.pools import Pools

DTYPE = torch.bfloat16
GROUP_SIZE = 2
WARM_UPS, CALLS, TIMES = 4, 4, 9  # few calls at a time, so that no queue is full


def cases(device: torch.device) -> child.Cases:
    pools = Pools(device)
    return {f"2 ranks {name}": pools.case(GROUP_SIZE, public, name) for name in reversed(ALGORITHMS)}


def public(rank: int, device_type: str, algorithm: str) -> dict[str, float]:
    """Microseconds until a call returns, forward."""
    device, found = torch.device(device_type), {}
    with fusedcomm.force_algorithm(algorithm, strict=True):
        for call in first_calls(device_type == "cuda"):
            inputs = call.inputs(device, 0)[rank]
            found[call.op] = microseconds(partial(call.public, inputs))
    x, w = torch.ones(512, 512, dtype=DTYPE, device=device), torch.ones(512, 1024, dtype=DTYPE, device=device)
    return {"torch.mm": microseconds(partial(torch.mm, x, w)), **found}


def microseconds(call: Callable[[], Any]) -> float:
    """The median."""
    times = []
    for _ in range(WARM_UPS):
        call()
    for _ in range(TIMES):
        fusedcomm.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)
