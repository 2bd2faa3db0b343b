"""What fusedcomm's plans of redistribution take, next to torch's, for all pairs of placements.

    python -m fusedcomm.bench.redistribution [--quick] [--json FILE]

Each mesh dim is replicated, sharded on either dim of a matrix, or partial (only before, or before and after). Pairs
that are equal, or need nothing sent, are left out. Nothing is run: torch's plans are read from its private planner, its
bytes worked out from the padded shapes that it gives to collectives, and times are those of fusedcomm's model, of GPUs
in nodes of 4: a mesh of 8 ranks lies in two. Only the time of planning is measured: processor time.

torch            "flattened": every flattened mesh exists, so torch merges what it can; else none does, as is usual
fewer            the share of pairs for which fusedcomm plans fewer collectives than torch
collectives      mean per pair, torch's and fusedcomm's
bytes, time      fusedcomm's / torch's, per pair: mean, and the largest, which must not be above 1
cold             planning without any cache; cached: the planner's answer when it is known, wall clock
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import math
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fusedcomm.bench import redistribution_torch
from fusedcomm.bench.common import Goal, at_most, listed, tabulated
from fusedcomm.cost.links import INTER_BANDWIDTH
from fusedcomm.cost.model import DEFAULTS
from fusedcomm.launch import console
from fusedcomm.launch.console import Column
from fusedcomm.launch.provenance import run_facts
from fusedcomm.redistribution import search, steps
from fusedcomm.redistribution.search import RedistributionPlan
from fusedcomm.redistribution.sharding import Sharding
from fusedcomm.redistribution.step_time import MeshLinks

MESHES: tuple[tuple[int, ...], ...] = ((2, 2, 2), (2, 4))
SHAPES: tuple[tuple[int, ...], ...] = ((4096, 8192), (4097, 8190), (5, 3))  # even; uneven; tiny
RANKS_PER_NODE = 4
ITEMSIZE = 2
COLD_MS, CACHED_US = 20.0, 200.0
ROUNDING = 1e-9
LARGE_MESH, LARGE_SHAPES = (2, 8, 16), ((4096, 8192, 64), (4097, 8190, 63))


@dataclass(frozen=True)
class PairsRow:
    """All pairs of one mesh and shape, next to one torch."""

    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    torch: str
    pairs: int
    fewer_percent: float
    torch_collectives: float
    collectives: float
    bytes_ratio: float
    worst_bytes_ratio: float
    time_ratio: float
    worst_time_ratio: float
    worst_more_collectives: int


def _times(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


MESH = Column("mesh", "ranks along each of its dims", lambda row: _times(row.mesh_shape), left=True)
TENSOR = Column("tensor", "its shape", lambda row: _times(row.shape), left=True)
RATIO = "fusedcomm / torch, per pair"
COLUMNS = (
    MESH,
    TENSOR,
    Column("torch's mesh", "flattened: torch merges what it can", lambda row: row.torch, left=True),
    Column("pairs", "pairs of placements, before and after", lambda row: str(row.pairs), drop=1),
    Column("fewer\n%", "share of the pairs with fewer collectives than torch", lambda row: f"{row.fewer_percent:.1f}"),
    Column("torch", "collectives per pair, mean", lambda row: f"{row.torch_collectives:.2f}"),
    Column("fusedcomm", "collectives per pair, mean", lambda row: f"{row.collectives:.2f}"),
    Column("bytes\nmean", RATIO, lambda row: f"{row.bytes_ratio:.3f}"),
    Column("bytes\nlargest", RATIO, lambda row: f"{row.worst_bytes_ratio:.3f}", drop=2),
    Column("time\nmean", RATIO, lambda row: f"{row.time_ratio:.3f}"),
    Column("time\nlargest", RATIO, lambda row: f"{row.worst_time_ratio:.3f}", drop=3),
)


@dataclass(frozen=True)
class PlanTime:
    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    plans: int
    median_ms: float
    largest_ms: float
    cached_us: float


PLAN_COLUMNS = (
    MESH,
    TENSOR,
    Column("plans", "that were timed", lambda row: str(row.plans)),
    Column("cold\nms", "planning without any cache, median", lambda row: f"{row.median_ms:.2f}"),
    Column("slowest\nms", "so, the slowest plan", lambda row: f"{row.largest_ms:.2f}"),
    Column("cached\nmicroseconds", "the planner's answer when it is known", lambda row: f"{row.cached_us:.2f}"),
)

Pair = tuple[tuple[str, ...], tuple[str, ...]]


def pairs(num_tensor_dims: int, num_mesh_dims: int) -> Iterator[Pair]:
    """All pairs of placements, before and after. Nothing becomes partial."""
    every = list(itertools.product(["R", *map(str, range(num_tensor_dims)), "P"], repeat=num_mesh_dims))
    for before, after in itertools.product(every, every):
        if before != after and all(b != "P" or a == "P" for a, b in zip(before, after, strict=True)):
            yield before, after


def links(mesh_shape: tuple[int, ...]) -> MeshLinks:
    ranks = tuple(range(math.prod(mesh_shape)))
    return MeshLinks(ranks, mesh_shape, RANKS_PER_NODE, DEFAULTS["cuda"], INTER_BANDWIDTH)


def sharding(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[str]) -> Sharding:
    cuts = [[i for i, each in enumerate(placements) if each == str(dim)] for dim in range(len(shape))]
    return Sharding.of(shape, mesh_shape, cuts, ["sum" if each == "P" else None for each in placements])


def placed(placements: Sequence[str]) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    kinds = {"R": Replicate(), "P": Partial()}
    return [kinds[each] if each in kinds else Shard(int(each)) for each in placements]


def compare(mesh: Any, shape: tuple[int, ...], torch: str) -> PairsRow:
    mesh_shape = tuple(mesh.shape)
    over, found = links(mesh_shape), []
    for before, after in pairs(len(shape), len(mesh_shape)):
        ours = search.plan(*(sharding(shape, mesh_shape, each) for each in (before, after)), ITEMSIZE, over)
        collectives = redistribution_torch.collectives(mesh, shape, placed(before), placed(after))
        theirs = redistribution_torch.total(collectives, ITEMSIZE, over)
        if collectives:
            found.append((ours, theirs))
        else:
            assert not ours.num_collectives
    by_bytes = [_ratio(ours.bytes, num_bytes) for ours, (_, _, num_bytes) in found]
    by_time = [_ratio(ours.seconds, seconds) for ours, (seconds, _, _) in found]
    more = [ours.num_collectives - num for ours, (_, num, _) in found]
    return PairsRow(
        mesh_shape,
        shape,
        torch,
        pairs=len(found),
        fewer_percent=100 * sum(num < 0 for num in more) / len(found),
        torch_collectives=statistics.mean(num for _, (_, num, _) in found),
        collectives=statistics.mean(ours.num_collectives for ours, _ in found),
        bytes_ratio=statistics.mean(by_bytes),
        worst_bytes_ratio=max(by_bytes),
        time_ratio=statistics.mean(by_time),
        worst_time_ratio=max(by_time),
        worst_more_collectives=max(more),
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b else 1.0 + a


def plan_times(mesh_shape: tuple[int, ...], shape: tuple[int, ...], share: int) -> PlanTime:
    """The times to plan, measured for one pair in ``share``."""
    over, cold = links(mesh_shape), []
    last: Callable[[], RedistributionPlan] | None = None
    gc.collect()
    gc.disable()
    try:
        for pair in itertools.islice(pairs(len(shape), len(mesh_shape)), None, None, share):
            both = [sharding(shape, mesh_shape, each) for each in pair]
            for cached_function in (search.plan, steps.step, steps._exchanged, steps._ranges):
                cached_function.cache_clear()
            over = dataclasses.replace(over)  # its own caches are empty
            start = time.thread_time()
            search.plan(*both, ITEMSIZE, over)
            cold.append(time.thread_time() - start)
            last = lambda both=both, over=over: search.plan(*both, ITEMSIZE, over)  # type: ignore[misc]  # noqa: E731
    finally:
        gc.enable()
    assert last is not None
    cached = min(timeit.repeat(last, number=1000, repeat=5)) / 1000
    ms = [1e3 * each for each in cold]
    return PlanTime(mesh_shape, shape, len(ms), statistics.median(ms), max(ms), 1e6 * cached)


def summary(rows: Sequence[PairsRow], times: Sequence[PlanTime]) -> list[Goal]:
    flattened = [row for row in rows if row.torch == FLATTENED]
    return [
        at_most(
            "collectives, fusedcomm - torch's flattened, largest",
            max(row.worst_more_collectives for row in flattened),
            0,
        ),
        at_most("bytes, ours / torch's flattened, largest", _worst(flattened, "worst_bytes_ratio"), 1.0),
        at_most("time, ours / torch's flattened, largest", _worst(flattened, "worst_time_ratio"), 1.0),
        at_most("planning cold, ms, largest", max(each.largest_ms for each in times), COLD_MS),
        at_most("planning cached, us, largest", max(each.cached_us for each in times), CACHED_US),
    ]


def _worst(rows: Sequence[PairsRow], name: str) -> float:
    """The largest value, without what rounding adds."""
    return round(max(getattr(row, name) for row in rows), 9)


FLATTENED, PLAIN = "flattened", "not flattened"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rows: list[PairsRow] = []
    meshes = list(itertools.product(MESHES[1:] if args.quick else MESHES, (FLATTENED, PLAIN)))
    with tabulated(COLUMNS, rows, len(meshes) * len(SHAPES)) as add:
        for mesh_shape, torch in meshes:
            with redistribution_torch.world(math.prod(mesh_shape)):
                mesh = redistribution_torch.mesh(mesh_shape, flatten=torch == FLATTENED)
                for shape in SHAPES:
                    add(compare(mesh, shape, torch))
    cases: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    cases = [(mesh_shape, shape, 1) for mesh_shape in MESHES for shape in SHAPES]
    cases += [(LARGE_MESH, shape, 4) for shape in LARGE_SHAPES]
    times: list[PlanTime] = []
    with tabulated(PLAN_COLUMNS, times, len(cases)) as add:
        for mesh_shape, shape, share in cases:
            add(plan_times(mesh_shape, shape, share * (40 if args.quick else 1)))
    goals = summary(rows, times)
    print(*map(goal_line, goals), sep="\n")
    if args.json:
        console.write_json(args.json, run_facts() | listed(rows=rows, times=times, goals=goals))
    return 0


def goal_line(goal: Goal) -> str:
    return f"{goal.name:60s}{goal.value:8.2f}   goal {goal.bound}: {'met' if goal.met else 'missed'}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fusedcomm.bench.redistribution", description="Nothing is run: plans alone.")
    parser.add_argument("--quick", action="store_true", help="one mesh, and few of the plans that are timed")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
