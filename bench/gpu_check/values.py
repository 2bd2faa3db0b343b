"""Values of all ops, algorithms and dtypes in virtual groups: one process, a stream for each rank, the SMs divided."""

from __future__ import annotations

from functools import partial

import torch

from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import ALGORITHMS, CASES, SMALL, GpuCall

# Each call has seconds of Triton's compiler behind it. The first combination runs all, the others each op's ragged one.
COMBINATIONS = [
    (2, torch.bfloat16),
    (4, torch.float16),
    (8, torch.bfloat16),
    (2, torch.float32),
]


def calls(cuda: bool) -> list[GpuCall]:
    """A virtual rank waits for others only on a GPU: in the interpreter one runs after the other."""
    if not cuda:
        return [GpuCall(1, dtype, case) for _, dtype in COMBINATIONS[1:] for case in SMALL]
    every = [GpuCall(*COMBINATIONS[0], case) for case in CASES]
    return every + [GpuCall(*each, case) for each in COMBINATIONS[1:] for case in CASES if case.name == "ragged"]


def cases(device: torch.device) -> child.Cases:
    cuda = device.type == "cuda"
    return {
        f"{call} {algorithm}": partial(call.check, algorithm, device)
        for call in calls(cuda)
        for algorithm in (ALGORITHMS if cuda else ("fused",))
    }


if __name__ == "__main__":
    child.main(cases)
