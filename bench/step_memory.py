"""What training takes of a host's memory, with results in place and without: 2 CPU ranks, a transformer of 4 blocks.

    python -m fusedcomm.bench.step_memory [--tokens N] [--hidden N] [--heads N] [--blocks N] [--repeats N] [--json FILE]

A block is Ulysses attention and an MLP, in float32, with AdamW. Memory is the proportional size (PSS), summed over the
ranks, so that a page which both have mapped counts once. It is read behind the forward, where all that the backward
needs is alive, behind the backward, and behind the optimizer. A row has the most of a step.

Ranks are started anew for each reading, by turns with the heap of results and without (FUSEDCOMM_RESULTS_BYTES=0). A
ratio is the median over these pairs, with the least and the largest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fusedcomm
from fusedcomm.bench.common import at_most, listed, tabulated
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.launch.provenance import run_facts

POINTS = ("forward", "backward", "optimizer")
SETTINGS: dict[str, dict[str, str]] = {"heap": {}, "no_heap": {"FUSEDCOMM_RESULTS_BYTES": "0"}}
MOST = 1.05  # with the heap / without
WARM_UP, STEPS = 4, 4  # the heap takes in a size when a result of it has been dropped
TIMEOUT_S = 600
MB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """x is [tokens, hidden] on every rank."""

    tokens: int = 1024
    hidden: int = 512
    heads: int = 8
    blocks: int = 4


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(sizes.hidden), nn.LayerNorm(sizes.hidden)
        qkv, out = nn.Linear(sizes.hidden, 3 * sizes.hidden), nn.Linear(sizes.hidden, sizes.hidden)
        self.qkv = fusedcomm.nn.UlyssesQKV.from_linear(qkv, sizes.heads)
        self.out = fusedcomm.nn.UlyssesOut.from_linear(out, sizes.heads)
        self.up, self.down = nn.Linear(sizes.hidden, 4 * sizes.hidden), nn.Linear(4 * sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(self.norm(x)))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def pss() -> int:
    """Bytes of this process, of which a page that several have mapped counts in parts."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def of_all_ranks() -> int:
    dist.barrier()
    total = torch.tensor(pss())
    dist.all_reduce(total)  # no rank goes on before all have read
    return int(total)


def measure_step(rank: int, sizes: Sizes) -> list[int]:
    """The most bytes at each of POINTS."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(sizes) for _ in range(sizes.blocks)))
    optimizer = torch.optim.AdamW(model.parameters())
    most = [0] * len(POINTS)
    for step in range(WARM_UP + STEPS):
        y = model(torch.randn(1, sizes.tokens, sizes.hidden))
        read = [of_all_ranks()]
        y.square().mean().backward()
        read.append(of_all_ranks())
        fusedcomm.nn.sum_replicated_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        read.append(of_all_ranks())
        if step >= WARM_UP:
            most = [max(pair) for pair in zip(most, read, strict=True)]
    return most


@dataclass(frozen=True)
class MemoryRow:
    point: str
    heap: list[int]  # bytes, by repeat
    no_heap: list[int]

    @property
    def ratios(self) -> list[float]:
        return sorted(a / b for a, b in zip(self.heap, self.no_heap, strict=True))


def _megabytes(name: str, value: Callable[[MemoryRow], list[int]]) -> Column:
    return Column(f"{name}\nMB", f"PSS of all ranks, {name}", lambda row: f"{median(value(row)) / MB:.0f}")


COLUMNS = (
    Column("behind", "the part of a step", lambda row: row.point, left=True),
    _megabytes("with the heap", lambda row: row.heap),
    _megabytes("without it", lambda row: row.no_heap),
    Column(
        "ratio",
        "with / without: median, least and largest of the pairs",
        lambda row: f"{median(row.ratios):.3f} ({row.ratios[0]:.3f} to {row.ratios[-1]:.3f})",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    found: list[dict[str, list[int]]] = []
    for _ in range(args.repeats):
        pair = {}
        for name, env in SETTINGS.items():
            with world.ranks("cpu", 2, TIMEOUT_S, env) as call:
                pair[name] = call(measure_step, sizes)
        found.append(pair)
    rows: list[MemoryRow] = []
    with tabulated(COLUMNS, rows, len(POINTS)) as add:
        for i, point in enumerate(POINTS):
            add(MemoryRow(point, [each["heap"][i] for each in found], [each["no_heap"][i] for each in found]))
    goals = [at_most(f"with / without, behind the {row.point}", median(row.ratios), MOST) for row in rows]
    print(*goals, sep="\n")
    if args.json:
        facts = {"program": "step_memory", "sizes": asdict(sizes), "repeats": args.repeats}
        console.write_json(args.json, run_facts() | facts | listed(rows=rows, goals=goals))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fusedcomm.bench.step_memory", description="CPU ranks alone.")
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--repeats", type=console.positive, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    if world.under_torchrun():
        parser.error("it starts its ranks itself, as their environment differs")
    return args


if __name__ == "__main__":
    sys.exit(main())
