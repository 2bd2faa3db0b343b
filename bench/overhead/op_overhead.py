"""The overhead of one op: its calls beside what they are made of, and how the time of a call divides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.bench.op_bench import BASELINE, OpData
from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.bench.overhead.call_clock import CallClock, CallTimes
from fusedcomm.bench.overhead.timed_calls import ALGORITHMS, EMPTY, NOTHING, MatmulShape, op_calls
from fusedcomm.bench.rank_barrier import rank_barrier
from fusedcomm.bench.timing import check_values
from fusedcomm.launch import console
from fusedcomm.ops.whole_group import MatmulSize

SIZE = MatmulSize(4, 16, 8)  # sides that the ranks do not divide grow
CPU = torch.device("cpu")


@dataclass(frozen=True)
class OverheadRow:
    """One kind of call. Seconds."""

    name: str
    times: CallTimes
    matmuls: str | None  # the row of the matmuls that it makes, alone; None where that means nothing


@dataclass(frozen=True)
class Parts:
    """How the hot time of a call of ``algorithm`` divides. Seconds; they add up to ``hot``."""

    algorithm: str
    hot: float
    matmuls: float  # the same ones alone, with out=
    entry: float  # an op that does nothing: Python, the dispatcher, autograd, the empty result
    rest: float  # checks, plan, records, signals, copies
    waits: float  # for the other ranks


@dataclass(frozen=True)
class OpOverhead:
    """An op in one direction. ``matmuls`` has [m, k, n] of those that a call makes, by row."""

    op: str
    direction: str
    rows: int
    k: int
    n: int
    group_size: int
    plans: dict[str, str]
    matmuls: dict[str, list[MatmulShape]]
    calls: list[OverheadRow]

    def __getitem__(self, name: str) -> CallTimes:
        return next(row.times for row in self.calls if row.name == name)

    def over_baseline(self, row: OverheadRow, cold: bool = False) -> float:
        ours, baseline = row.times, self[BASELINE]
        return ours.cold.median / baseline.cold.median if cold else ours.hot.median / baseline.hot.median

    def above_matmuls(self, row: OverheadRow, cold: bool = False) -> float | None:
        """CPU seconds of a call above those of its matmuls."""
        if row.matmuls is None:
            return None
        whole, alone = row.times, self[row.matmuls]
        return whole.cold_cpu.median - alone.cold_cpu.median if cold else whole.cpu.median - alone.cpu.median

    def parts(self) -> list[Parts]:
        return [self._parts(row) for row in self.calls if row.name in ALGORITHMS]

    def _parts(self, row: OverheadRow) -> Parts:
        assert row.matmuls is not None
        times, nothing = row.times, self[NOTHING]
        matmuls = self[row.matmuls].hot.median - nothing.hot.median
        entry = self[EMPTY].hot.median - nothing.hot.median
        own = times.last.median - nothing.last.median
        return Parts(row.name, times.hot.median, matmuls, entry, own - matmuls - entry, times.hot.median - own)


def measure_overhead(rank: int, op: str, direction: str, rounds: int, warmup: int) -> OpOverhead:
    """In every rank. Raises ValuesDiffer."""
    bench, group_size = PROGRAMS[op], dist.get_world_size()
    size = bench.divisible(SIZE, group_size)
    data = OpData(bench, size, torch.float32, CPU, direction)
    with console.progress(rank == 0, rounds + warmup, f"{op}: checking values", op) as on_round:
        barrier = rank_barrier(CPU)
        timed = op_calls(data, barrier)
        check_values(timed.with_values(), data.check)
        times = CallClock(barrier).measure(timed.calls, rounds, warmup, on_round)
    rows = [OverheadRow(name, each, timed.matmul_calls.get(name)) for name, each in times.items()]
    return OpOverhead(op, direction, size.rows, size.k, size.n, group_size, _plans(data), timed.matmuls, rows)


def _plans(data: OpData) -> dict[str, str]:
    def plan(algorithm: str) -> str:
        with fusedcomm.force_algorithm(algorithm):
            return str(data.plan())

    return {algorithm: plan(algorithm) for algorithm in ALGORITHMS}
