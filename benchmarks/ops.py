"""The speed of each op beside its baseline and its roof, over sizes.

    python -m benchmarks.ops [OP ...] [--huge-pages] [--json FILE] ...      all five, or some; 2 CPU ranks of one thread
    torchrun --nproc-per-node 8 -m benchmarks.ops [OP ...]                  GPUs, NCCL

What each op equals, and its shapes, stand in fusedcomm/bench/op_programs.py. rows, K and N are those of the local
matmul; its time alone is the roof.

roof      the local matmul alone
baseline  the matmul and the collective, with the layout copies that it needs
auto      fusedcomm.<op>, the planner's choice

By default all sizes forward, then ragged sizes: what is left of the speed per flop of their aligned neighbour.
--backward  forward and backward; the roof is three matmuls
--decode    few rows: the baseline, every algorithm forced, and what the planner chooses
--ragged    the ragged sizes alone

What --huge-pages means stands in benchmarks/common.py.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from benchmarks.common import (
    DTYPES,
    Goal,
    add_common_arguments,
    at_least,
    at_most,
    has_huge_pages,
    pages,
    refuse_wrong_pages,
)
from fusedcomm.bench.op_bench import AUTO, BASELINE, ROOF, MatmulSize, OpBench, OpData
from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.bench.timing import Timing, ValuesDiffer, check_values, measure
from fusedcomm.launch import console, world
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError

ROWS = (512, 2048, 2500)
ALIGNED = MatmulSize(2048, 1024, 2048)  # whose neighbours are ragged
DECODE_ROWS = (1, 4, 16, 64)  # of each rank where the group divides rows
DECODE_K_N = ((1024, 1024), (1024, 4096), (2048, 2048), (4096, 1024), (4096, 4096))
DECODE_CALLS = 20  # per measurement: one takes less time than the start of a measurement differs by
ALGORITHMS = {"cpu": ("chunked", "unfused"), "cuda": ("fused", "chunked", "unfused")}
TIMEOUT_S = 600

NOT_SLOWER = 0.95  # at least, of baseline / auto for few rows: 1 but for the noise of a median


@dataclass(frozen=True)
class Goals:
    """On a CPU; None: reported, no goal."""

    mean: float | None  # of baseline / auto
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
    """One size. ``times``: of roof, baseline and auto; with --decode of the forced algorithms in place of roof."""

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

    @property
    def heading(self) -> str:
        # roof, baseline, auto as in earlier results
        names = "".join(f"{'base' if name == BASELINE else name} ms".rjust(12) for name in self.times)
        ratios = f"{'base/auto':>12s}" + (f"{'auto/roof':>12s}" if ROOF in self.times else "")
        return f"{_shape_heading()}{'plan':8s}{names}{ratios}"

    def __str__(self) -> str:
        ms = "".join(f"{t.median * 1e3:12.3f}" for t in self.times.values())
        ratios = "".join(f"{ratio:12.2f}" for ratio in self.ratios.values())
        return f"{_shape(self)}{self.algorithm:8s}{ms}{ratios}"

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

    def __str__(self) -> str:
        return f"{_shape(self)}{self.auto.median * 1e3:20.3f}{self.auto_kept:12.2f}{self.roof_kept:12.2f}"

    def report(self) -> dict[str, Any]:
        return asdict(self)


RAGGED_HEADING = (
    f"{'rows':>5s} {'K':>5s} {'N':>5s}  {'dtype':9s}{'auto ms':>20s}{'auto keeps':>12s}{'roof keeps':>12s}"
    "  of the speed per flop at "
)


def _shape_heading() -> str:
    return f"{'rows':>5s} {'K':>5s} {'N':>5s}  {'dtype':9s}"


def _shape(row: SizeRow | RaggedRow) -> str:
    return f"{row.rows:5d} {row.k:5d} {row.n:5d}  {row.dtype:9s}"


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
    """All sizes in turn in every round, so that a ratio is not of two moments of the machine."""
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
            at_least("base/auto, geometric mean", math.exp(statistics.fmean(map(math.log, speedups))), mean),
            at_least("base/auto, minimum", min(speedups), minimum),
        ]
        if mode != "decode":
            found.append(at_most("auto/roof, median", statistics.median(row.over_roof for row in rows), over_roof))
    if ragged:
        found.append(at_least("ragged/aligned speed of auto, minimum", min(r.auto_kept for r in ragged), goals.ragged))
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
    for op in args.op:
        if code := run(PROGRAMS[op], args):
            return code
    return 0


def run(bench: OpBench, args: argparse.Namespace) -> int:
    """One op, in ranks of its own: no op finds the memory that another has left."""
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
        for dtype, size in itertools.product(args.dtype, sizes_of(bench, mode, args) if mode != "ragged" else []):
            if mode == "decode":
                row = call(measure_decode, bench, size, dtype, device_type, args.rounds)
            else:
                row = call(measure_row, bench, size, dtype, device_type, args.rounds, mode == "backward")
            if print_here:
                print(row if rows else f"{row.heading}\n{row}", flush=True)
                rows.append(row)
        aligned = sizes_of(bench, mode, args)[0] if args.shape else replace(ALIGNED, batch=args.batch)
        for dtype in args.dtype if mode in ("forward", "ragged") else []:
            found = call(measure_ragged, bench, aligned, dtype, device_type, args.rounds)
            if print_here:
                if not ragged:
                    print(f"\n{RAGGED_HEADING}{aligned.rows} {aligned.k} {aligned.n}")
                print(*found, sep="\n", flush=True)
                ragged += found
    if print_here:
        goals = summary(bench, rows, ragged, mode)
        print("", *goals, sep="\n")
        if args.json:
            facts = {"op": bench.op, "mode": mode, "rounds": args.rounds, "huge_pages": huge_pages}
            lists: dict[str, Sequence[SizeRow | RaggedRow]] = {"rows": rows, "ragged": ragged}
            report = {name: [each.report() for each in every] for name, every in lists.items()}
            console.write_json(args.json, run_facts() | facts | report | {"goals": [asdict(goal) for goal in goals]})
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.ops", description="Values are checked before anything is timed.")
    parser.add_argument("op", nargs="*", choices=PROGRAMS, metavar="OP", help=f"{', '.join(PROGRAMS)}; default: all")
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
