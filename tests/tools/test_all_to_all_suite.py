"""`fusedcomm bench all-to-all`: every case, what its checks catch, and how its figures are made."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench import all_to_all
from fusedcomm.bench.all_to_all import suite
from fusedcomm.bench.all_to_all.cases import CASES, VARIANTS
from fusedcomm.bench.all_to_all.data import LARGEST, SuiteData, SuiteSize, moduli
from fusedcomm.bench.timing import ValuesDiffer
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


@pytest.mark.usefixtures("shared_ranks")
def test_all_cases_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "suite.json"
    assert run_suite("--dtype", "float16", "--json", str(file)) == 0
    report = json.loads(file.read_text())
    check_report(report)
    assert [(row["case"], row["variant"]) for row in report["rows"]] == [(each.case, each.kind) for each in VARIANTS]
    assert (report["world_size"], report["dtype"]) == (2, "float16")
    assert (report["rounds"], report["dim"]) == (2, DIM)
    printed = capsys.readouterr()
    assert not printed.err and not set("\x1b\r") & set(printed.out)
    assert all(f"\n{variant.name} " in printed.out for variant in VARIANTS)
    assert "plan of fused: matmul_all_to_all: chunked" in printed.out


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
