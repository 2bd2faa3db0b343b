"""matmul_all_to_all against matmul, then collective; and against the matmul alone.

    python -m bench.bench_matmul_all_to_all [--quick] [--huge-pages] [--json FILE]   2 CPU ranks of one thread
    torchrun --nproc-per-node 8 -m bench.bench_matmul_all_to_all                     GPUs, NCCL

y = x @ w with x [rows, K], w [K, N] on every rank; columns of y are scattered, rows gathered.

roof      the local matmul alone
baseline  matmul, pack, all_to_all_single
auto      fusedcomm.matmul_all_to_all, the planner's choice

On a CPU there are two settings, and a figure names its own. By default torch takes memory in 4 KiB pages, while our
op asks for huge pages for its result: that is what users get, but part of the speed-up is page faults saved, and
auto can be faster than roof. With --huge-pages torch asks for them too (THP_MEM_ALLOC_ENABLE=1), so roof, baseline
and auto get the same pages: what overlap alone gains.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from fusedcomm.cli import launch
from fusedcomm.cli.problem import OURS, ROOF, UNFUSED, Problem, RankData
from fusedcomm.cli.timing import Timing, check_values, measure

ROWS = (512, 2048, 2500)
K = (256, 512, 1024, 2048)
N = (2048, 4096)
DTYPES = (torch.float32, torch.bfloat16)
# The corners: least and most arithmetic per byte sent, and rows that no tile divides.
QUICK = ((512, 256, 2048), (512, 2048, 4096), (2500, 256, 4096), (2500, 2048, 2048))
TIMEOUT_S = 600

SPEEDUP_MEAN, SPEEDUP_MIN, ROOF_MEDIAN = 1.3, 0.95, 1.10  # the goals, on a CPU


@dataclass(frozen=True)
class Row:
    rows: int
    k: int
    n: int
    dtype: str
    algorithm: str
    roof: Timing
    baseline: Timing
    auto: Timing

    @property
    def speedup(self) -> float:
        return self.baseline.median / self.auto.median

    @property
    def over_roof(self) -> float:
        return self.auto.median / self.roof.median

    def __str__(self) -> str:
        ms = (f"{t.median * 1e3:9.2f}" for t in (self.roof, self.baseline, self.auto))
        shape = f"{self.rows:5d} {self.k:5d} {self.n:5d}  {self.dtype:9s}{self.algorithm:8s}"
        return f"{shape}{''.join(ms)}{self.speedup:10.2f}{self.over_roof:10.2f}"


@dataclass(frozen=True)
class Goal:
    name: str
    value: float
    bound: str
    met: bool

    def __str__(self) -> str:
        verdict = "met" if self.met else "not met"
        return f"{self.name:28s}{self.value:6.2f}   goal on CPU {self.bound}: {verdict}"


HEADING = (
    f"{'rows':>5s} {'K':>5s} {'N':>5s}  {'dtype':9s}{'plan':8s}"
    f"{'roof ms':>9s}{'base ms':>9s}{'auto ms':>9s}{'base/auto':>10s}{'auto/roof':>10s}"
)


def has_huge_pages(rank: int) -> bool:
    """As this rank's environment has it: torch's own allocations ask for huge pages."""
    return launch.torch_asks_for_huge_pages()


def pages(huge_pages: bool) -> str:
    setting = "huge for all" if huge_pages else "torch's default, huge for the result of auto"
    return f"pages: {setting} (transparent_hugepage: {launch.system_huge_pages()})"


def measure_row(rank: int, device_type: str, rows: int, k: int, n: int, dtype: torch.dtype, rounds: int) -> Row:
    device = launch.rank_device(device_type)
    data = RankData(Problem((rows, k), (k, n), (n,), 0, 1, dtype), device)
    variants = data.variants(ROOF, UNFUSED, OURS)
    check_values(variants, data.check)
    data.randomize()
    times = measure(variants, device, rounds=rounds, warmup=2)
    name = str(dtype).removeprefix("torch.")
    return Row(rows, k, n, name, data.plan().algorithm, times[ROOF], times[UNFUSED], times[OURS])


def summary(table: Sequence[Row]) -> list[Goal]:
    speedups = [row.speedup for row in table]
    mean = math.exp(statistics.fmean(map(math.log, speedups)))
    worst = min(speedups)
    roof = statistics.median(row.over_roof for row in table)
    return [
        Goal("base/auto, geometric mean", mean, f">= {SPEEDUP_MEAN}", mean >= SPEEDUP_MEAN),
        Goal("base/auto, minimum", worst, f">= {SPEEDUP_MIN}", worst >= SPEEDUP_MIN),
        Goal("auto/roof, median", roof, f"<= {ROOF_MEDIAN}", roof <= ROOF_MEDIAN),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device_type = launch.default_device_type()
    shapes: Iterable[tuple[int, int, int]] = QUICK if args.quick else itertools.product(ROWS, K, N)
    table: list[Row] = []
    env = launch.HUGE_PAGES if args.huge_pages else None
    with launch.ranks(device_type, launch.default_world_size(device_type), TIMEOUT_S, env) as call:
        huge_pages = call(has_huge_pages)
        heading = f"{pages(huge_pages)}\n{HEADING}" if device_type == "cpu" else HEADING
        for dtype, shape in itertools.product(DTYPES, list(shapes)):
            row = call(measure_row, device_type, *shape, dtype, args.rounds)
            if row is not None:
                print(row if table else f"{heading}\n{row}", flush=True)
                table.append(row)
    if not table:  # torchrun's other ranks
        return 0
    goals = summary(table)
    print("", *goals, sep="\n")
    if args.json:
        rows = [asdict(r) | {"speedup": r.speedup, "over_roof": r.over_roof} for r in table]
        report = {
            "rounds": args.rounds,
            "huge_pages": huge_pages,
            "rows": rows,
            "goals": [asdict(goal) for goal in goals],
        }
        with open(args.json, "w") as file:
            json.dump(launch.run_facts() | report, file, indent=2)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.bench_matmul_all_to_all",
        description="Values are checked before anything is timed.",
    )
    parser.add_argument("--quick", action="store_true", help="four shapes in place of twenty-four")
    parser.add_argument("--huge-pages", action="store_true", help="torch asks for them as our op does; on CPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    if args.huge_pages and launch.default_device_type() == "cuda":
        parser.error("--huge-pages is for CPU ranks, and this bench takes the GPUs")
    if args.huge_pages and launch.under_torchrun() and not launch.torch_asks_for_huge_pages():
        parser.error("--huge-pages under torchrun: start torchrun with THP_MEM_ALLOC_ENABLE=1")
    return args


if __name__ == "__main__":
    sys.exit(main())
