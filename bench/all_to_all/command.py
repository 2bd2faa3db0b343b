"""The arguments of ``fusedcomm bench all-to-all``, its table and its JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fusedcomm.bench.all_to_all.cases import CASES, VARIANTS
from fusedcomm.bench.all_to_all.data import SuiteSize, moduli
from fusedcomm.bench.all_to_all.suite import (
    HINDERED,
    MORE_THAN_ALL,
    NOT_MEASURABLE,
    WARMUP,
    SuiteReport,
    SuiteRow,
    measure_suite,
)
from fusedcomm.bench.timing import ValuesDiffer
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError

NAME = "bench all-to-all"
START_S = 600  # to start the ranks, and to spare on a busy machine
SLOW = {"cpu": 5e9, "cuda": 5e12}  # flops per second that every machine has
DIM = {"cpu": 256, "cuda": 2048}
TOTAL = "a call until its result is checked, by the host's clock"
QUANTILES = "quantiles of total over rounds"
LIMITED = {NOT_MEASURABLE: "-", HINDERED: "< 0", MORE_THAN_ALL: "> 100"}  # in place of a share
COLUMNS = (
    Column("case", "fusedcomm bench all-to-all --help lists them", lambda row: _name(row), left=True),
    Column("total\nms", TOTAL, lambda row: _ms(row.total.median)),
    Column("P10\nms", QUANTILES, lambda row: _ms(row.total.p10), drop=5),
    Column("P90\nms", QUANTILES, lambda row: _ms(row.total.p90), drop=4),
    Column("P99\nms", QUANTILES, lambda row: _ms(row.total.p99), drop=6),
    Column("compute\nms", "matmuls and checks alone", lambda row: _ms(row.compute.median), drop=2),
    Column("exchange\nms", "the communication alone", lambda row: _ms(row.communication.median), drop=2),
    Column("overlapped\nms", "compute + exchange - total, within each round", lambda row: _ms(row.overlapped), drop=3),
    Column("share\n%", "overlapped / the shorter of compute and exchange; 100: all of it", lambda row: _share(row)),
    Column(
        "host\nwaits ms",
        "the host is blocked in the waits of the case",
        lambda row: "in op" if row.blocked is None else _ms(row.blocked),
    ),
    Column("CPU\nms", "CPU time of the process, the backend's threads included", lambda row: _ms(row.cpu), drop=1),
)
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--case",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="NAME",
        help=f"{', '.join(CASES)} (default: all)",
    )
    parser.add_argument(
        "--dim", type=console.positive, metavar="N", help="N x 16 N elements are exchanged (default: 2048; 256 on CPU)"
    )
    parser.add_argument(
        "--compute", type=console.positive, default=1, metavar="N", help="unrelated matmuls (default: 1)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="the dtype of the data (default: bfloat16 on GPUs, float32 on CPU)",
    )
    parser.add_argument("--rounds", type=console.positive, default=15, metavar="N", help="measurements (default: 15)")
    console.add_rank_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="also write everything that was found to FILE, as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, 1 for wrong values or a failure in a rank, 2 for wrong arguments."""
    device_type = args.device or world.default_device_type()
    world_size = world.world_size_of(args.world_size, device_type)
    dim = args.dim or _rounded_up(DIM[device_type], world_size)
    size = SuiteSize(dim, args.compute, args.dtype or DTYPE[device_type])
    if problem := _wrong_arguments(args, device_type, world_size, size):
        return console.fail(NAME, problem, code=2)
    try:
        with world.ranks(device_type, world_size, _limit_s(size, device_type, world_size, args.rounds)) as call:
            result = call(measure_suite, args.case, size, device_type, args.rounds)
    except (ValuesDiffer, RankError) as error:
        return console.fail(NAME, world.message(error))
    if result is not None:
        _print(result, size, device_type, args.rounds)
        if args.json:
            console.write_json(args.json, report(result, size, device_type, args.rounds))
    return 0


def _rounded_up(dim: int, world_size: int) -> int:
    return -(-dim // max(world_size, 1)) * world_size


def _limit_s(size: SuiteSize, device_type: str, world_size: int, rounds: int) -> float:
    """Seconds after which ranks that have not answered are ended: more than all calls take where nothing hangs."""
    num_calls = 2 * len(VARIANTS) * (rounds + WARMUP + 2 * len(moduli(world_size * size.numel)))
    return START_S + num_calls * (1 + 2 * size.compute) * size.flops / SLOW[device_type]


def _wrong_arguments(args: argparse.Namespace, device_type: str, world_size: int, size: SuiteSize) -> str | None:
    """What is wrong with the arguments, or None; else it would come up in the ranks, or after all is measured."""
    if problem := world.cannot_start(device_type, world_size, args.oversubscribe):
        return problem
    if args.world_size not in (None, world_size):
        return f"--world-size must be that of torchrun, {world_size}, got {args.world_size}"
    if world_size < 2:
        return f"--world-size must be at least 2, got {world_size}"
    if size.columns % world_size:
        return f"16 times --dim must be divisible by the number of ranks, {world_size}, got --dim {size.dim}"
    if world.is_rank_0() and (problem := console.not_writable(args.json)):
        return f"--json {problem}"
    return None


def report(result: SuiteReport, size: SuiteSize, device_type: str, rounds: int) -> dict[str, Any]:
    """The JSON: all that the table shows, and what the figures depend on. Times in seconds."""
    return run_facts() | {
        "device": device_type,
        "world_size": result.world_size,
        **asdict(size),
        "rounds": rounds,
        "plan": result.plan,
        "checked_modulo": result.moduli,
        "rows": [
            asdict(row) | {"overlapped_share": row.overlapped_share, "share_limit": row.share_limit}
            for row in result.rows
        ],
    }


def _print(result: SuiteReport, size: SuiteSize, device_type: str, rounds: int) -> None:
    out = console.stdout()
    where = "CPU ranks of one thread" if device_type == "cpu" else "GPUs"
    matmul = f"{size.dim} x {2 * size.dim} @ {2 * size.dim} x {size.columns}"
    problem = f"{matmul} and its all_to_all; unrelated matmuls of that size: {size.compute}; {size.dtype}"
    out.print(f"{result.world_size} {where}, each: {problem}")
    out.print(f"every element was in its place in every call; slowest rank, median of {rounds} rounds")
    console.show(table(result.rows), out)
    for limit, shown in LIMITED.items():
        if cases := [_name(row) + _remark(row) for row in result.rows if row.share_limit == limit]:
            out.print(f"share {shown}: {limit}: {'; '.join(cases)}")
    out.print(f"plan of fused: {result.plan}", markup=False)


def table(rows: Sequence[SuiteRow]) -> Table:
    return Table(COLUMNS, rows, is_bold=lambda row: row.case == "fused")


def _name(row: SuiteRow) -> str:
    return f"{row.case}, {row.variant}" if row.variant else row.case


def _share(row: SuiteRow) -> str:
    return LIMITED[row.share_limit] if row.share_limit else f"{100 * (row.overlapped_share or 0.0):.0f}"


def _remark(row: SuiteRow) -> str:
    if row.share_limit == NOT_MEASURABLE:
        return f" ({_ms(row.shorter)} ms, noise {_ms(row.noise)} ms)"
    saves_copies = row.share_limit == MORE_THAN_ALL and row.case == "fused"
    return " (it also saves the copies that pack y)" if saves_copies else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if abs(seconds) >= 0.1 else 2}f}"
