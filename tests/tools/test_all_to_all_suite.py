"""`fusedcomm bench all-to-all`: every case, what its checks catch, and how its figures are made."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench import all_to_all
from fusedcomm.bench.all_to_all import case_call, command, parts, suite
from fusedcomm.bench.all_to_all.case_call import CaseCall
from fusedcomm.bench.all_to_all.cases import CASES, VARIANTS, Variant
from fusedcomm.bench.all_to_all.data import LARGEST, SuiteData, SuiteSize, moduli
from fusedcomm.bench.timing import Timing, ValuesDiffer
from fusedcomm.launch import world
from fusedcomm.launch.ranks import RankError
from fusedcomm.testing import RankPool

SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "all_to_all_suite.json").read_text())
DIM = 6
SMALL = ("--device", "cpu", "--dim", str(DIM), "--compute", "1", "--rounds", "2")
NUMEL = 16 * DIM * DIM


def run_suite(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    all_to_all.add_arguments(parser)
    return all_to_all.run(parser.parse_args([*SMALL, *arguments]))


@pytest.fixture(params=[2])
def shared_ranks(
    ranks: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> int:
    """Ranks that live on, in place of new ones."""

    @contextmanager
    def started(device_type: str, world_size: int, *args: Any) -> Iterator[Callable[..., Any]]:
        assert world_size == request.param
        yield lambda fn, *args: ranks(world_size).run(fn, *args)[0]

    monkeypatch.setattr(world, "ranks", started)
    return request.param


def check_report(report: dict[str, Any]) -> None:
    jsonschema.validate(report, SCHEMA)
    assert math.prod(report["checked_modulo"]) >= report["world_size"] * NUMEL
    for row in report["rows"]:
        smaller = min(row[name]["median"] for name in ("compute", "communication"))
        if row["overlapped_share"] is None:
            assert row["noise"] >= smaller and row["share_limit"].startswith("not measurable")
        else:
            share = row["overlapped"] / smaller
            assert row["overlapped_share"] == pytest.approx(min(max(share, 0), 1))
            assert (row["share_limit"] is None) == (-row["noise"] <= row["overlapped"] <= smaller + row["noise"])
        assert (row["blocked"] is None) == (row["case"] == "fused")
        assert row["blocked"] is None or row["blocked"] <= row["total"]["p99"] * 1.5


@pytest.mark.parametrize("case", CASES)
def test_each_case_alone(case: str, shared_ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "suite.json"
    assert run_suite("--case", case, "--json", str(file)) == 0
    report = json.loads(file.read_text())
    check_report(report)
    expected = [variant for variant in VARIANTS if variant.case == case]
    assert [(row["case"], row["variant"]) for row in report["rows"]] == [(each.case, each.kind) for each in expected]
    assert (report["world_size"], report["rounds"], report["dim"], report["dtype"]) == (2, 2, DIM, "float32")
    printed = capsys.readouterr()
    assert not printed.err and not set("\x1b\r") & set(printed.out)
    for variant in expected:
        assert f"\n{variant.name} " in printed.out
    assert "plan of fused: matmul_all_to_all: chunked" in printed.out


@pytest.mark.parametrize(("shared_ranks", "dtype"), [(3, "bfloat16"), (2, "float16")], indirect=["shared_ranks"])
def test_all_cases_in_one_run(shared_ranks: int, dtype: str, tmp_path: Path) -> None:
    file = tmp_path / "suite.json"
    assert run_suite("--world-size", str(shared_ranks), "--oversubscribe", "--dtype", dtype, "--json", str(file)) == 0
    report = json.loads(file.read_text())
    check_report(report)
    assert [row["case"] for row in report["rows"]] == [variant.case for variant in VARIANTS]
    assert (report["world_size"], report["dtype"]) == (shared_ranks, dtype)


def run_as_under_torchrun(rank: int, *arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_suite(*arguments)
    return code, out.getvalue(), err.getvalue()


def test_in_ranks_of_torchrun_only_rank_0_prints(ranks: Callable[[int], RankPool]) -> None:
    (code_0, out_0, err_0), (code_1, out_1, err_1) = ranks(2).run(run_as_under_torchrun, "--case", "sync", "fused")
    assert (code_0, code_1, err_0, err_1, out_1) == (0, 0, "", "", "")
    assert "\nsync " in out_0 and "\nfused " in out_0 and "\nlazy " not in out_0
    for code, _, err in ranks(2).run(run_as_under_torchrun, "--world-size", "4"):
        assert code == 2 and "--world-size must be that of torchrun, 2, got 4" in err


def test_every_element_has_a_number_of_its_own_in_every_dtype() -> None:
    for num_ranks in (2, 3, 8):
        numbers = range(num_ranks * NUMEL)
        found = moduli(num_ranks * NUMEL)
        assert len({tuple(number % modulus for modulus in found) for number in numbers}) == len(numbers)
    assert all(math.gcd(a, b) == 1 for a, b in itertools.combinations(moduli(1 << 40), 2))
    values = torch.arange(LARGEST + 1)  # a case adds 1
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        torch.testing.assert_close(values.to(dtype).long(), values, rtol=0, atol=0)


def swap(blocks: Tensor, distance: int) -> Tensor:
    """Swap two elements of rank 1's block for rank 0."""
    if dist.get_rank() == 1:
        flat = blocks.view(-1)
        flat[[0, distance]] = flat[[distance, 0]]
    return blocks


def measure_with_two_elements_swapped(rank: int, case: str, distance: int, calls_before: int) -> None:
    produce, fused = SuiteData.produce, fusedcomm.matmul_all_to_all
    counter = itertools.count()

    def swapped(data: SuiteData) -> Tensor:
        y = produce(data)
        return swap(y, distance) if next(counter) >= calls_before else y

    def swapped_by_op(*args: Any) -> Tensor:
        y = fused(*args)
        if rank == 0:  # elements that came from rank 1
            y.view(2, -1)[1, [0, distance]] = y.view(2, -1)[1, [distance, 0]]
        return y

    with (
        mock.patch.object(SuiteData, "produce", swapped),
        mock.patch.object(fusedcomm, "matmul_all_to_all", swapped_by_op),
    ):
        suite.measure_suite(rank, [case], SuiteSize(DIM, 1, "float32"), "cpu", 2)


@pytest.mark.parametrize("distance", [1, LARGEST])  # elements LARGEST apart are equal modulo 255, but not modulo 254
@pytest.mark.parametrize("case", CASES)
def test_two_elements_in_each_others_place_are_caught_where_they_arrive(
    case: str, distance: int, ranks: Callable[[int], RankPool]
) -> None:
    name = next(variant.name for variant in VARIANTS if variant.case == case)
    where = 1 if case == "d2h" else 0  # its first variant sends nothing: caught where it is copied
    with pytest.raises(RankError) as caught:
        ranks(2).run(measure_with_two_elements_swapped, case, distance, 0)
    assert {failure.exception_type for failure in caught.value.failures} == {ValuesDiffer.__name__}
    assert f"'{name}' gave wrong values: rank {where}: 2 of {NUMEL} elements, first at" in str(caught.value)


def test_a_wrong_element_in_a_timed_round_is_caught_too(ranks: Callable[[int], RankPool]) -> None:
    num_checks = 4 * len(moduli(2 * NUMEL))  # calls of produce before timing: case and compute, twice per modulus
    with pytest.raises(RankError, match=r"wrong values: rank 0: 'sync' in round 1: 2 elements are not in their place"):
        ranks(2).run(measure_with_two_elements_swapped, "sync", 1, num_checks)


def measure_with(rank: int, case: str, name: str, rounds: int) -> suite.SuiteReport:
    wrong: dict[str, Callable[..., Any]] = {
        "sum": lambda data, total, group, start=SuiteData.start_sum: start(data, total.copy_(total.roll(rank)), group),
        "stale": lambda *args: torch.zeros(2 * DIM, 16 * DIM // 2).add_(rank),
    }
    target, attribute = {"sum": (SuiteData, "start_sum"), "stale": (fusedcomm, "matmul_all_to_all")}[name]
    with mock.patch.object(target, attribute, wrong[name]):
        return suite.measure_suite(rank, [case], SuiteSize(DIM, 1, "float32"), "cpu", rounds)


@pytest.mark.parametrize(("case", "name"), [("two-groups", "sum"), ("competing", "sum"), ("fused", "stale")])
def test_other_wrong_results_are_caught(case: str, name: str, ranks: Callable[[int], RankPool]) -> None:
    with pytest.raises(RankError, match=f"'{case}.*' gave wrong values: rank 0: .* rank 1: "):
        ranks(2).run(measure_with, case, name, 1)


def test_wrong_values_give_code_1_and_no_file(
    shared_ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "suite.json"
    monkeypatch.setattr(command, "measure_suite", measure_async_with_two_elements_swapped)
    assert run_suite("--case", "async", "--json", str(file)) == 1
    error = capsys.readouterr().err
    assert error.startswith("fusedcomm bench all-to-all: ") and "'async' gave wrong values: rank 0: 2 of" in error
    assert not file.read_text()


def measure_async_with_two_elements_swapped(rank: int, *args: Any) -> None:
    measure_with_two_elements_swapped(rank, "async", 1, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--device", "cuda"), "--device cuda: each rank needs a GPU of its own, got 1 ranks and 0 GPUs"),
        (("--device", "cuda", "--world-size", "2"), "each rank needs a GPU of its own, got 2 ranks and 0 GPUs"),
        (("--world-size", "1"), "--world-size must be at least 2, got 1"),
        (
            ("--world-size", "5", "--oversubscribe"),
            "16 times --dim must be divisible by the number of ranks, 5, got --dim 6",
        ),
        (("--json", "/none/x.json"), "--json /none/x.json: No such file or directory"),
    ],
)
def test_wrong_arguments_give_code_2_before_any_rank_starts(
    arguments: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(world, "ranks", None)
    assert run_suite(*arguments) == 2
    assert text in capsys.readouterr().err


def test_the_limit_of_a_run_grows_with_its_rounds_and_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    @contextmanager
    def started(device_type: str, world_size: int, limit_s: float) -> Iterator[Callable[..., Any]]:
        limits.append(limit_s)
        yield lambda *args: None

    monkeypatch.setattr(world, "ranks", started)
    for more in ((), ("--rounds", "15"), ("--dim", "1024"), ("--dim", "1024", "--rounds", "200", "--compute", "4")):
        assert run_suite(*more) == 0
    small, rounds, large, long = limits
    assert 600 < small < rounds < 602 < large < long
    assert long > 200 * 25 * 5 * 2 * 16 * 2 * 1024**3 / 1e10  # 200 rounds of 25 calls with 5 matmuls each, at 10 GFLOPS


@pytest.mark.parametrize("arguments", [("--case", "quick"), ("--rounds", "0"), ("--dtype", "int8"), ("--compute", "x")])
def test_argparse_refuses_what_is_no_choice(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_suite(*arguments)
    assert stopped.value.code == 2


def half_hidden(data: SuiteData, call: CaseCall) -> None:
    time.sleep(0.04)
    call.waited(lambda: time.sleep(0.02))


def forty_ms(data: SuiteData, call: CaseCall) -> None:
    time.sleep(0.04)


def forty_ms_too(data: SuiteData, call: CaseCall) -> None:
    end = time.process_time() + 0.04
    while time.process_time() < end:
        pass


def measure_planted(rank: int) -> suite.SuiteReport:
    planted = (
        Variant("sleeping", "", "80 ms of which 20 are hidden", half_hidden, forty_ms, forty_ms_too),
        Variant("busy", "", "40 ms, all CPU", forty_ms_too, forty_ms, forty_ms_too),
    )
    with mock.patch.object(suite, "VARIANTS", planted):
        return suite.measure_suite(rank, ["sleeping", "busy"], SuiteSize(DIM, 1, "float32"), "cpu", 3)


def test_figures_of_planted_times(ranks: Callable[[int], RankPool]) -> None:
    sleeping, busy = ranks(2).run(measure_planted)[0].rows
    assert sleeping.total.median >= 0.06 and sleeping.compute.median >= 0.04
    assert 0.02 <= sleeping.blocked <= sleeping.total.median - 0.03
    assert sleeping.cpu < 0.5 * sleeping.total.median
    assert busy.cpu >= 0.04 and busy.blocked < 0.02


def test_what_is_overlapped_is_of_differences_within_rounds() -> None:
    """Differences are taken within rounds, so a slow moment that meets a whole round does not count."""
    variant = Variant("case", "", "about", half_hidden, forty_ms, forty_ms_too)
    slow = torch.tensor([0.0, 50.0, 0.0, 7.0, 0.0], dtype=torch.float64)
    totals = {"case": 0.9 + 2 * slow, "forty_ms alone": 0.6 + slow, "forty_ms_too alone": 0.4 + slow}
    measured = mock.Mock(blocked=[], cpu=[])
    measured.median.return_value = 0.3
    row = suite._row(variant, {"case": measured}, totals, 5)
    assert row.overlapped == pytest.approx(0.1) and row.overlapped_share == pytest.approx(0.25)
    assert (row.total.median, row.blocked, row.cpu) == (0.9, 0.3, 0.3)
    assert row.noise == pytest.approx(0) and row.share_limit is None


def planted_row(overlapped: float, noise: float, case: str = "d2h") -> suite.SuiteRow:
    compute, communication = (Timing(seconds, 0, 0, 0, 0) for seconds in (0.6, 0.4))
    total = Timing(1.0 - overlapped, 0, 0, 0, 0)
    return suite.SuiteRow(case, "alone", "about", total, compute, communication, overlapped, noise, 0.0, 0.0)


@pytest.mark.parametrize(
    ("overlapped", "noise", "share", "cell", "reason"),
    [
        (0.1, 0.05, 0.25, "25", None),
        (6.568, 0.5, None, "-", "not measurable: the shorter of compute and communication is within the noise"),
        (-0.528, 0.1, 0.0, "< 0", "the call takes longer than its compute and then its communication"),
        (0.6, 0.1, 1.0, "> 100", "more is saved than the shorter of the two takes: d2h, alone"),
        (-0.05, 0.1, 0.0, "0", None),
        (0.45, 0.1, 1.0, "100", None),
    ],
)
def test_a_share_that_means_nothing_is_not_printed(
    overlapped: float,
    noise: float,
    share: float | None,
    cell: str,
    reason: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = planted_row(overlapped, noise)
    assert row.overlapped_share == pytest.approx(share) if share is not None else row.overlapped_share is None
    command._print(suite.SuiteReport(2, "plan", [2], [row]), SuiteSize(DIM, 1, "float32"), "cpu", 5)
    printed = " ".join(capsys.readouterr().out.split())
    assert f" {cell} 0.00 0.00 " in printed  # between what is overlapped and what the host waits
    assert not any(wrong in printed for wrong in ("1642", "-132", "125 "))
    assert (row.share_limit is None) == (reason is None)
    assert reason is None or f"share {cell}: {reason}" in printed
    assert "share -" not in printed or "d2h, alone (400.0 ms, noise 500.0 ms)" in printed


def test_only_fused_saves_copies(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [planted_row(0.6, 0.1, case) for case in ("async", "fused")]
    command._print(suite.SuiteReport(2, "plan", [2], rows), SuiteSize(DIM, 1, "float32"), "cpu", 5)
    printed = " ".join(capsys.readouterr().out.split())
    assert "takes: async, alone; fused, alone (it also saves the copies that pack y)" in printed


def test_noise_is_of_the_median() -> None:
    """Where rounds differ at random, the median of as many other rounds lies within it about 9 times in 10."""
    variant = Variant("case", "", "about", half_hidden, forty_ms, forty_ms_too)
    measured = mock.Mock(blocked=[], cpu=[])
    measured.median.return_value = 0.0
    generator = torch.Generator().manual_seed(0)
    within = 0
    for _ in range(200):
        draw = torch.randn(25, generator=generator, dtype=torch.float64)
        zero = torch.zeros_like(draw)
        totals = {"case": zero - draw, "forty_ms alone": zero, "forty_ms_too alone": zero}
        row = suite._row(variant, {"case": measured}, totals, 25)
        within += abs(row.overlapped) <= row.noise
    assert 170 <= within <= 199


class Late:
    """Stands for DeviceToHost, and logs the wait."""

    log: list[str]

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self.log.append("started")

    def lazy(self) -> Late:
        return self

    def __int__(self) -> int:
        self.log.append("waited")
        return int(self.source)


def test_a_check_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    Late.log = []
    monkeypatch.setattr(case_call, "DeviceToHost", Late)
    call = CaseCall(keep=False)
    call.check(torch.tensor([1, 2, 3]), torch.tensor([1, 3, 2]))
    call.check(torch.tensor([1]), torch.tensor([1]))
    assert Late.log == ["started", "started"] and call.wrong == 0
    call.finish()
    assert call.wrong == 2 and call.wrong_text() == "2 elements are not in their place"
    assert Late.log == ["started", "started", "waited", "waited"]


def order_of_two_groups(rank: int) -> list[str]:
    log: list[str] = []
    start, start_sum = SuiteData.start, SuiteData.start_sum
    logged = mock.patch.multiple(
        SuiteData,
        start=lambda *args: log.append("all_to_all") or start(*args),  # type: ignore[func-returns-value]
        start_sum=lambda *args: log.append("all_reduce") or start_sum(*args),  # type: ignore[func-returns-value]
    )
    data = SuiteData(SuiteSize(DIM, 1, "float32"), torch.device("cpu"))
    with logged:
        data.encode(LARGEST, 0)
        call = CaseCall(keep=True)
        next(variant for variant in VARIANTS if variant.case == "two-groups").run(data, call)
        call.finish()
    data.close()
    assert call.wrong == 0
    return log


def test_two_groups_are_used_in_opposite_order(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(order_of_two_groups) == [["all_to_all", "all_reduce"], ["all_reduce", "all_to_all"]]


def test_the_parts_of_a_case_are_named_and_run_once() -> None:
    runs = suite._runs(VARIANTS)
    assert runs["compute alone"] is parts.compute and runs["all_to_all alone"] is parts.all_to_all
    assert len(runs) == len(VARIANTS) + len({part for v in VARIANTS for part in (v.compute, v.communication)})
