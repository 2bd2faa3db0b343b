"""The speed of each op beside its baseline and its roof, over sizes.

    python -m fusedcomm.bench.ops [OP ...] [--huge-pages] [--json FILE] .. all five, or some; 2 CPU ranks of one thread
    torchrun --nproc-per-node 8 -m fusedcomm.bench.ops [OP ...]             GPUs, NCCL

What each op equals, and its shapes, stand in bench/op_programs.py. rows, K and N are those of the local
matmul; its time alone is the roof.

By default all sizes forward, then ragged sizes: what is left of the speed per flop of their aligned neighbour.
--backward  forward and backward; the roof is three matmuls
--decode    few rows: the baseline, every algorithm forced, and what the planner chooses
--ragged    the ragged sizes alone

What --huge-pages means stands in bench/common.py.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from fusedcomm.bench.common import (
    DTYPES,
    Goal,
    add_common_arguments,
    at_least,
    at_most,
    has_huge_pages,
    ms,
    pages,
    refuse_wrong_pages,
    tabulated,
)
from fusedcomm.bench.op_bench import AUTO, BASELINE, ROOF, OpBench, OpData
from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.bench.timing import Timing, ValuesDiffer, check_values, measure
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from fusedcomm.ops.whole_group import MatmulSize

ROWS = (512, 2048, 2500)
ALIGNED = MatmulSize(2048, 1024, 2048)  # whose neighbours are ragged
DECODE_ROWS = (1, 4, 16, 64)  # each rank's rows where the group divides them
DECODE_K_N = ((1024, 1024), (1024, 4096), (2048, 2048), (4096, 1024), (4096, 4096))
DECODE_CALLS = 20  # in a measurement: one takes less time than the start of a measurement differs by
ALGORITHMS = {"cpu": ("chunked", "unfused"), "cuda": ("fused", "chunked", "unfused")}
TIMEOUT_S = 600

NOT_SLOWER = 0.95  # at least, of baseline / auto for few rows: 1 but for the noise of a median


@dataclass(frozen=True)
class Goals:
    """Goals on a CPU; a figure whose goal is None is only reported."""

    mean: float | None  # mean of baseline / auto
    minimum: float | None = None
    over_roof: float | None = None  # median of auto / roof
    ragged: float | None = 0.8  # least speed per flop of a ragged size, relative to its aligned neighbour


GOALS = {
    "matmul_all_to_all": Goals(mean=1.3, minimum=0.95, over_roof=1.10),
    "all_to_all_matmul": Goals(mean=1.2),
    "all_gather_matmul": Goals(mean=1.2),
    "matmul_reduce_scatter": Goals(mean=1.1),
    "matmul_all_reduce": Goals(mean=1.1),
}


@dataclass(frozen=True)
class SizeRow:
    """One size. ``times`` has roof, baseline and auto; with --decode the forced algorithms in place of roof."""

    rows: int
    k: int
    n: int
    dtype: str
    algorithm: str
    times: dict[str, Timing]

    @property
    def speedup(self) -> float:
        return self.times[BASELINE].median / self.times[AUTO].median

    @property
    def over_roof(self) -> float:
        return self.times[AUTO].median / self.times[ROOF].median

    @property
    def ratios(self) -> dict[str, float]:
        return {"speedup": self.speedup} | ({"over_roof": self.over_roof} if ROOF in self.times else {})

    def report(self) -> dict[str, Any]:
        facts = asdict(self)
        return facts | facts.pop("times") | self.ratios


@dataclass(frozen=True)
class RaggedRow:
    """Speed per flop, relative to the aligned size measured beside it."""

    rows: int
    k: int
    n: int
    dtype: str
    auto: Timing
    auto_kept: float
    roof_kept: float

    def report(self) -> dict[str, Any]:
        return asdict(self)


LOCAL_MATMUL = "the local matmul is [rows, K] @ [K, N]"
SHAPE_COLUMNS = (
    Column("rows", LOCAL_MATMUL, lambda row: str(row.rows)),
    Column("K", LOCAL_MATMUL, lambda row: str(row.k)),
    Column("N", LOCAL_MATMUL, lambda row: str(row.n)),
    Column("dtype", "the dtype of all tensors", lambda row: row.dtype, left=True),
)
TIMES = {
    ROOF: ("matmul\nalone ms", "the roof: no exchange at all", 3),
    BASELINE: ("baseline\nms", "the matmul and the collective, with the layout copies that it needs", 1),
    AUTO: ("fusedcomm\nms", "fusedcomm.<op>, the algorithm that the planner chooses", 0),
}
RAGGED_COLUMNS = (
    *SHAPE_COLUMNS,
    Column("fusedcomm\nms", TIMES[AUTO][1], lambda row: ms(row.auto.median)),
    Column("fusedcomm\nkeeps", "speed per flop / that at the aligned size", lambda row: f"{row.auto_kept:.2f}"),
    Column("matmul\nkeeps", "the same ratio for the matmul alone", lambda row: f"{row.roof_kept:.2f}"),
)


def columns_of(names: Sequence[str]) -> list[Column]:
    """The columns of a table with the times ``names``."""
    columns = [
        *SHAPE_COLUMNS,
        Column("plan", "the algorithm of fusedcomm ms", lambda row: row.algorithm, drop=2, left=True),
    ]
    columns += map(_time_column, names)
    columns.append(Column("speed-up", "baseline / fusedcomm", lambda row: f"{row.speedup:.2f}"))
    if ROOF in names:
        columns.append(Column("time /\nmatmul", "fusedcomm / matmul alone", lambda row: f"{row.over_roof:.2f}"))
    return columns


def _time_column(name: str) -> Column:
    head, about, drop = TIMES.get(name, (f"{name}\nms", "the op with that algorithm forced", 4))
    return Column(head, about, lambda row: ms(row.times[name].median), drop=drop)


# In every rank


def measure_row(
    rank: int, bench: OpBench, size: MatmulSize, dtype: str, device_type: str, rounds: int, backward: bool = False
) -> SizeRow:
    device = world.rank_device(device_type)
    size = bench.divisible(size, dist.get_world_size())
    data = OpData(bench, size, DTYPES[dtype], device, "both" if backward else "forward")
    variants = data.variants()
    check_values(variants, data.check)
    data.randomize()
    times = measure(variants, device, rounds=rounds, warmup=2)
    return SizeRow(size.rows, size.k, size.n, dtype, data.plan().algorithm, times)


def measure_decode(rank: int, bench: OpBench, size: MatmulSize, dtype: str, device_type: str, rounds: int) -> SizeRow:
    device = world.rank_device(device_type)
    if bench.cut == "rows":
        size = replace(size, rows=size.rows * dist.get_world_size())
    size = bench.divisible(size, dist.get_world_size())
    data = OpData(bench, size, DTYPES[dtype], device)
    every = dict(data.variants())
    del every[ROOF]
    variants = {BASELINE: every[BASELINE], **{name: data.forced(name) for name in ALGORITHMS[device_type]}}
    variants[AUTO] = every[AUTO]
    check_values(variants, data.check)
    data.randomize()
    many = {name: _repeat(variant, DECODE_CALLS) for name, variant in variants.items()}
    times = {name: t / DECODE_CALLS for name, t in measure(many, device, rounds=rounds, warmup=2).items()}
    return SizeRow(size.rows, size.k, size.n, dtype, data.plan().algorithm, times)


def measure_ragged(
    rank: int, bench: OpBench, aligned: MatmulSize, dtype: str, device_type: str, rounds: int
) -> list[RaggedRow]:
    """Every round takes all sizes in turn, so that no ratio compares two moments of the machine."""
    device = world.rank_device(device_type)
    num_ranks = dist.get_world_size()
    aligned = bench.divisible(aligned, num_ranks)
    sizes = [aligned, *bench.ragged(aligned, num_ranks)]
    variants: dict[tuple[str, MatmulSize], Callable[[], Any]] = {}
    for size in sizes:
        data = OpData(bench, size, DTYPES[dtype], device)
        every = data.variants()
        check_values({name: every[name] for name in (ROOF, AUTO)}, data.check)
        data.randomize()
        variants |= {(name, size): every[name] for name in (ROOF, AUTO)}
    times = measure({str(key): variant for key, variant in variants.items()}, device, rounds=rounds, warmup=2)

    def kept(name: str, size: MatmulSize) -> float:
        speed, before = (s.flops / times[str((name, s))].median for s in (size, aligned))
        return speed / before

    return [RaggedRow(s.rows, s.k, s.n, dtype, times[str((AUTO, s))], kept(AUTO, s), kept(ROOF, s)) for s in sizes[1:]]


def _repeat(variant: Callable[[], Any], calls: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(calls):
            variant()

    return repeated


# In the process that prints


def summary(bench: OpBench, rows: Sequence[SizeRow], ragged: Sequence[RaggedRow], mode: str) -> list[Goal]:
    goals = GOALS[bench.op]
    mean, minimum, over_roof = goals.mean, goals.minimum, goals.over_roof
    if mode == "backward":
        mean = minimum = over_roof = None
    elif mode == "decode":
        mean, minimum = None, NOT_SLOWER
    found = []
    if rows:
        speedups = [row.speedup for row in rows]
        found += [
            at_least("baseline / fusedcomm, geometric mean", math.exp(statistics.fmean(map(math.log, speedups))), mean),
            at_least("baseline / fusedcomm, minimum", min(speedups), minimum),
        ]
        if mode != "decode":
            found.append(
                at_most("fusedcomm / matmul alone, median", statistics.median(row.over_roof for row in rows), over_roof)
            )
    if ragged:
        found.append(
            at_least("ragged / aligned speed of fusedcomm, minimum", min(r.auto_kept for r in ragged), goals.ragged)
        )
    return found


def sizes_of(bench: OpBench, mode: str, args: argparse.Namespace) -> list[MatmulSize]:
    if args.shape:
        shapes = [tuple(shape) for shape in args.shape]
    elif mode == "decode":
        shapes = [(rows, *k_n) for k_n in DECODE_K_N for rows in DECODE_ROWS]
        shapes = shapes[::5] if args.quick else shapes
    elif args.quick:
        shapes = bench.corners()
    else:
        shapes = list(itertools.product(ROWS, bench.k, bench.n))
    return [MatmulSize(rows, k, n, args.batch) for rows, k, n in shapes]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with _torchruns_group():
        return next((code for op in args.op if (code := run(PROGRAMS[op], args))), 0)


def _torchruns_group() -> AbstractContextManager[object]:
    """The group of torchrun's ranks, which come together once; without torchrun each op has ranks of its own."""
    return world.ranks(world.default_device_type(), 0, TIMEOUT_S) if world.under_torchrun() else nullcontext()


def run(bench: OpBench, args: argparse.Namespace) -> int:
    """Measure one op, in new ranks where torchrun has started none, so that it finds no memory of another op."""
    try:
        return _run(bench, args)
    except (ValuesDiffer, RankError) as error:
        print(f"{bench.op}: {error}", file=sys.stderr)
        return 1


def _run(bench: OpBench, args: argparse.Namespace) -> int:
    device_type = world.default_device_type()
    mode = args.mode or "forward"
    env = world.HUGE_PAGES if args.huge_pages else None
    rows: list[SizeRow] = []
    ragged: list[RaggedRow] = []
    with world.ranks(device_type, world.default_world_size(device_type), TIMEOUT_S, env) as call:
        huge_pages = call(has_huge_pages)
        print_here = world.is_rank_0()
        if print_here:
            print(bench.op, *([pages(huge_pages)] if device_type == "cpu" else []), sep="\n", flush=True)
        names = (BASELINE, *ALGORITHMS[device_type], AUTO) if mode == "decode" else (ROOF, BASELINE, AUTO)
        sizes = list(itertools.product(args.dtype, sizes_of(bench, mode, args) if mode != "ragged" else []))
        with tabulated(columns_of(names), rows, len(sizes)) as add:
            for dtype, size in sizes:
                if mode == "decode":
                    row = call(measure_decode, bench, size, dtype, device_type, args.rounds)
                else:
                    row = call(measure_row, bench, size, dtype, device_type, args.rounds, mode == "backward")
                if print_here:
                    add(row)
        aligned = sizes_of(bench, mode, args)[0] if args.shape else replace(ALIGNED, batch=args.batch)
        title = f"ragged sizes beside {aligned.rows} x {aligned.k} @ {aligned.k} x {aligned.n}"
        dtypes = args.dtype if mode in ("forward", "ragged") else []
        with tabulated(RAGGED_COLUMNS, ragged, len(dtypes), title) as add:
            for dtype in dtypes:
                found = call(measure_ragged, bench, aligned, dtype, device_type, args.rounds)
                for each in found if print_here else []:
                    add(each)
    if print_here:
        goals = summary(bench, rows, ragged, mode)
        print(*goals, sep="\n")
        if args.json:
            facts = {"op": bench.op, "mode": mode, "rounds": args.rounds, "huge_pages": huge_pages}
            lists: dict[str, Sequence[SizeRow | RaggedRow]] = {"rows": rows, "ragged": ragged}
            report = {name: [each.report() for each in every] for name, every in lists.items()}
            console.write_json(args.json, run_facts() | facts | report | {"goals": [asdict(goal) for goal in goals]})
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fusedcomm.bench.ops", description="Values are checked first.")
    parser.add_argument("op", nargs="*", type=_op, metavar="OP", help=f"{', '.join(PROGRAMS)}; default: all")
    mode = parser.add_mutually_exclusive_group()
    for name, text in (
        ("backward", "forward and backward"),
        ("decode", "few rows, every algorithm"),
        ("ragged", "the ragged sizes alone"),
    ):
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name, help=text)
    parser.add_argument("--quick", action="store_true", help="four shapes in place of all")
    parser.add_argument("--shape", nargs=3, type=int, metavar=("ROWS", "K", "N"), action="append", help="these instead")
    parser.add_argument("--batch", type=int, default=0, metavar="B", help="x is [B, rows / B, K]: layouts to copy")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    add_common_arguments(parser, rounds=9)
    args = parser.parse_args(argv)
    args.op = args.op or list(PROGRAMS)
    if args.json and len(args.op) > 1:
        parser.error(f"--json FILE holds the figures of one op: name it, got {', '.join(args.op)}")
    refuse_wrong_pages(parser, args)
    return args


def _op(name: str) -> str:
    """The type of the argument, in place of ``choices``, which would refuse that no op is named."""
    if name not in PROGRAMS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(PROGRAMS)}, got {name!r}")
    return name


if __name__ == "__main__":
    sys.exit(main())
