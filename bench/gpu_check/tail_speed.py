"""The end of a decoding step, captured: a matmul of few rows, all_reduce, residual and norm, beside the same without
the all_reduce; and of a training step, by reduce_scatter. Ranks are virtual, so that nothing crosses a wire, and each
has its share of the SMs.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.device_clock import Variants, interleaved
from fusedcomm.bench.gpu_check.gpu_calls import FINGERPRINT
from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import proof
from fusedcomm.ops.exact_problem import NormProblem
from fusedcomm.ops.whole_group import PROGRAMS, MatmulSize
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.planner import Plan

DTYPE = torch.bfloat16
ROWS, K, HIDDEN = (1, 16, 64, 256), 1024, 8192
SCATTERED, TWO_SHOT = (16, 512), 2048  # rows of each of 2 ranks, and of all
GROUP_SIZES = (2, 8)
CALLS = 16  # in a graph
Graphs = list[Callable[[], Any]]


def tails(cuda: bool) -> dict[str, tuple[int, int, str, int]]:
    """By name: rows, ranks, the op in front of the norm, and which of its exchanges: one-shot, or two-shot."""
    scattered = {f"{rows} scattered R={2 if cuda else 1}": (rows, 2 if cuda else 1) for rows in SCATTERED[: 1 + cuda]}
    found = {name: (*tail, "matmul_reduce_scatter", 0) for name, tail in scattered.items()}
    if not cuda:
        return {"1 rows R=1": (1, 1, "matmul_all_reduce", 0), **found}
    for rows, size in itertools.product(ROWS, GROUP_SIZES):
        found[f"{rows} rows R={size}"] = rows, size, "matmul_all_reduce", 0
    return found | {f"{TWO_SHOT} rows two-shot R=2": (TWO_SHOT, 2, "matmul_all_reduce", 1)}


def cases(device: torch.device) -> child.Cases:
    return {name: partial(compare, device, *tail) for name, tail in tails(device.type == "cuda").items()}


def jobs() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, tail in tails(cuda=True).items():
        yield f"tail of {name}", partial(loaded, torch.device("meta"), *tail)


def loaded(device: torch.device, rows: int, size: int, op: str, way: int) -> tuple[VirtualGroup, list[proof.Call]]:
    """A group, and the call of each rank."""
    k, hidden = (K, HIDDEN) if device.type != "cpu" else (16, 16)
    problem = NormProblem(PROGRAMS[op], MatmulSize(rows, k, hidden), size)
    calls = [proof.calls_of(problem, rank, DTYPE, device, f"virtual {size}")[way] for rank in range(size)]
    group = VirtualGroup(size, max(128, calls[0].operands[3].numel() * DTYPE.itemsize * size), device)
    group.load(partial(_fused, call=calls[0]), FINGERPRINT)
    return group, calls


def compare(device: torch.device, *tail: Any) -> dict[str, Any]:
    """Microseconds of one of many calls in a row, all ranks at once."""
    group, calls = loaded(device, *tail)
    programs: dict[str, Callable[[Workspace, proof.Call], Any]] = {
        "matmul": lambda _, call: call.operands[0] @ call.operands[1],
        "local": lambda _, call: _local(*call.operands[:5]),
        "fused": _fused,
    }
    graphs = {name: _captured(group, program, calls) for name, program in programs.items()}
    variants: Variants = {name: partial(group.run, lambda _, graph: graph(), each) for name, each in graphs.items()}
    times = interleaved(variants, device)
    group.check("tail")
    found = {f"{name}_us": 1e3 * ms / CALLS for name, ms in times.items()}
    return {
        **found,
        "fused over local": times["fused"] / times["local"],
        "fused over matmul": times["fused"] / times["matmul"],
    }


def _fused(workspace: Workspace, call: proof.Call) -> list[Tensor]:
    def plan(op: str, exchange: Exchange) -> Plan:
        return Plan(op, "fused", "bench", fingerprint=FINGERPRINT, exchange=exchange)

    return call.run(workspace, plan).returned


def _local(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(torch.addmm(bias, x, w)[: len(residual)] + residual, weight.shape, weight, 0.0)


def _captured(group: VirtualGroup, program: Callable[[Workspace, proof.Call], Any], calls: list[proof.Call]) -> Graphs:
    """`CALLS` calls of each rank, as a graph where there are any."""
    found: Graphs = []
    for workspace, call, stream in zip(group.workspaces, calls, group.streams, strict=True):
        if stream is None:
            found.append(partial(program, workspace, call))
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                program(workspace, call)
        found.append(graph.replay)
    return found
