"""What the commands of this folder share: goals beside figures, the pages of the ranks, and options.

On a CPU there are two settings, and a figure names its own. By default torch takes memory in 4 KiB pages, while
fusedcomm's ops ask for huge pages for their results: that is what users get, but part of the speed-up is page faults
saved, and an op can be faster than its roof. With --huge-pages torch asks for them too (THP_MEM_ALLOC_ENABLE=1), so all
that is measured gets the same pages, and what is left is what overlap alone gains.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Goal:
    """A figure, and what it must reach. Without a bound it is only reported."""

    name: str
    value: float
    bound: str | None = None
    met: bool | None = None

    def __str__(self) -> str:
        text = f"{self.name:40s}{self.value:6.2f}"
        return text if self.bound is None else f"{text}   goal on CPU {self.bound}: {'' if self.met else 'not '}met"


def at_least(name: str, value: float, bound: float | None) -> Goal:
    return Goal(name, value) if bound is None else Goal(name, value, f">= {bound}", value >= bound)


def at_most(name: str, value: float, bound: float | None) -> Goal:
    return Goal(name, value) if bound is None else Goal(name, value, f"<= {bound:g}", value <= bound)


@contextlib.contextmanager
def tabulated(
    columns: Sequence[Column], rows: list[Any], total: int, title: str = ""
) -> Iterator[Callable[[Any], None]]:
    """Print ``rows`` at the end, those before a failure too. Yields a function that adds a row, up to ``total``."""
    with console.progress(world.is_rank_0(), total, "measuring", "measured") as on_done:

        def add(row: Any) -> None:
            rows.append(row)
            on_done(len(rows))

        try:
            yield add
        finally:
            if rows:
                console.show(Table(columns, rows, title))


DRAWS = 1000


def draws(rounds: int) -> Tensor:
    """Rounds drawn anew from those of a run, ``DRAWS`` times: how well it knows a statistic of them (the bootstrap)."""
    return torch.randint(rounds, (DRAWS, rounds), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class PairedRatio:
    """The median of the ratios within a round, and its 95% interval, from rounds drawn anew."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(a: Tensor, b: Tensor) -> PairedRatio:
        ratios = a / b
        drawn = ratios[draws(len(ratios))].quantile(0.5, dim=-1)
        low, high = drawn.quantile(drawn.new_tensor([0.025, 0.975])).tolist()
        return PairedRatio(ratios.quantile(0.5).item(), low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} .. {self.high:.2f})"


def ms(seconds: float, digits: int = 3) -> str:
    return f"{seconds * 1e3:.{digits}f}"


def listed(**lists: Sequence[Any]) -> dict[str, list[dict[str, Any]]]:
    """The JSON of lists of dataclasses, by name."""
    return {name: [asdict(each) for each in every] for name, every in lists.items()}


def has_huge_pages(rank: int) -> bool:
    """Whether torch's own allocations ask for huge pages, as this rank's environment has it."""
    return world.torch_asks_for_huge_pages()


def pages(huge_pages: bool) -> str:
    setting = "huge for all" if huge_pages else "torch's default, huge for the results of fusedcomm's ops"
    return f"pages: {setting} (transparent_hugepage: {world.system_huge_pages()})"


def add_common_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--huge-pages", action="store_true", help="torch asks for them as fusedcomm does; on CPU")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", metavar="FILE")


def refuse_wrong_pages(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.huge_pages and world.default_device_type() == "cuda":
        parser.error("--huge-pages is for CPU ranks, and this bench takes the GPUs")
    if args.huge_pages and world.under_torchrun() and not world.torch_asks_for_huge_pages():
        parser.error("--huge-pages under torchrun: start torchrun with THP_MEM_ALLOC_ENABLE=1")
