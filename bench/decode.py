"""``fusedcomm bench decode``: the end of a tensor parallel layer, from one row on, beside the program of today.

tail         of a product that is there: `all_reduce_norm` beside the group's own all_reduce, an addition and RMSNorm
with matmul  `matmul_all_reduce_norm` beside the matmul and that program

The goal of both on CPUs is half of today's tail, for the second above the matmul alone. On GPUs each call is a captured
CUDA graph; that has never run.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import fusedcomm
from fusedcomm.bench import common
from fusedcomm.bench.common import Ratio, us
from fusedcomm.bench.measure import DTYPES, captured
from fusedcomm.bench.timing import Timing, check_values
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.ops.exact_problem import difference

GOAL = 0.5
SIZES = {"rows": (1, 4, 16, 64, 256, 1024), "hidden": (2048, 4096, 8192), "K": (1024,)}
ROOF, TODAY, TODAY_TAIL, OURS, TAIL = "matmul", "unfused", "unfused tail", "fused", "tail"
ABOUT = {  # medians of the ratios within a round
    "tail_ratio": "all_reduce_norm / today's tail",
    "exposed_ratio": "(matmul_all_reduce_norm - matmul) / today's tail",
    "ratio": "matmul_all_reduce_norm / today's",
}


@dataclass(frozen=True)
class DecodeRow:
    """A size. Times are the slowest rank's, in seconds. Ratios: `ABOUT`."""

    rows: int
    hidden: int
    k: int
    dtype: str
    plan: str
    times: dict[str, Timing]
    tail_ratio: Ratio
    exposed_ratio: Ratio
    ratio: Ratio


def measure_decode(rank: int, rows: int, hidden: int, k: int, dtype: str, device_type: str, rounds: int) -> DecodeRow:
    device, kind, made = world.rank_device(device_type), DTYPES[dtype], torch.Generator().manual_seed(0)
    xs = torch.randint(-1, 2, (dist.get_world_size(), rows, k), generator=made)
    w_few = torch.randint(-1, 2, (k, hidden), generator=made) * (torch.rand(k, hidden, generator=made) < 16 / k)
    must = (xs.sum(0).float() @ w_few.float()).to(device, kind)  # small integers; the residual is one of them
    x, w, residual, weight = (
        t.to(device, kind) for t in (xs[rank], w_few, xs[0, :, :1] * w_few[0], torch.ones(hidden))
    )
    must += residual
    y = x @ w

    def today(y: Tensor) -> tuple[Tensor, Tensor]:
        dist.all_reduce(y)
        y += residual
        return F.rms_norm(y, (hidden,), weight, 1e-6), y

    calls: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        TODAY_TAIL: lambda: today(y.clone()),
        TAIL: lambda: fusedcomm.all_reduce_norm(y, residual, weight),
        TODAY: lambda: today(x @ w),
        OURS: lambda: fusedcomm.matmul_all_reduce_norm(x, w, residual, weight),
    }

    def check(name: str, results: tuple[Tensor, Tensor]) -> str | None:
        error = (results[0].float() - F.rms_norm(must.float(), (hidden,), None, 1e-6)).abs().max()
        return difference(results[1], must) or (None if error < 0.1 else f"normed is wrong by {error:.2g}")

    roof: dict[str, Callable[[], Any]] = {ROOF: lambda: torch.mm(x, w)}
    if device_type == "cuda":
        roof, calls = ({name: captured(call) for name, call in each.items()} for each in (roof, calls))
    check_values(calls, check)
    with fusedcomm.before_capture():  # calls on GPUs are planned as captured; on CPUs it changes nothing
        plan = str(fusedcomm.explain("matmul_all_reduce_norm", x, w, residual, weight))
    seconds = common.rounds_of_one(roof | calls, rows * hidden * kind.itemsize, device, rounds)
    pairs = (seconds[TAIL], TODAY_TAIL), (seconds[OURS] - seconds[ROOF], TODAY_TAIL), (seconds[OURS], TODAY)
    ratios = (Ratio.of_rounds(ours, seconds[other]) for ours, other in pairs)
    return DecodeRow(rows, hidden, k, dtype, plan, {name: Timing.of(each) for name, each in seconds.items()}, *ratios)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default in SIZES.items():
        said = f"default: {' '.join(map(str, default))}"
        parser.add_argument(f"--{name}", nargs="+", type=console.positive, default=default, help=said)
    common.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    order = itertools.product(common.dtypes_of(args), args.hidden, args.K, args.rows)
    sizes = [(rows, hidden, k, dtype) for dtype, hidden, k, rows in order]
    facts = {"ratios": ABOUT, "goal": GOAL}
    return common.run_cases("bench decode", args, measure_decode, sizes, _COLUMNS, lambda rows: facts)


def _time(head: str, about: str, name: str) -> Column:
    return Column(f"{head}\nus", about, lambda row: us(row.times[name].median))


def _ratio(head: str, name: str) -> Column:
    return Column(head, ABOUT[name], lambda row: f"{getattr(row, name).median:.2f}")


_COLUMNS = (
    Column("rows", "of x", lambda r: str(r.rows)),
    Column("hidden", "columns of the result", lambda r: str(r.hidden)),
    Column("K", "columns of a rank's x", lambda r: str(r.k), drop=2),
    Column("dtype", "of all tensors", lambda r: r.dtype, left=True, drop=2),
    _time("today's\ntail", "all_reduce of a copy, residual, RMSNorm", TODAY_TAIL),
    _time("all_reduce\n_norm", "the op", TAIL),
    _ratio("tail\nratio", "tail_ratio"),
    _time("matmul", "alone", ROOF),
    _time("today's", "matmul and today's tail", TODAY),
    _time("matmul_all\n_reduce_norm", "the op", OURS),
    _ratio("ratio", "ratio"),
    _ratio("exposed\nratio", "exposed_ratio"),
    Column("plan", "how it runs, and why", lambda r: r.plan.partition(": ")[2], left=True, drop=1),
)
