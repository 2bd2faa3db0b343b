"""``fusedcomm bench plain``: the collectives without a matmul beside the process group's own, over sizes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench import baselines, trace
from fusedcomm.bench.measure import DTYPES
from fusedcomm.bench.table import num_bytes
from fusedcomm.bench.timing import METHOD, Timing, ValuesDiffer, check_values, measure, repeated
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from fusedcomm.ops.exact_problem import difference

NAME = "bench plain"
BACKEND, OURS = "backend", "fusedcomm"
MOST_CALLS, MEASURED_BYTES = 64, 8 << 20  # back to back: ranks leave a barrier further apart than small calls take
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes of x
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # of x [R, n]: backend's, ours
    "all_to_all": (baselines.all_to_all, lambda x: fusedcomm.all_to_all(x, 1, 0)),
    "all_gather": (baselines.all_gather, lambda x: fusedcomm.all_gather(x, 0)),
    "reduce_scatter": (baselines.reduce_scatter, lambda x: fusedcomm.reduce_scatter(x, 0)),
    "all_reduce": (lambda x: baselines.all_reduce(x.clone()), fusedcomm.all_reduce),  # into a new tensor, as in graphs
}


@dataclass(frozen=True)
class PlainRow:
    """A collective of one size. Times are the slowest rank's, in seconds; ``num_bytes``: of x."""

    op: str
    dtype: str
    num_bytes: int
    group_size: int
    plan: str
    backend: Timing
    ours: Timing

    @property
    def ratio(self) -> float:
        return self.ours.median / self.backend.median


def measure_plain(rank: int, op: str, size: int, dtype: str, device_type: str, rounds: int) -> PlainRow:
    group_size, device = dist.get_world_size(), world.rank_device(device_type)
    shape = group_size, max(1, size // group_size // DTYPES[dtype].itemsize)
    xs = [_integers(shape, each).to(device, DTYPES[dtype]) for each in range(group_size)]
    x = xs[rank].clone()
    backend, ours = CALLS[op]
    calls = {BACKEND: lambda: backend(x), OURS: lambda: ours(x)}
    total = torch.stack(xs).sum(0)
    must = {
        "all_to_all": torch.stack([each[rank] for each in xs]),
        "all_gather": torch.stack(xs),
        "reduce_scatter": total[rank],
        "all_reduce": total,
    }[op]

    def check(name: str, result: Tensor) -> str | None:
        return difference(result.view(must.shape), must)

    check_values(calls, check)
    x.normal_()
    repeat = max(1, min(MOST_CALLS, MEASURED_BYTES // size))
    timed = {name: partial(repeated, call, repeat) for name, call in calls.items()}
    times = {name: _of_one(t, repeat) for name, t in measure(timed, device, rounds=rounds, warmup=2).items()}
    dims = {"all_to_all": (1, 0), "all_reduce": ()}.get(op, (0,))
    plan = fusedcomm.explain(op, x, *dims)
    return PlainRow(op, dtype, size, group_size, str(plan), times[BACKEND], times[OURS])


def _of_one(timing: Timing, repeat: int) -> Timing:
    quantiles = {name: getattr(timing, name) / repeat for name in ("median", "p10", "p90", "p99")}
    return replace(timing, **quantiles)


def _integers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", nargs="+", choices=tuple(CALLS), default=list(CALLS), help="default: all four")
    parser.add_argument("--bytes", nargs="+", type=int, default=SIZES, help="bytes of x (default: 64 KiB to 16 MiB)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"], help="default: float32")
    parser.add_argument("--rounds", "-n", type=console.positive, default=15, help="measurements of each (default: 15)")
    console.add_rank_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="also write every figure, and what it depends on, as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, 1 for wrong values or a failure in a rank, 2 for wrong arguments."""
    device_type = args.device or world.default_device_type()
    world_size = world.world_size_of(args.world_size, device_type)
    if problem := world.cannot_start(device_type, world_size, args.oversubscribe):
        return console.fail(NAME, problem, code=2)
    rows: list[PlainRow] = []
    try:
        with world.ranks(device_type, world_size, 300, trace.QUIET) as call:
            for op, dtype, size in itertools.product(args.op, args.dtype, args.bytes):
                if (row := call(measure_plain, op, size, dtype, device_type, args.rounds)) is not None:
                    rows.append(row)
    except (ValuesDiffer, RankError) as error:
        return console.fail(NAME, world.message(error))
    if rows:  # not in torchrun's other ranks
        console.show(Table(_COLUMNS, rows, f"{rows[0].group_size} ranks", "--json has them"))
        if args.json:
            figures = [asdict(row) | {"ratio": row.ratio} for row in rows]
            console.write_json(args.json, run_facts() | {"timing": METHOD, "rounds": args.rounds, "rows": figures})
    return 0


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


_COLUMNS = (
    Column("op", "the collective", lambda r: r.op, left=True),
    Column("dtype", "of x", lambda r: r.dtype, left=True),
    Column("bytes", "of a rank's x", lambda r: num_bytes(r.num_bytes)),
    Column("backend\nus", "the process group's own: NCCL or gloo", lambda r: _us(r.backend.median)),
    Column("fusedcomm\nus", "the op", lambda r: _us(r.ours.median)),
    Column("ratio", "fusedcomm us / backend us", lambda r: f"{r.ratio:.2f}"),
    Column("plan", "how it runs, and why", lambda r: r.plan.partition(": ")[2], left=True, drop=1),
)
