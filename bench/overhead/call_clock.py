"""How long calls of microseconds take: variants take turns in each round, and each is measured in three ways.

hot      many calls, back to back. The time of one is that of the slowest rank.
cold     one call at a time, which all ranks begin together. Before it every rank writes more than its caches hold.
last     one call at a time, hot or cold, of a rank that comes when the others have sent what they can, so that it waits
         for nobody: the time and the CPU time, that of the backend's threads included, which the call itself takes.
         It comes last because it spins before each call for longer than a call takes. The ranks take turns.

What comes between two calls is not counted.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench.timing import Timing

FILLED_BYTES = 32 << 20
HOT_CALLS = 100
WARM_CALLS = 5  # before each hot measurement: what was measured before it has left other things in the caches
COLD_CALLS = 4
LAST_CALLS = 10  # hot ones of each rank
LATE = 2.0  # times as long as a call has just taken, a rank spins before a call to be the last


@dataclass(frozen=True)
class TimedCall:
    """What is measured; ``algorithm`` is forced meanwhile, outside of the time."""

    call: Callable[[], Any]
    algorithm: str | None = None

    def forced(self) -> contextlib.AbstractContextManager[Any]:
        return fusedcomm.force_algorithm(self.algorithm) if self.algorithm else contextlib.nullcontext()

    def once(self) -> Any:
        with self.forced():
            return self.call()


@dataclass(frozen=True)
class CallTimes:
    """Seconds of one call. ``last``, ``cpu`` and ``cold_cpu`` are of the rank that comes last."""

    hot: Timing
    cold: Timing
    last: Timing
    cpu: Timing
    cold_cpu: Timing


class CallClock:
    """A clock of CPU ranks, which use it alike. The ranks leave ``barrier`` as far apart as it is slow."""

    def __init__(self, barrier: Callable[[], None]) -> None:
        self.barrier = barrier
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._filled = torch.zeros(FILLED_BYTES // 4, device="cpu")

    def measure(
        self, calls: Mapping[str, TimedCall], rounds: int, warmup: int, on_round: Callable[[int], None]
    ) -> dict[str, CallTimes]:
        names = list(calls)
        found: dict[str, list[list[Tensor]]] = {name: [] for name in names}
        for round_ in range(-warmup, rounds):
            for name in random.Random(round_).sample(names, len(names)):
                with calls[name].forced():
                    times = self._round(calls[name].call)
                if round_ >= 0:
                    found[name].append(times)
            on_round(round_ + warmup + 1)
        return {name: self._of(each) for name, each in found.items()}

    def _round(self, call: Callable[[], Any]) -> list[Tensor]:
        """In the order of CallTimes."""
        hot = self._hot(call)
        cold = [self._cold(call).seconds for _ in range(COLD_CALLS)]
        last = self._last(call, LATE * hot)
        cold_last = self._cold_last(call, LATE * statistics.median(cold))
        every = [hot], cold, [t.seconds for t in last], [t.cpu for t in last], [t.cpu for t in cold_last]
        return [torch.tensor(each, dtype=torch.float64, device="cpu") for each in every]

    def _of(self, rounds: list[list[Tensor]]) -> CallTimes:
        timings = []
        for every in zip(*rounds, strict=True):
            seconds = torch.cat(every)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            timings.append(Timing.of(seconds))
        return CallTimes(*timings)

    def _hot(self, call: Callable[[], Any]) -> float:
        _repeat(call, WARM_CALLS)
        self.barrier()
        start = time.perf_counter()
        _repeat(call, HOT_CALLS)
        return (time.perf_counter() - start) / HOT_CALLS

    def _cold(self, call: Callable[[], Any], late_s: float = 0.0) -> _Spent:
        self._filled.add_(1)
        self.barrier()
        return _timed(call, late_s)

    def _last(self, call: Callable[[], Any], late_s: float) -> list[_Spent]:
        spent: list[_Spent] = []
        for late_rank in range(self.num_ranks):
            self.barrier()
            _repeat(call, WARM_CALLS)
            if self.rank == late_rank:
                spent += [_timed(call, late_s) for _ in range(LAST_CALLS)]
            else:
                _repeat(call, LAST_CALLS)
                spent += [_NOTHING] * LAST_CALLS
        return spent

    def _cold_last(self, call: Callable[[], Any], late_s: float) -> list[_Spent]:
        spent: list[_Spent] = []
        for late_rank in range(self.num_ranks):
            for _ in range(COLD_CALLS):
                late = self.rank == late_rank
                each = self._cold(call, late_s if late else 0.0)
                spent.append(each if late else _NOTHING)
        return spent


class _Spent(NamedTuple):
    seconds: float
    cpu: float


_NOTHING = _Spent(0.0, 0.0)  # where another rank is the one that is measured: less than any


def _timed(call: Callable[[], Any], late_s: float) -> _Spent:
    begin = time.perf_counter() + late_s
    while time.perf_counter() < begin:  # asleep, a core would lose its caches to others
        pass
    cpu_start = time.process_time()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    cpu = time.process_time() - cpu_start
    del result
    return _Spent(seconds, cpu)


def _repeat(call: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        call()
