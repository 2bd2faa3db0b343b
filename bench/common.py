"""The common part of the benches in this folder: options, ratios within rounds, the time of a small call, and the run
from ranks to a table and JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedcomm.bench import trace
from fusedcomm.bench.measure import DTYPES
from fusedcomm.bench.table import report
from fusedcomm.bench.timing import METHOD, ValuesDiffer, measure_rounds, repeated
from fusedcomm.env import cpu_name
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError

MOST_CALLS, MEASURED_BYTES = 64, 8 << 20  # back to back: ranks leave a barrier further apart than small calls take


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios within a round, and their P10 and P90."""

    median: float
    low: float
    high: float

    @staticmethod
    def of_rounds(a: Tensor, b: Tensor) -> Ratio:
        low, median, high = (a / b).quantile(a.new_tensor([0.1, 0.5, 0.9])).tolist()
        return Ratio(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} .. {self.high:.2f})"


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def rounds_of_one(
    calls: Mapping[str, Callable[[], Any]], num_bytes: int, device: torch.device, rounds: int
) -> dict[str, Tensor]:
    """Seconds [rounds] of one of many calls back to back, the fewer the more bytes each takes."""
    repeat = max(1, min(MOST_CALLS, MEASURED_BYTES // num_bytes))
    timed = {name: partial(repeated, call, repeat) for name, call in calls.items()}
    found = measure_rounds(timed, device, rounds=rounds, warmup=2, calls=repeat)
    return {name: seconds / repeat for name, seconds in found.items()}


def add_arguments(parser: argparse.ArgumentParser, rounds: int = 15) -> None:
    dtype = "of the data (default: bfloat16 on GPUs, float32 on CPUs, of which many multiply no bfloat16)"
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help=dtype)
    text = f"measurements of each variant (default: {rounds})"
    parser.add_argument("--rounds", "-n", type=console.positive, default=rounds, metavar="N", help=text)
    console.add_rank_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="also write every figure, and what it depends on, as JSON")


def dtypes_of(args: argparse.Namespace) -> list[str]:
    return args.dtype or ["bfloat16" if world.asked_for(args)[0] == "cuda" else "float32"]


def run_cases(
    name: str,
    args: argparse.Namespace,
    measure: Callable[..., Any],
    cases: Sequence[Sequence[Any]],
    columns: Sequence[Column],
    end: Callable[[list[Any]], dict[str, Any]] = lambda rows: {},
) -> int:
    """A row, or rows, of each case by ``measure(rank, *case, device_type, rounds)`` in all ranks; a table and JSON.

    ``end`` gets the rows, and gives more facts. Exit code: 0, 1 for wrong values or a failure in a rank, 2 for wrong
    arguments.
    """
    device_type, world_size, problem = world.asked_for(args)
    if problem := problem or console.not_writable(args, "json"):
        return console.fail(name, problem, code=2)
    rows: list[Any] = []
    processor = torch.cuda.get_device_name() if device_type == "cuda" else cpu_name()
    try:
        with (
            world.ranks(device_type, world_size, 3600, trace.QUIET) as call,
            console.progress(world.is_rank_0(), len(cases), "measuring", "measured") as on_done,
        ):
            for done, case in enumerate(cases, 1):
                found = call(measure, *case, device_type, args.rounds)
                rows += found if isinstance(found, list) else [] if found is None else [found]
                on_done(done)
    except (ValuesDiffer, RankError) as error:
        return console.fail(name, world.message(error))
    finally:
        if rows:  # those before a failure too; none in torchrun's other ranks
            console.show(Table(columns, rows, f"{world_size} ranks, {processor}"))
    if rows:
        facts = {"timing": METHOD, "rounds": args.rounds} | end(rows)
        if args.json:
            console.write_json(args.json, run_facts() | facts | {"rows": [report(row) for row in rows]})
    return 0
