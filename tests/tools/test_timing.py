"""The clock of all benches: wrong values stop every rank, times are the slowest rank's."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedcomm.bench.timing import Timing, all_gather_bytes, measure
from fusedcomm.testing import RankPool

CPU = torch.device("cpu")


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


def test_times_are_the_slowest_ranks_and_variants_take_turns(ranks: Callable[[int], RankPool]) -> None:
    (times, called, done), (times_1, called_1, _) = ranks(2).run(measure_slow_rank_1)
    assert times == times_1
    assert called == called_1
    assert 0.05 <= times["slow"].p10 <= times["slow"].median <= times["slow"].p90
    assert times["quick"].median < 0.04
    rounds = [called[i : i + 3] for i in range(0, len(called), 3)]
    assert all(sorted(r) == ["quick", "slow", "third"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert done == [1, 2, 3, 4, 5]


def test_what_a_timing_says_of_its_rounds() -> None:
    seconds = torch.arange(1, 102, dtype=torch.float64)
    timing = Timing.of(seconds.flip(0))
    assert (timing.p10, timing.median, timing.p90, timing.p99) == (11.0, 51.0, 91.0, 100.0)
    assert timing.variation == pytest.approx((850.0**0.5) / 51.0)  # the variance of 1 to n is (n * n - 1) / 12


def gather_text(rank: int, texts: list[bytes]) -> list[bytes]:
    return all_gather_bytes(texts[rank], CPU)


def test_bytes_of_any_length_are_gathered(ranks: Callable[[int], RankPool]) -> None:
    for texts in ([b"", b""], [b"a", b"\x00bc " * 999], [b" ", b""]):
        assert ranks(2).run(gather_text, texts) == [texts, texts]
