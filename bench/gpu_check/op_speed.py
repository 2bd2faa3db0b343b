"""Whole ops of virtual ranks that share one GPU, against today's programs. Nothing crosses a wire here.

Two parts, by the argument: ``ops``, and ``start program`` at 1/8: two of its 16 batches on 4 ranks, forward and the
gradient of x. There x is (16, 16192, 4096) and w (16, 4096, 8192) on each rank. A slot holds one batch here, so a call
has two rounds, and back to back each slot is used again.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.device_clock import Variants, interleaved
from fusedcomm.bench.gpu_check.gpu_calls import ALGORITHMS, OPS, GpuCall, GpuCase, GpuInputs
from fusedcomm.bench.virtual import VirtualGroup

DTYPE = torch.bfloat16
GROUP_SIZE = 4
ROWS, COLUMNS, K = 8192, 4096, 4096  # all ranks together
TINY = 32
BATCHES = 2


def calls(cuda: bool) -> list[GpuCall]:
    return ops(cuda) + start_program(cuda)


def ops(cuda: bool) -> list[GpuCall]:
    return [GpuCall(GROUP_SIZE if cuda else 1, DTYPE, case_of(op, cuda)) for op in OPS]


def start_program(cuda: bool) -> list[GpuCall]:
    of = partial(GpuCall, GROUP_SIZE if cuda else 1, DTYPE, num_rounds=BATCHES)
    return [of(forward(cuda)), of(backward(cuda))]


def cases(device: torch.device, part: str) -> child.Cases:
    cuda = device.type == "cuda"
    if part == "ops":
        return {call.case.op: partial(compare, call, device) for call in ops(cuda)}
    return {call.case.name: partial(compare, call, device) for call in start_program(cuda)}


def case_of(op: str, cuda: bool) -> GpuCase:
    """A case with ROWS / R rows in each rank's matmul; all_to_all_matmul gathers K and scatters rows."""
    rows, n, k = (ROWS, COLUMNS, K) if cuda else (TINY, TINY, TINY)
    if op in ("all_to_all_matmul", "all_gather_matmul"):
        return GpuCase(op, "speed", (rows, k), (n,), gather_dim=int(op == "all_to_all_matmul"))
    m = rows // GROUP_SIZE
    return GpuCase(op, "speed", (m, k), (n,), scatter_dim=int(op == "matmul_all_to_all"))


def forward(cuda: bool) -> GpuCase:
    tokens, k, n, heads = (16192, 4096, 8192, 16) if cuda else (8, 16, 32, 4)
    case = GpuCase("matmul_all_to_all", "forward", (BATCHES, tokens, k), (n,), gather_dim=1, scatter_dim=-2)
    return replace(case, out_shape=(heads, n // heads), batched=True)


def backward(cuda: bool) -> GpuCase:
    tokens, heads, head_dim, k = (4 * 16192, 16, 512, 4096) if cuda else (8, 4, 8, 16)
    x_shape = BATCHES, tokens, heads, head_dim
    case = GpuCase("all_to_all_matmul", "backward", x_shape, (k,), gather_dim=2, scatter_dim=1)
    return replace(case, k_dims=2, batched=True, transposed=True)


def compare(call: GpuCall, device: torch.device) -> dict[str, Any]:
    """Times of all ranks together: the matmuls alone, the program without communication, and each algorithm."""
    case = call.case
    every = call.inputs(device, 0)
    algorithms = ALGORITHMS if device.type == "cuda" else ("fused",)
    groups = {each: each.group(device) for each in (call._replace(algorithm=name) for name in algorithms)}
    _check(groups, every)
    for inputs in every:  # GPUs draw less power on integers, and so run faster
        for t in (inputs.x, *inputs.ws):
            t.normal_()
    operands = [_matmul_operands(call, inputs) for inputs in every]
    variants: Variants = {
        "unfused": lambda: case.program(every),
        "roof": lambda: [torch.matmul(x, w) for x, w in operands],
        **{each.algorithm: partial(group.run, each.run, every) for each, group in groups.items()},
    }
    times = interleaved(variants, device)
    for group in groups.values():
        group.check(call.op)
    ratios = {f"{name} over roof": ms / times["roof"] for name, ms in times.items() if name != "roof"}
    return {"rounds": call.num_rounds, **{f"{name}_ms": ms for name, ms in times.items()}, **ratios}


def _check(groups: dict[GpuCall, VirtualGroup], every: list[GpuInputs]) -> None:
    """Inputs are small integers here; cuBLAS may round partial sums of them, and a reduction rounds every rank's."""
    for call, group in groups.items():
        outs = group.run(call.run, every)
        group.check(call.op)
        for (out, *_), (wanted, *_) in zip(outs, call.case.program(every), strict=True):
            right = (out - wanted).abs() <= 4 + 2e-2 * wanted.abs()  # False for NaN
            assert right.all(), f"{call} {call.algorithm}: {(~right).sum().item()} of {out.numel()} values are wrong"


def _matmul_operands(call: GpuCall, inputs: GpuInputs) -> tuple[Tensor, Tensor]:
    """x and w of a rank's own matmul: where x is gathered, it has the gathered size."""
    x, w = inputs.x, inputs.ws[0]
    if call.case.gathers:
        rows = call.exchange().out_shape[:-1]
        x = torch.randn(*rows, w.shape[-2], dtype=x.dtype, device=x.device)
    return x, w
