"""``fusedcomm bench overhead``: the cost of a call of each op on CPU ranks, at a size where nothing else takes time.

Calls take turns in each round, and each is measured in three ways:

hot   many calls, back to back. The time of one is that of the slowest rank.
cold  one call at a time, which all ranks begin together. Before it every rank writes more than its caches hold.
cpu   CPU time, the backend's threads included, of a call of a rank that comes when the others have sent all
      they can, so that it waits for nobody. It spins before each call, for longer than one takes. Ranks take turns.

Time between two calls is not counted.
"""

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

import fusedcomm
from fusedcomm import env
from fusedcomm.bench import common
from fusedcomm.bench.common import us
from fusedcomm.bench.op_bench import BASELINE, MATMULS, PROGRAMS, ROOF, OpData
from fusedcomm.bench.timing import Timing, check_values, measure, repeated
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.memory.group import process_group, resolve
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.symm_mem import enable_cpu

NAME = "bench overhead"
SIZE = MatmulSize(4, 16, 8)  # sides that the ranks do not divide grow
CPU = torch.device("cpu")
MM, EMPTY = "torch.mm", "empty op"
ALGORITHMS = ("unfused", "chunked")
WARMUP = 1
FILLED_BYTES = 32 << 20
HOT_CALLS = 100
WARM_CALLS = 5  # before each measurement: the one before has left other things in the caches
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
class CallRow:
    """A call of an op in one direction: seconds, hot and cold over the baseline's, CPU time over the empty op's."""

    op: str
    direction: str
    rows: int
    k: int
    n: int
    group_size: int
    name: str
    hot: Timing
    cold: Timing
    cpu: Timing
    over_baseline: float
    cold_over_baseline: float
    cpu_over_empty: float


class CallClock:
    """Clocks of CPU ranks, which use them alike. Their barrier is that of symmetric memory, which waits as the ops do:
    gloo's would take as long as some exchanges, and ranks leave a barrier as far apart as it is slow.
    """

    def __init__(self) -> None:
        enable_cpu()
        handle = symm_mem.rendezvous(symm_mem.empty(1, device=CPU), process_group(None))
        self.barrier = partial(handle.barrier, timeout_ms=max(1, int(env.timeout_s() * 1e3)))  # 0 would be no bound
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._filled = torch.zeros(FILLED_BYTES // 4, device="cpu")

    def measure(self, calls: Mapping[str, TimedCall], rounds: int) -> dict[str, list[Timing]]:
        """Hot, cold and CPU seconds of one call of each."""
        clocks = (self._hot, rounds), (self._cold, rounds * COLD_CALLS), (self._last, rounds)
        found = [measure(calls, CPU, rounds=number, warmup=WARMUP, clock=clock) for clock, number in clocks]
        return {name: [times[name] for times in found] for name in calls}

    def _hot(self, timed: TimedCall) -> tuple[float, None]:
        with timed.forced():
            repeated(timed.call, WARM_CALLS)
            self.barrier()
            start = time.perf_counter()
            repeated(timed.call, HOT_CALLS)
            return (time.perf_counter() - start) / HOT_CALLS, None

    def _cold(self, timed: TimedCall) -> tuple[float, Any]:
        self._filled.add_(1)
        with timed.forced():
            self.barrier()
            start = time.perf_counter()
            result = timed.call()
            return time.perf_counter() - start, result

    def _last(self, timed: TimedCall) -> tuple[float, None]:
        """CPU seconds of this rank's calls in its turn to be the last; a median."""
        spent = []
        with timed.forced():
            for late_rank in range(self.num_ranks):
                self.barrier()
                start = time.perf_counter()
                repeated(timed.call, WARM_CALLS)
                late_s = LATE * (time.perf_counter() - start) / WARM_CALLS if self.rank == late_rank else 0.0
                for _ in range(LAST_CALLS):
                    begin = time.perf_counter() + late_s
                    while time.perf_counter() < begin:  # asleep, a core would lose its caches to others
                        pass
                    start = time.process_time()
                    timed.call()
                    if self.rank == late_rank:
                        spent.append(time.process_time() - start)
        return statistics.median(spent), None


def measure_overhead(rank: int, op: str, direction: str, device_type: str, rounds: int) -> list[CallRow]:
    """In every rank. Raises ValuesDiffer."""
    bench, group_size = PROGRAMS[op], dist.get_world_size()
    size = bench.divisible(SIZE, group_size)
    data = OpData(bench, size, torch.float32, CPU, direction)
    clock = CallClock()
    calls = op_calls(data)
    with_values = {name: calls[name].once for name in (BASELINE, *ALGORITHMS)}
    check_values({ROOF: calls[MM].once, **with_values}, data.check)
    times = clock.measure(calls, rounds)
    facts = op, direction, size.rows, size.k, size.n, group_size

    def row_of(name: str, call: list[Timing]) -> CallRow:
        hot, cold, cpu = call
        over = hot.median / times[BASELINE][0].median, cold.median / times[BASELINE][1].median
        return CallRow(*facts, name, hot, cold, cpu, *over, cpu.median / times[EMPTY][2].median)

    return [row_of(name, call) for name, call in times.items()]


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


TIME = "one call: back to back (hot), with cold caches (cold); slowest rank"
RATIO = "the same over the baseline's: matmul and collective as users write them"
SPENT = "CPU time of a call that finds the other ranks' data there, backend's threads included"
COLUMNS = (
    Column("op", f"{SIZE.rows} x {SIZE.k} @ {SIZE.k} x {SIZE.n} or a little more", lambda row: row.op, left=True),
    Column("pass", "what is measured", lambda row: row.direction, left=True, drop=1),
    Column("call", "docs/benchmark.md explains each", lambda row: row.name, left=True),
    Column("hot us", TIME, lambda row: us(row.hot.median)),
    Column("cold us", TIME, lambda row: us(row.cold.median)),
    Column("hot /\nbaseline", RATIO, lambda row: f"{row.over_baseline:.2f}"),
    Column("cold /\nbaseline", RATIO, lambda row: f"{row.cold_over_baseline:.2f}"),
    Column("CPU us", SPENT, lambda row: us(row.cpu.median)),
    Column("CPU /\nempty op", "CPU us over that of the empty op", lambda row: f"{row.cpu_over_empty:.2f}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ops = "what is called (default: all)"
    parser.add_argument("--op", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help=ops)
    direction = "what is measured (default: forward)"
    parser.add_argument(
        "--pass", dest="direction", nargs="+", choices=tuple(MATMULS), default=["forward"], help=direction
    )
    parser.add_argument("--rounds", type=console.positive, default=15, metavar="N", help="measurements (default: 15)")
    world_size = "CPU ranks to start (default: 2; under torchrun its own)"
    parser.add_argument("--world-size", type=console.positive, metavar="N", help=world_size)
    console.add_oversubscribe(parser)
    parser.add_argument("--json", metavar="FILE", help="also write every figure, and what it depends on, as JSON")
    parser.set_defaults(device="cpu")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, 1 for wrong values or a failure in a rank, 2 for wrong arguments."""
    if (world_size := world.world_size_of(args.world_size, "cpu")) < 2:
        return console.fail(NAME, f"--world-size must be at least 2, got {world_size}", code=2)
    cases = [*itertools.product(args.op, args.direction)]
    counts = {name: globals()[name] for name in ("HOT_CALLS", "COLD_CALLS", "LAST_CALLS", "FILLED_BYTES", "LATE")}
    return common.run_cases(NAME, args, measure_overhead, cases, COLUMNS, lambda rows: {"counts": counts})
