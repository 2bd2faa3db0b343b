"""Prints what the cost model predicts for the five ops in Llama 70B: `python -m tests.helpers.predicted_ops`.

Nothing is measured. docs/status.md has the table.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import torch

from fusedcomm.memory.topology import Topology
from fusedcomm.plan import planner
from fusedcomm.plan.cost import in_pieces, model
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.exchange import Exchange

HIDDEN, MLP, HEADS = 8192, 28672, 10240  # 64 heads of q, 8 of k, 8 of v, each of 128
SIZES = (4, 8)
GPU = SimpleNamespace(
    device=torch.device("cuda"),
    topology=Topology(no_workspace=None, no_fused=None, workspace_bytes=1 << 30, algorithm=None),
    max_slot_bytes=1 << 29,  # each call has one round
    no_workspace=None,
    for_capture=False,
)


def calls(size: int) -> Iterator[tuple[str, int, Exchange]]:
    """By op and tokens: in Ulysses, then tensor parallel."""
    part, w = MLP // size, (MLP // size, HIDDEN)
    for tokens in (16384, 65536):
        rows, columns = (tokens // size, HIDDEN), (tokens, HIDDEN // size)
        yield "matmul_all_to_all", tokens, shapes.matmul_all_to_all(rows, (HIDDEN, HEADS), None, 0, 1, size)
        yield "all_to_all_matmul", tokens, shapes.all_to_all_matmul(columns, (HIDDEN, HIDDEN), 1, 0, size)
    for tokens in (4096, 8192):
        rows, columns = (tokens // size, HIDDEN), (tokens, part)
        yield "all_gather_matmul", tokens, shapes.all_gather_matmul(rows, [(HIDDEN, part)], 0, size)
        yield "matmul_reduce_scatter", tokens, shapes.matmul_reduce_scatter(columns, w, "sum", 0, size)
        yield "matmul_all_reduce", tokens, shapes.matmul_all_reduce(columns, w, "sum", size)


def cells(op: str, exchange: Exchange) -> list[str]:
    """Times over the local matmul's, and the planner's choice."""
    call = op, exchange, "bfloat16", model.DEFAULTS["cuda"]
    times = {**model.estimate(*call), "pipelined": in_pieces.fastest(*call)[1]}
    roof, chosen = model.TimedCall(*call).matmul(), planner.plan(op, exchange, torch.bfloat16, GPU).algorithm
    return [*(f"{times[name] / roof:.2f}" for name in ("unfused", "pipelined", "chunked", "fused")), f"`{chosen}`"]


def table() -> str:
    lines = [
        "| op | tokens | `unfused` | `pipelined` | `chunked` | `fused` | `auto` |",
        "|---|---|---|---|---|---|---|",
    ]
    for (op, tokens, four), (*_, eight) in zip(*map(calls, SIZES), strict=True):
        both = zip(cells(op, four), cells(op, eight), strict=True)
        lines.append(f"| `{op}` | {tokens} | {' | '.join(map(', '.join, both))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
