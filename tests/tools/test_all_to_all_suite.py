"""`fusedcomm bench all-to-all`: every case, what its checks catch, and how its figures are made."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
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
from fusedcomm.bench.all_to_all import command, parts, suite
from fusedcomm.bench.all_to_all.cases import CASES, VARIANTS, Variant
from fusedcomm.bench.all_to_all.data import LARGEST, SuiteData, SuiteSize, moduli
from fusedcomm.bench.timing import ValuesDiffer
from fusedcomm.launch import world
from fusedcomm.launch.ranks import RankError
from fusedcomm.testing import RankPool
from tests.helpers.tiers import nightly_but

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


CASES_IN_ONE_RUN = nightly_but([(2, "float16")], [(2, "float16"), (3, "bfloat16")])


@pytest.mark.parametrize(("shared_ranks", "dtype"), CASES_IN_ONE_RUN, indirect=["shared_ranks"])
def test_all_cases_in_one_run(
    shared_ranks: int, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "suite.json"
    assert run_suite("--world-size", str(shared_ranks), "--oversubscribe", "--dtype", dtype, "--json", str(file)) == 0
    report = json.loads(file.read_text())
    check_report(report)
    assert [(row["case"], row["variant"]) for row in report["rows"]] == [(each.case, each.kind) for each in VARIANTS]
    assert (report["world_size"], report["dtype"]) == (shared_ranks, dtype)
    assert (report["rounds"], report["dim"]) == (2, DIM)
    printed = capsys.readouterr()
    assert not printed.err and not set("\x1b\r") & set(printed.out)
    assert all(f"\n{variant.name} " in printed.out for variant in VARIANTS)
    assert "plan of fused: matmul_all_to_all: chunked" in printed.out


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


@pytest.mark.parametrize("case", CASES)
def test_two_elements_in_each_others_place_are_caught_where_they_arrive(
    case: str, ranks: Callable[[int], RankPool]
) -> None:
    """Elements LARGEST apart are equal modulo 255, but not modulo 254."""
    name = next(variant.name for variant in VARIANTS if variant.case == case)
    where = 1 if case == "d2h" else 0  # its first variant sends nothing: caught where it is copied
    with pytest.raises(RankError) as caught:
        ranks(2).run(measure_with_two_elements_swapped, case, LARGEST, 0)
    assert {failure.exception_type for failure in caught.value.failures} == {ValuesDiffer.__name__}
    assert f"'{name}' gave wrong values: rank {where}: 2 of {NUMEL} elements, first at" in str(caught.value)


def test_a_wrong_element_in_a_timed_round_is_caught_too(ranks: Callable[[int], RankPool]) -> None:
    num_checks = 4 * len(moduli(2 * NUMEL))  # calls of produce before timing: case and compute, twice per modulus
    with pytest.raises(RankError, match=r"wrong values: rank 0: 'sync' in round 1: 2 elements are not in their place"):
        ranks(2).run(measure_with_two_elements_swapped, "sync", 1, num_checks)


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


def test_what_is_overlapped_is_of_differences_within_rounds() -> None:
    """Differences are taken within rounds, so a slow moment that meets a whole round does not count."""
    variant = Variant("case", "", "about", parts.compute, parts.compute, parts.all_to_all)
    slow = torch.tensor([0.0, 50.0, 0.0, 7.0, 0.0], dtype=torch.float64)
    totals = {"case": 0.9 + 2 * slow, "compute alone": 0.6 + slow, "all_to_all alone": 0.4 + slow}
    measured = mock.Mock(blocked=[], cpu=[])
    measured.median.return_value = 0.3
    row = suite._row(variant, {"case": measured}, totals, 5)
    assert row.overlapped == pytest.approx(0.1) and row.overlapped_share == pytest.approx(0.25)
    assert (row.total.median, row.blocked, row.cpu) == (0.9, 0.3, 0.3)
    assert row.noise == pytest.approx(0) and row.share_limit is None


def test_the_parts_of_a_case_are_named_and_run_once() -> None:
    runs = suite._runs(VARIANTS)
    assert runs["compute alone"] is parts.compute and runs["all_to_all alone"] is parts.all_to_all
    assert len(runs) == len(VARIANTS) + len({part for v in VARIANTS for part in (v.compute, v.communication)})
