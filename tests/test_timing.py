"""The clock of all benches: wrong values stop every rank, times are the slowest rank's."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from fusedcomm.bench.timing import Timing, ValuesDiffer, check_values, measure
from fusedcomm.testing import RankPool

CPU = torch.device("cpu")


def check_rank_1_wrong(rank: int) -> str:
    def check(name: str, result: Tensor) -> str | None:
        return f"{name} is {result.item()}" if rank == 1 and name == "bad" else None

    variants = {"good": lambda: torch.zeros(1), "bad": lambda: torch.ones(1)}
    try:
        check_values(variants, check)
    except ValuesDiffer as error:
        return str(error)
    return "passed"


def measure_slow_rank_1(rank: int) -> tuple[dict[str, Timing], list[str], list[int]]:
    called: list[str] = []
    done: list[int] = []

    def variant(name: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            called.append(name)
            time.sleep(0.05 if name == "slow" and rank == 1 else 0.0)
            return torch.zeros(1)

        return call

    variants = {name: variant(name) for name in ("slow", "quick", "third")}
    times = measure(variants, CPU, rounds=4, warmup=1, on_round=done.append)
    return times, called, done


def test_values_wrong_on_one_rank_stop_all(ranks: Callable[[int], RankPool]) -> None:
    expected = "'bad' gave wrong values: rank 1: bad is 1.0"
    assert ranks(2).run(check_rank_1_wrong) == [expected, expected]


def test_times_are_the_slowest_ranks_and_variants_take_turns(
    ranks: Callable[[int], RankPool],
) -> None:
    (times, called, done), (times_1, called_1, _) = ranks(2).run(measure_slow_rank_1)
    assert times == times_1
    assert called == called_1
    assert 0.05 <= times["slow"].p10 <= times["slow"].median <= times["slow"].p90
    assert times["quick"].median < 0.04
    rounds = [called[i : i + 3] for i in range(0, len(called), 3)]
    assert all(sorted(r) == ["quick", "slow", "third"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert done == [1, 2, 3, 4, 5]
