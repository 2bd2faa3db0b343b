"""The clock of all benches: wrong values stop every rank, times are the slowest rank's."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import bench_matmul_all_to_all as bench
from bench.bench_matmul_all_to_all import measure_row, summary
from fusedcomm.cli import launch
from fusedcomm.cli.timing import Timing, ValuesDiffer, check_values, measure
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_the_bench(ranks: Callable[[int], RankPool], dtype: torch.dtype) -> None:
    row, _ = ranks(2).run(measure_row, "cpu", 33, 16, 6, dtype, 2)
    assert (row.rows, row.k, row.n) == (33, 16, 6)
    assert row.speedup == row.baseline.median / row.auto.median
    mean, worst, roof = summary([row, row])
    assert mean.value == pytest.approx(row.speedup) == worst.value
    assert roof.value == row.over_roof
    assert mean.met == (mean.value >= 1.3)


@pytest.mark.parametrize("huge_pages", [False, True])
def test_the_bench_says_which_pages_the_ranks_got(
    huge_pages: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    monkeypatch.setattr(launch, "default_device_type", lambda: "cpu")
    monkeypatch.setattr(bench, "QUICK", ((33, 16, 6),))
    file = tmp_path / "bench.json"
    assert bench.main(["--quick", "--rounds", "1", "--json", str(file), *["--huge-pages"] * huge_pages]) == 0
    assert json.loads(file.read_text())["huge_pages"] is huge_pages
    heading = capsys.readouterr().out.splitlines()[0]
    assert heading.startswith("pages: huge for all" if huge_pages else "pages: torch's default")


def test_under_torchrun_its_caller_must_ask_for_huge_pages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank that reads the option has started torch already."""
    monkeypatch.setattr(launch, "default_device_type", lambda: "cpu")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    with pytest.raises(SystemExit):
        bench.parse(["--huge-pages"])
    assert "start torchrun with THP_MEM_ALLOC_ENABLE=1" in capsys.readouterr().err
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    assert bench.parse(["--huge-pages"]).huge_pages
