"""The start program at 1/8: two of its 16 batches on 4 virtual ranks that share one GPU, forward and the gradient of x.

There x is (16, 16192, 4096) and w (16, 4096, 8192) on each rank. A slot holds one batch here, so a call has two rounds,
and back to back each slot is used again.
"""

from __future__ import annotations

from functools import partial

import torch

from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import GpuCall, GpuCase
from fusedcomm.bench.gpu_check.op_speed import DTYPE, compare

BATCHES, GROUP_SIZE = 2, 4
NUM_ROUNDS = 2


def calls(cuda: bool) -> list[GpuCall]:
    of = partial(GpuCall, GROUP_SIZE if cuda else 1, DTYPE)
    return [of(forward(cuda), NUM_ROUNDS), of(backward(cuda), NUM_ROUNDS)]


def cases(device: torch.device) -> child.Cases:
    return {call.case.name: partial(compare, call, device) for call in calls(device.type == "cuda")}


def forward(cuda: bool) -> GpuCase:
    tokens, k, n, heads = (16192, 4096, 8192, 16) if cuda else (8, 16, 32, 4)
    return GpuCase(
        "matmul_all_to_all",
        "forward",
        (BATCHES, tokens, k),
        (n,),
        gather_dim=1,
        scatter_dim=-2,
        out_shape=(heads, n // heads),
        batched=True,
    )


def backward(cuda: bool) -> GpuCase:
    tokens, heads, head_dim, k = (4 * 16192, 16, 512, 4096) if cuda else (8, 4, 8, 16)
    return GpuCase(
        "all_to_all_matmul",
        "backward",
        (BATCHES, tokens, heads, head_dim),
        (k,),
        gather_dim=2,
        scatter_dim=1,
        k_dims=2,
        batched=True,
        transposed=True,
    )


if __name__ == "__main__":
    child.main(cases)
