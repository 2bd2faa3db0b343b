"""Few hardware queues: streams that share one run in the order in which the host launched their work.

CUDA_DEVICE_MAX_CONNECTIONS says how many a process has: 8 by default, 1 under Megatron, 32 in the other parts. Each
rank is a process here, as virtual ranks would share the queues.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusedcomm.bench.gpu_check import child, processes
from fusedcomm.bench.gpu_check.gpu_calls import ALGORITHMS, OPS, GpuCase, first_of
from fusedcomm.bench.gpu_check.pools import Pools, need_segments

GROUP_SIZE = 2
NUM_QUEUES = (1, 8, 32)
SLOTS = {"FUSEDCOMM_WORKSPACE_BYTES": str(2 << 20)}  # a call has several rounds


def cases(device: torch.device) -> child.Cases:
    pools, cuda = Pools(device.type), device.type == "cuda"
    return {
        f"{number} hardware queues {algorithm}: {case.op}": partial(_run, pools, device.type, number, algorithm, case)
        for number in (NUM_QUEUES if cuda else NUM_QUEUES[:1])
        for algorithm in reversed(ALGORITHMS)
        for case in (first_of(op, cuda) for op in OPS)
    }


def _run(pools: Pools, device_type: str, number: int, algorithm: str, case: GpuCase) -> Any:
    need_segments(device_type)
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(number)} | (SLOTS if device_type == "cuda" else {})
    return pools.run(GROUP_SIZE, forward_and_backward, device_type, algorithm, case, env=env)


def forward_and_backward(rank: int, device_type: str, algorithm: str, case: GpuCase) -> dict[str, Any]:
    found = processes.values(rank, device_type, algorithm, case)
    return found | {"gradients": processes.backward(rank, device_type, algorithm, case)}


if __name__ == "__main__":
    child.main(cases)
