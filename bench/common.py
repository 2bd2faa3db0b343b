"""The common part of the benches in this folder: options, ratios within rounds, goals, and the run from ranks to JSON.

On a CPU there are two settings, and a figure names its own. By default torch takes memory in 4 KiB pages, while
fusedcomm's ops ask for huge pages for their results: part of the speed-up is page faults saved, and an op can be faster
than its roof. With --huge-pages torch asks for them too (THP_MEM_ALLOC_ENABLE=1): the rest is the gain of overlap.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fusedcomm.bench.timing import ValuesDiffer
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DTYPE_COLUMN = Column("dtype", "the dtype of all tensors", lambda row: row.dtype, left=True)


@dataclass(frozen=True)
class Goal:
    """A figure and its bound. Without one it is only reported."""

    name: str
    value: float
    bound: str | None = None
    met: bool | None = None

    def __str__(self) -> str:
        text = f"{self.name:40s}{self.value:6.2f}"
        return text if self.bound is None else f"{text}   goal on CPU {self.bound}: {'' if self.met else 'not '}met"


def at_least(name: str, value: float, bound: float) -> Goal:
    return Goal(name, value, f">= {bound}", value >= bound)


def draws(rounds: int) -> Tensor:
    """1000 draws of a run's rounds, with replacement, for the error of a statistic (the bootstrap)."""
    return torch.randint(rounds, (1000, rounds), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios within a round, and an interval: P10 and P90 of single rounds, or one of the median."""

    median: float
    low: float
    high: float

    @staticmethod
    def of_rounds(a: Tensor, b: Tensor) -> Ratio:
        low, median, high = (a / b).quantile(a.new_tensor([0.1, 0.5, 0.9])).tolist()
        return Ratio(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} .. {self.high:.2f})"


def ms(seconds: float, digits: int = 1) -> str:
    return f"{seconds * 1e3:.{digits}f}"


@contextlib.contextmanager
def tabulated(columns: Sequence[Column], rows: list[Any], total: int) -> Iterator[Callable[[Any], None]]:
    """Print ``rows`` at the end, those before a failure too. Yields a function that adds a row, up to ``total``."""
    with console.progress(world.is_rank_0(), total, "measuring", "measured") as on_done:

        def add(row: Any) -> None:
            rows.append(row)
            on_done(len(rows))

        try:
            yield add
        finally:
            if rows:
                console.show(Table(columns, rows))


def parse(argv: Sequence[str] | None, sizes: type, rounds: int) -> argparse.Namespace:
    """The options of a bench; the fields of dataclass ``sizes`` are options too."""
    parser = argparse.ArgumentParser(description="Values are checked before anything is timed.")
    for field in fields(sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--huge-pages", action="store_true", help="torch asks for them as fusedcomm does; on CPU")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    if args.huge_pages and world.default_device_type() == "cuda":
        parser.error("--huge-pages is for CPU ranks, and this bench takes the GPUs")
    if args.huge_pages and world.under_torchrun() and not world.torch_asks_for_huge_pages():
        parser.error("--huge-pages under torchrun: start torchrun with THP_MEM_ALLOC_ENABLE=1")
    args.sizes = sizes(**{field.name: getattr(args, field.name) for field in fields(sizes)})
    return args


def run(
    name: str,
    args: argparse.Namespace,
    measure: Callable[..., Any],
    columns: Sequence[Column],
    goals_of: Callable[[Any], list[Goal]],
) -> int:
    """A row for each dtype by ``measure(rank, sizes, dtype, device_type, rounds)`` in all ranks; a table and JSON."""
    device_type = world.default_device_type()
    rows: list[Any] = []
    env = world.HUGE_PAGES if args.huge_pages else None
    try:
        with world.ranks(device_type, world.default_world_size(device_type), 3600, env) as call:
            huge_pages = call(_has_huge_pages)
            if world.is_rank_0():
                print(args.sizes, *([_pages(huge_pages)] if device_type == "cpu" else []), sep="\n", flush=True)
            with tabulated(columns, rows, len(args.dtype)) as add:
                for dtype in args.dtype:
                    row = call(measure, args.sizes, dtype, device_type, args.rounds)
                    if row is not None:
                        add(row)
    except (ValuesDiffer, RankError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    if not rows:  # torchrun's other ranks
        return 0
    goals = [goal for row in rows for goal in goals_of(row)]
    print(*goals, sep="\n")
    if args.json:
        facts = {"bench": name, "sizes": asdict(args.sizes), "rounds": args.rounds, "huge_pages": huge_pages}
        console.write_json(args.json, run_facts() | facts | {"rows": _listed(rows), "goals": _listed(goals)})
    return 0


def _listed(every: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(each) for each in every]


def _has_huge_pages(rank: int) -> bool:
    return world.torch_asks_for_huge_pages()


def _pages(huge_pages: bool) -> str:
    setting = "huge for all" if huge_pages else "torch's default, huge for the results of fusedcomm's ops"
    return f"pages: {setting} (transparent_hugepage: {world.system_huge_pages()})"
