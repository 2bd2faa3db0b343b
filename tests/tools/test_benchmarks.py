"""The benches through their own main: what they check, compute and write. Figures of such sizes mean nothing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fusedcomm.bench import start_program, ulysses_block
from fusedcomm.bench.common import Goal
from tests.helpers.block_checks import interpreted

FEW = ("--rounds", "2")


def report_of(bench: Any, options: Sequence[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """A bench's file. All its goals are printed."""
    file = folder / "bench.json"
    assert bench.main([*options, "--json", str(file)]) == 0
    report, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert report["goals"] and all(str(Goal(**goal)) in printed for goal in report["goals"])
    return report


@pytest.mark.usefixtures("shared_ranks")
def test_the_bench_of_a_block_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batch", "2", "--tokens", "6", "--hidden", "64", *FEW]
    report = report_of(ulysses_block, options, tmp_path, capsys)
    assert report["rounds"] == 2 and report["versions"]["torch"]
    assert [goal["value"] for goal in report["goals"]] == [row["gain"] for row in report["rows"]]


def without_code() -> Any:
    """Inside, graphs are run op by op: Inductor's code takes long to compile."""
    compile_ = torch.compile
    return mock.patch.object(torch, "compile", lambda fn, **options: compile_(fn, backend=interpreted, **options))


PROGRAM = ("--pairs", "2", "--tokens", "6", "--k", "8", "--n", "32", "--heads", "4")


def measure_an_interpreted_program(rank: int, *arguments: Any) -> start_program.ProgramRow:
    with without_code():
        return start_program.measure_program(rank, *arguments)


@pytest.mark.nightly
@pytest.mark.usefixtures("shared_ranks")
def test_the_bench_of_the_start_program_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start_program, "measure_program", measure_an_interpreted_program)
    report = report_of(start_program, [*PROGRAM, *FEW, "--dtype", "bfloat16"], tmp_path, capsys)
    (row,) = report["rows"]
    assert row["fused"] == report["sizes"]["pairs"] == 2
    assert list(row["times"]) == ["roof", "plain", "exchange", "compiled", "op"]
    faster, not_slower = report["goals"]
    assert faster["value"] == row["plain_over_compiled"]["median"] and faster["met"] == (faster["value"] >= 1.3)
    assert not_slower["value"] == row["op_over_compiled"]["median"]
