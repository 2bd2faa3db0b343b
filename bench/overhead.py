"""``fusedcomm bench overhead``: the cost of a call of each op on CPU ranks, at a size where nothing else takes time.

Calls take turns in each round, and each is measured in three ways:

hot   many calls, back to back. The time of one is that of the slowest rank.
cold  one call at a time, which all ranks begin together. Before it every rank writes more than its caches hold.
cpu   CPU time, the backend's threads included, of a call of a rank that comes when the others have sent all
      they can, so that it waits for nobody. It spins before each call, for longer than one takes. Ranks take turns.

Time between two calls is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench import trace
from fusedcomm.bench.op_bench import BASELINE, MATMULS, PROGRAMS, ROOF, OpData
from fusedcomm.bench.rank_barrier import rank_barrier
from fusedcomm.bench.timing import Timing, ValuesDiffer, check_values, repeated
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from fusedcomm.memory.group import resolve
from fusedcomm.ops.whole_group import MatmulSize

NAME = "bench overhead"
SIZE = MatmulSize(4, 16, 8)  # sides that the ranks do not divide grow
CPU = torch.device("cpu")
MM, EMPTY = "torch.mm", "empty op"
ALGORITHMS = ("unfused", "chunked")
WARMUP = 1
START_S, ROUND_S = 120, 60  # at most
FILLED_BYTES = 32 << 20
HOT_CALLS = 100
WARM_CALLS = 5  # before each hot measurement: the one before has left other things in the caches
COLD_CALLS = 4
LAST_CALLS = 10  # of each rank
LATE = 2.0  # times as long as a call has just taken, a rank spins before a call to be the last

# An op that makes an empty result: the cost of a call before an op does its work. It is defined as fusedcomm's ops are,
# by a torch library with a kernel in Python, autograd, and such arguments.
lib = torch.library.Library("fusedcomm_bench", "DEF")
lib.define(
    "empty(Tensor x, Tensor w, Tensor? bias, SymInt[] shape, int gather_dim, int scatter_dim, int group_size, "
    "str group_name) -> Tensor"
)
lib.impl("empty", lambda x, w, bias, shape, *rest: x.new_empty(shape), "CPU")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *map(torch.empty_like, ctx.saved_tensors), None, None, None, None, None, None


torch.library.register_autograd("fusedcomm_bench::empty", _backward, setup_context=_setup_context, lib=lib)


@dataclass(frozen=True)
class TimedCall:
    """A call; ``algorithm`` is forced meanwhile, outside of the time."""

    call: Callable[[], Any]
    algorithm: str | None = None

    def forced(self) -> contextlib.AbstractContextManager[Any]:
        return fusedcomm.force_algorithm(self.algorithm) if self.algorithm else contextlib.nullcontext()

    def once(self) -> Any:
        with self.forced():
            return self.call()


@dataclass(frozen=True)
class CallTimes:
    """Seconds of one call."""

    name: str
    hot: Timing
    cold: Timing
    cpu: Timing


@dataclass(frozen=True)
class OpOverhead:
    """An op in one direction."""

    op: str
    direction: str
    rows: int
    k: int
    n: int
    group_size: int
    plans: dict[str, str]
    calls: list[CallTimes]

    def over_baseline(self, name: str) -> dict[str, float]:
        """Hot and cold time over the baseline's, and CPU time over that of the empty op."""
        times = {each.name: each for each in self.calls}
        ours, baseline, empty = times[name], times[BASELINE], times[EMPTY]
        return {
            "over_baseline": ours.hot.median / baseline.hot.median,
            "cold_over_baseline": ours.cold.median / baseline.cold.median,
            "cpu_over_empty": ours.cpu.median / empty.cpu.median,
        }


# In every rank


class CallClock:
    """A clock of CPU ranks, which use it alike. The ranks leave ``barrier`` as far apart as it is slow."""

    def __init__(self, barrier: Callable[[], None]) -> None:
        self.barrier = barrier
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._filled = torch.zeros(FILLED_BYTES // 4, device="cpu")

    def measure(
        self, calls: Mapping[str, TimedCall], rounds: int, warmup: int, on_round: Callable[[int], None]
    ) -> list[CallTimes]:
        names = list(calls)
        found: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in names}
        for round_ in range(-warmup, rounds):
            for name in random.Random(round_).sample(names, len(names)):
                with calls[name].forced():
                    times = self._round(calls[name].call)
                if round_ >= 0:
                    found[name].append(times)
            on_round(round_ + warmup + 1)
        return [CallTimes(name, *self._of(each)) for name, each in found.items()]

    def _round(self, call: Callable[[], Any]) -> tuple[Tensor, ...]:
        hot = self._hot(call)
        every = [hot], [self._cold(call) for _ in range(COLD_CALLS)], self._last(call, LATE * hot)
        return tuple(torch.tensor(each, dtype=torch.float64, device="cpu") for each in every)

    def _of(self, rounds: list[tuple[Tensor, ...]]) -> list[Timing]:
        timings = []
        for every in zip(*rounds, strict=True):
            seconds = torch.cat(every)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            timings.append(Timing.of(seconds))
        return timings

    def _hot(self, call: Callable[[], Any]) -> float:
        repeated(call, WARM_CALLS)
        self.barrier()
        start = time.perf_counter()
        repeated(call, HOT_CALLS)
        return (time.perf_counter() - start) / HOT_CALLS

    def _cold(self, call: Callable[[], Any]) -> float:
        self._filled.add_(1)
        self.barrier()
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        del result
        return seconds

    def _last(self, call: Callable[[], Any], late_s: float) -> list[float]:
        """CPU seconds; 0 where another rank is the last."""
        spent = []
        for late_rank in range(self.num_ranks):
            self.barrier()
            repeated(call, WARM_CALLS)
            for _ in range(LAST_CALLS):
                begin = time.perf_counter() + (late_s if self.rank == late_rank else 0.0)
                while time.perf_counter() < begin:  # asleep, a core would lose its caches to others
                    pass
                start = time.process_time()
                call()
                spent.append(time.process_time() - start if self.rank == late_rank else 0.0)
        return spent


def measure_overhead(rank: int, op: str, direction: str, rounds: int, warmup: int) -> OpOverhead:
    """In every rank. Raises ValuesDiffer."""
    bench, group_size = PROGRAMS[op], dist.get_world_size()
    size = bench.divisible(SIZE, group_size)
    data = OpData(bench, size, torch.float32, CPU, direction)
    with console.progress(rank == 0, rounds + warmup, f"{op}: checking values", op) as on_round:
        barrier = rank_barrier(CPU)
        calls = op_calls(data)
        with_values = {name: calls[name].once for name in (BASELINE, *ALGORITHMS)}
        check_values({ROOF: calls[MM].once, **with_values}, data.check)
        times = CallClock(barrier).measure(calls, rounds, warmup, on_round)
    plans = {}
    for algorithm in ALGORITHMS:
        with fusedcomm.force_algorithm(algorithm):
            plans[algorithm] = str(data.plan())
    return OpOverhead(op, direction, size.rows, size.k, size.n, group_size, plans, times)


def op_calls(data: OpData) -> dict[str, TimedCall]:
    """Ranks call this alike, as it calls the op."""
    x, w, bench = data.x, data.w, data.bench
    op, dims, shape = getattr(fusedcomm, bench.op), bench.dims(x), list(bench.ours(x, w).shape)
    empty, group = torch.ops.fusedcomm_bench.empty, resolve(None)
    ours = data.variant(lambda x, w: op(x, w, *dims), x, w, grad=data.grad)
    return {
        MM: TimedCall(data.variant(torch.mm, data.local_x, w, grad=data.local_grad)),
        EMPTY: TimedCall(data.variant(lambda x, w: empty(x, w, None, shape, 0, 1, *group), x, w, grad=data.grad)),
        BASELINE: TimedCall(data.variants()[BASELINE]),
        **{name: TimedCall(ours, name) for name in ALGORITHMS},
    }


# In the process that prints

TIME = "one call: back to back (hot), with cold caches (cold); slowest rank"
RATIO = "the same over the baseline's: matmul and collective as users write them"
SPENT = "CPU time of a call that finds the other ranks' data there, backend's threads included"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.{0 if abs(seconds) >= 1e-4 else 1}f}"


COLUMNS = (
    Column("call", "docs/benchmark.md explains each", lambda row: row["name"], left=True),
    Column("hot us", TIME, lambda row: _us(row["hot"]["median"])),
    Column("cold us", TIME, lambda row: _us(row["cold"]["median"])),
    Column("hot /\nbaseline", RATIO, lambda row: f"{row['over_baseline']:.2f}"),
    Column("cold /\nbaseline", RATIO, lambda row: f"{row['cold_over_baseline']:.2f}"),
    Column("CPU us", SPENT, lambda row: _us(row["cpu"]["median"])),
    Column("CPU /\nempty op", "CPU us over that of the empty op", lambda row: f"{row['cpu_over_empty']:.2f}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--op", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="what is called (default: all)"
    )
    direction = "what is measured (default: forward)"
    parser.add_argument(
        "--pass", dest="direction", nargs="+", choices=tuple(MATMULS), default=["forward"], help=direction
    )
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
    """The fault of the arguments, or None; else it would come up in the ranks, or after all is measured."""
    if problem := world.cannot_start("cpu", world_size, args.oversubscribe):
        return problem
    if world_size < 2:
        return f"--world-size must be at least 2, got {world_size}"
    return console.not_writable(args, "json")


def table(found: OpOverhead) -> Table:
    """A `Legend` explains all tables of a run at once."""
    title = f"{found.op}, {found.direction}: {found.rows} x {found.k} @ {found.k} x {found.n}"
    return Table(COLUMNS, _rows(found), title, is_bold=lambda row: row["name"] in ALGORITHMS, has_legend=False)


def report(found: Sequence[OpOverhead], rounds: int) -> dict[str, Any]:
    """The JSON: every figure and its conditions. Times in seconds."""
    ops = [asdict(each) | {"calls": _rows(each)} for each in found]
    timing = {
        "order": "interleaved by round",
        "start": "barrier of symmetric memory",
        "hot_calls": HOT_CALLS,
        "cold_calls": COLD_CALLS,
        "filled_bytes": FILLED_BYTES,
        "last_calls": LAST_CALLS,
        "late": LATE,
    }
    return run_facts() | {"what": "overhead", "rounds": rounds, "timing": timing, "ops": ops}


def _rows(found: OpOverhead) -> list[dict[str, Any]]:
    return [asdict(each) | found.over_baseline(each.name) for each in found.calls]


def _print_end(found: Sequence[OpOverhead], rounds: int) -> None:
    out = console.stdout()
    console.show(console.Legend([table(found[0])]), out)
    where = f"{found[0].group_size} CPU ranks of one thread; only ratios within one run mean anything"
    out.print(f"{where}. Values checked before timing; medians of {rounds} rounds")
    for each in found:
        for plan in each.plans.values():
            out.print(f"plan: {plan}", markup=False)
