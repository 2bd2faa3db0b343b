"""The arguments of ``fusedcomm bench overhead``, its tables and its JSON."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fusedcomm.bench import trace
from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.bench.overhead import call_clock
from fusedcomm.bench.overhead.op_overhead import OpOverhead, OverheadRow, Parts, measure_overhead
from fusedcomm.bench.overhead.timed_calls import ALGORITHMS, PROGRAMS_OF_OP
from fusedcomm.bench.timing import ValuesDiffer
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Legend, Table
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError

NAME = "bench overhead"
DIRECTIONS = ("forward", "backward", "both")
WARMUP = 1
START_S, ROUND_S = 120, 60  # at most
METHOD = {
    "order": "interleaved by round",
    "start": "barrier of symmetric memory",
    "hot_calls": call_clock.HOT_CALLS,
    "cold_calls": call_clock.COLD_CALLS,
    "filled_bytes": call_clock.FILLED_BYTES,
    "last_calls": call_clock.LAST_CALLS,
    "late": call_clock.LATE,
}
TIME = "one call: back to back (hot), with cold caches (cold); slowest rank"
RATIO = "the same over the baseline's: matmul and collective as users write them"
CPU = "CPU time of a call that finds the other ranks' data there, backend's threads included"
ABOVE = "CPU us - that of the matmuls of the call alone, on the row of mm"


def _ratio(shown: tuple[OpOverhead, OverheadRow], cold: bool = False) -> str:
    found, row = shown
    return f"{found.over_baseline(row, cold):.2f}" if row.name in PROGRAMS_OF_OP else ""


def _above(shown: tuple[OpOverhead, OverheadRow], cold: bool = False) -> str:
    found, row = shown
    seconds = found.above_matmuls(row, cold)
    return "" if seconds is None else _us(seconds)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.{0 if abs(seconds) >= 1e-4 else 1}f}"


CALL_COLUMNS = (
    Column("call", "docs/benchmark.md explains each", lambda shown: shown[1].name, left=True),
    Column("hot us", TIME, lambda shown: _us(shown[1].times.hot.median)),
    Column("cold us", TIME, lambda shown: _us(shown[1].times.cold.median)),
    Column("hot /\nbaseline", RATIO, _ratio),
    Column("cold /\nbaseline", RATIO, lambda shown: _ratio(shown, cold=True), drop=2),
    Column("CPU\nhot us", CPU, lambda shown: _us(shown[1].times.cpu.median)),
    Column("CPU\ncold us", CPU, lambda shown: _us(shown[1].times.cold_cpu.median), drop=1),
    Column("hot above\nmm us", ABOVE, _above),
    Column("cold above\nmm us", ABOVE, lambda shown: _above(shown, cold=True), drop=1),
)
PART_COLUMNS = (
    Column("op", "its hot time, by part", lambda part: part[0].op, left=True),
    Column("pass", "forward, backward, or both", lambda part: part[0].direction, left=True),
    Column("algorithm", "forced", lambda part: part[1].algorithm, left=True),
    Column("whole us", "hot us, as above: the sum of what follows", lambda part: _us(part[1].hot)),
    Column("matmuls\nus", "the same matmuls alone", lambda part: _us(part[1].matmuls)),
    Column("entry\nus", "the empty op: Python, dispatch, autograd, the result", lambda part: _us(part[1].entry)),
    Column(
        "rest\nus",
        "a call that waits for nobody, less these: checks, plan, records, signals, copies, not separated",
        lambda part: _us(part[1].rest),
    ),
    Column("waits\nus", "whole - a call that waits for nobody", lambda part: _us(part[1].waits)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--op", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="what is called (default: all)"
    )
    direction = "what is measured (default: forward)"
    parser.add_argument("--pass", dest="direction", nargs="+", choices=DIRECTIONS, default=["forward"], help=direction)
    parser.add_argument("--rounds", type=console.positive, default=15, metavar="N", help="measurements (default: 15)")
    world_size = "CPU ranks to start (default: 2; under torchrun its own)"
    parser.add_argument("--world-size", type=console.positive, metavar="N", help=world_size)
    console.add_oversubscribe(parser)
    parser.add_argument("--json", metavar="FILE", help="also write every figure, and what it depends on, as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, 1 for wrong values or a failure in a rank, 2 for wrong arguments."""
    world_size = world.world_size_of(args.world_size, "cpu")
    if problem := _wrong_arguments(args, world_size):
        return console.fail(NAME, problem, code=2)
    found: list[OpOverhead] = []
    try:
        limit_s = START_S + ROUND_S * (args.rounds + WARMUP)
        with world.ranks("cpu", world_size, limit_s, trace.QUIET) as call:
            for op, direction in itertools.product(args.op, args.direction):
                measured = call(measure_overhead, op, direction, args.rounds, WARMUP)
                if measured is not None:
                    found.append(measured)
                    console.show(table(measured))
    except (ValuesDiffer, RankError) as error:
        return console.fail(NAME, world.message(error))
    if found:  # not in torchrun's other ranks
        _print_end(found, args.rounds)
        if args.json:
            console.write_json(args.json, report(found, args.rounds))
    return 0


def _wrong_arguments(args: argparse.Namespace, world_size: int) -> str | None:
    """What is wrong with the arguments, or None; else it would come up in the ranks, or after all is measured."""
    if problem := world.cannot_start("cpu", world_size, args.oversubscribe):
        return problem
    if world_size < 2:
        return f"--world-size must be at least 2, got {world_size}"
    if world.is_rank_0() and (problem := console.not_writable(args.json)):
        return f"--json {problem}"
    return None


def report(found: Sequence[OpOverhead], rounds: int) -> dict[str, Any]:
    """The JSON: every figure and what it depends on. Times in seconds."""
    ops = [
        asdict(each)
        | {
            "calls": [
                {
                    "name": row.name,
                    **asdict(row.times),
                    "matmuls": row.matmuls,
                    "over_baseline": each.over_baseline(row),
                    "cold_over_baseline": each.over_baseline(row, cold=True),
                    "cpu_above_matmuls": each.above_matmuls(row),
                    "cold_cpu_above_matmuls": each.above_matmuls(row, cold=True),
                }
                for row in each.calls
            ],
            "parts": [asdict(part) for part in each.parts()],
        }
        for each in found
    ]
    return run_facts() | {"what": "overhead", "rounds": rounds, "timing": METHOD, "ops": ops}


def table(found: OpOverhead) -> Table:
    """A `Legend` explains all tables of a run at once."""
    title = f"{found.op}, {found.direction}: {found.rows} x {found.k} @ {found.k} x {found.n}"
    rows = [(found, row) for row in found.calls]
    return Table(CALL_COLUMNS, rows, title, is_bold=lambda shown: shown[1].name in ALGORITHMS, has_legend=False)


def parts_table(found: Sequence[OpOverhead]) -> Table:
    rows: list[tuple[OpOverhead, Parts]] = [(each, part) for each in found for part in each.parts()]
    return Table(PART_COLUMNS, rows, "by part", has_legend=False)


def _print_end(found: Sequence[OpOverhead], rounds: int) -> None:
    out = console.stdout()
    parts = parts_table(found)
    console.show(parts, out)
    console.show(Legend([table(found[0]), parts]), out)
    where = f"{found[0].group_size} CPU ranks of one thread; only ratios within one run mean anything"
    out.print(f"{where}. Values checked before timing; medians of {rounds} rounds")
    for each in found:
        for plan in each.plans.values():
            out.print(f"plan: {plan}", markup=False)
