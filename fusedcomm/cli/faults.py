"""``fusedcomm faults``: injects what can go wrong between ranks, and prints a table of what came of it."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from fusedcomm.runtime.topology import no_native
from fusedcomm.testing.faults import Cell, Verdict, run_cells, select
from fusedcomm.testing.faults.cells import OPS
from fusedcomm.testing.faults.matrix import WORKERS

ABOUT = """A cell is one fault, in one rank, at one step of one op (--list names them; see docs/faults.md).
It survives if every rank gets right values, or an error in time."""


@dataclass(frozen=True)
class FaultRow:
    """The cells of one fault and algorithm. ``ops`` has survived / tried by op.

    ``worst`` is the longest time to an error, in time-outs.
    """

    fault: str
    algorithm: str
    tried: int
    survived: int
    wrong_numbers: int
    hangs: int
    worst: float | None
    ops: dict[str, str]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "faults",
        help="delay, stop, kill and fail ranks on purpose; check that errors come in time",
        description="Injects faults into ranks that it starts on this machine's CPUs: a cell is one fault at one step "
        "of a call. Checks that every rank gets right values, or an error in time. Prints a table with a line per "
        "fault; all cells take some minutes. Exit code: 0 if every cell survived, 1 if not, 2 for wrong arguments.",
        epilog="example: fusedcomm faults --only '*/kill/*'",
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        default=[],
        help="cells whose name, or parts of it that follow each other, match a pattern of the shell; can be repeated "
        "(default: all cells)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer cells: every fault, step and op at least once")
    parser.add_argument(
        "--workers",
        type=console.positive,
        metavar="N",
        default=WORKERS,
        help=f"cells that run at a time (default: {WORKERS})",
    )
    console.add_oversubscribe(parser)
    parser.add_argument("--list", action="store_true", help="print the names of the cells, and run none")
    parser.add_argument("--json", metavar="FILE", help="also write everything that was found to FILE, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    cells = select(args.only, args.quick)
    if not cells:
        patterns = ", ".join(args.only)
        return console.fail("faults", f"--only must match a cell (--list prints their names), got {patterns}", code=2)
    if args.list:
        print(*cells, sep="\n")
        return 0
    if problem := _cannot_run(args):
        return console.fail("faults", problem, code=2)
    start, done = time.monotonic(), itertools.count(1)
    try:
        with console.progress(True, len(cells), "starting", "cell") as on_done:
            verdicts = run_cells(cells, workers=args.workers, on_verdict=lambda verdict: on_done(next(done)))
    except RankError as error:  # before a cell: ranks did not start
        return console.fail("faults", str(error))
    seconds = time.monotonic() - start
    rows = summary(cells, verdicts)
    out = console.stdout()
    console.show(table(rows), out)
    out.print(ABOUT)
    for verdict in verdicts:
        for text in verdict.found:
            out.print(f"FAILED {verdict.cell}: {text}", markup=False)
    out.print(f"{total(verdicts)}; {seconds:.0f} s")
    if args.json:
        facts = run_facts() | {"total": total(verdicts)}
        found = {"rows": [asdict(row) for row in rows], "cells": [asdict(verdict) for verdict in verdicts]}
        console.write_json(args.json, facts | found)
    return 0 if all(verdict.survived for verdict in verdicts) else 1


def _cannot_run(args: argparse.Namespace) -> str | None:
    if missing := no_native():
        return missing
    if not args.oversubscribe and (problem := world.too_many("--workers", args.workers, WORKERS, "cells")):
        return problem
    if problem := console.not_writable(args.json):
        return f"--json {problem}"
    return None


def summary(cells: Sequence[Cell], verdicts: Sequence[Verdict]) -> list[FaultRow]:
    """A row for each fault and algorithm, in the order of the cells."""
    of: dict[tuple[str, str], list[tuple[Cell, Verdict]]] = {}
    for cell, verdict in zip(cells, verdicts, strict=True):
        of.setdefault((cell.fault, cell.algorithm), []).append((cell, verdict))
    return [
        FaultRow(
            fault,
            algorithm,
            tried=len(pairs),
            survived=sum(verdict.survived for _, verdict in pairs),
            wrong_numbers=sum(verdict.wrong_numbers for _, verdict in pairs),
            hangs=sum(verdict.hung for _, verdict in pairs),
            worst=worst(verdict for _, verdict in pairs),
            ops={op: _share([verdict for cell, verdict in pairs if cell.op == op]) for op in OPS},
        )
        for (fault, algorithm), pairs in of.items()
    ]


def worst(verdicts: Iterable[Verdict]) -> float | None:
    return max((verdict.worst for verdict in verdicts if verdict.worst is not None), default=None)


def _share(verdicts: Sequence[Verdict]) -> str:
    return f"{sum(verdict.survived for verdict in verdicts)}/{len(verdicts)}" if verdicts else "-"


def table(rows: Sequence[FaultRow]) -> Table:
    columns = [
        Column("fault", "what is done to a rank", lambda row: row.fault, left=True),
        Column("algorithm", "how the call runs that the fault meets", lambda row: row.algorithm, left=True),
        Column("cells\ntried", "a fault at one step of one call", lambda row: str(row.tried)),
        Column("cells\nsurvived", "an error in time, or right values", lambda row: str(row.survived)),
        Column("wrong\nnumbers", "cells in which a rank got wrong values", lambda row: str(row.wrong_numbers)),
        Column("hangs", "cells in which a rank was not back in time", lambda row: str(row.hangs)),
        Column("slowest error\n/ time-out", "the longest time to an error", lambda row: _times(row.worst)),
    ]
    return Table(columns, rows)


def _times(worst: float | None) -> str:
    return "-" if worst is None else f"{worst:.2f}"


def total(verdicts: Sequence[Verdict]) -> str:
    survived = sum(verdict.survived for verdict in verdicts)
    wrong, hangs = sum(v.wrong_numbers for v in verdicts), sum(v.hung for v in verdicts)
    return (
        f"{survived} of {len(verdicts)} cells survived, {wrong} wrong numbers, {hangs} hangs, "
        f"worst time to an error {_times(worst(verdicts))} time-outs"
    )
