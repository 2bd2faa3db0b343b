"""The end of a decoding step, captured: a matmul of few rows, all_reduce, residual and norm, beside the same without
the all_reduce; and of a training step, by reduce_scatter. Ranks are virtual, so that nothing crosses a wire, and each
has its share of the SMs.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.device_clock import Variants, interleaved
from fusedcomm.bench.gpu_check.gpu_calls import FINGERPRINT
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import proof
from fusedcomm.ops.exact_problem import NormProblem
from fusedcomm.ops.whole_group import PROGRAMS, MatmulSize
from fusedcomm.plan.call_plan import Plan
from fusedcomm.testing.virtual import VirtualGroup

DTYPE = torch.bfloat16
ROWS, K, HIDDEN = (1, 16, 64, 256), 1024, 8192
SCATTERED = (16, 512)  # rows of each of 2 ranks
GROUP_SIZES = (2, 8)
CALLS = 16  # in a graph
Graphs = list[Callable[[], Any]]


def cases(device: torch.device) -> child.Cases:
    found = {
        f"{rows} rows R={size}": partial(compare, rows, size, device)
        for size in (GROUP_SIZES if device.type == "cuda" else (1,))
        for rows in ROWS[: None if device.type == "cuda" else 1]
    }
    for rows, size in itertools.product(SCATTERED, [2]) if device.type == "cuda" else [(16, 1)]:
        found[f"{rows} scattered R={size}"] = partial(compare, rows, size, device, "matmul_reduce_scatter")
    return found


def jobs() -> Any:
    for size in GROUP_SIZES:
        for rows in ROWS:
            yield f"tail of {rows} rows R={size}", partial(loaded, rows, size, torch.device("meta"))
    for rows in SCATTERED:
        meta = torch.device("meta")
        yield f"scattered tail of {rows} rows", partial(loaded, rows, 2, meta, "matmul_reduce_scatter")


def calls_of(rows: int, size: int, device: torch.device, op: str = "matmul_all_reduce") -> list[proof.Call]:
    """The call of each rank: one-shot, or with ``rows`` of the result on each."""
    k, hidden = (K, HIDDEN) if device.type != "cpu" else (16, 16)
    problem = NormProblem(PROGRAMS[op], MatmulSize(rows, k, hidden), size)
    return [proof.calls_of(problem, rank, DTYPE, device, f"virtual {size}")[0] for rank in range(size)]


def loaded(rows: int, size: int, device: torch.device, *op: str) -> tuple[VirtualGroup, list[proof.Call]]:
    calls = calls_of(rows, size, device, *op)
    group = VirtualGroup(size, max(128, calls[0].operands[3].numel() * DTYPE.itemsize * size), device)
    group.load(partial(_fused, call=calls[0]), FINGERPRINT)
    return group, calls


def compare(rows: int, size: int, device: torch.device, *op: str) -> dict[str, Any]:
    """Microseconds of one of many calls in a row, all ranks at once."""
    group, calls = loaded(rows, size, device, *op)
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
    return call.run(
        workspace, lambda op, exchange: Plan(op, "fused", "bench", fingerprint=FINGERPRINT, exchange=exchange)
    )


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


if __name__ == "__main__":
    child.main(cases)
