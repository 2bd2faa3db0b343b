"""``fusedcomm bench plain``: the collectives without a matmul beside the process group's own, over sizes."""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench import baselines, common
from fusedcomm.bench.common import us
from fusedcomm.bench.measure import DTYPES
from fusedcomm.bench.table import num_bytes
from fusedcomm.bench.timing import Timing, check_values
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.ops.exact_problem import difference

BACKEND, OURS = "backend", "fusedcomm"
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
    seeded = (torch.Generator().manual_seed(each) for each in range(group_size))
    xs = [torch.randint(-3, 4, shape, generator=each).to(device, DTYPES[dtype]) for each in seeded]
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
    times = {name: Timing.of(each) for name, each in common.rounds_of_one(calls, x.nbytes, device, rounds).items()}
    dims = {"all_to_all": (1, 0), "all_reduce": ()}.get(op, (0,))
    plan = fusedcomm.explain(op, x, *dims)
    return PlainRow(op, dtype, x.nbytes, group_size, str(plan), times[BACKEND], times[OURS])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", nargs="+", choices=tuple(CALLS), default=list(CALLS), help="default: all four")
    sizes = "of x: 64K, 1M (default: 64K to 16M)"
    parser.add_argument("--bytes", nargs="+", type=console.size_in_bytes, default=SIZES, help=sizes)
    common.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    sizes = [*itertools.product(args.op, args.bytes, common.dtypes_of(args))]
    return common.run_cases("bench plain", args, measure_plain, sizes, _COLUMNS)


_COLUMNS = (
    Column("op", "the collective", lambda r: r.op, left=True),
    Column("dtype", "of x", lambda r: r.dtype, left=True),
    Column("bytes", "of a rank's x", lambda r: num_bytes(r.num_bytes)),
    Column("backend\nus", "the process group's own: NCCL or gloo", lambda r: us(r.backend.median)),
    Column("fusedcomm\nus", "the op", lambda r: us(r.ours.median)),
    Column("ratio", "fusedcomm us / backend us", lambda r: f"{r.ratio:.2f}"),
    Column("plan", "how it runs, and why", lambda r: r.plan.partition(": ")[2], left=True, drop=1),
)
