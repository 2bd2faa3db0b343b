"""The benches through their own main: what they check, compute and write. Figures of such sizes mean nothing."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule

from fusedcomm.bench import (
    compile_time,
    model_blocks,
    ops,
    parallel_styles,
    redistribution,
    start_program,
    tensor_parallel_mlp,
    ulysses_block,
    uneven,
)
from fusedcomm.bench.common import Goal
from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.bench.rank_barrier import rank_barrier
from fusedcomm.testing import RankPool
from tests.helpers.block_checks import interpreted, no_latency

SHAPE = ("--shape", "36", "16", "24")
FEW = ("--rounds", "2")


def report_of(bench: Any, options: Sequence[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """A bench's file. All its goals are printed."""
    file = folder / "bench.json"
    assert bench.main([*options, "--json", str(file)]) == 0
    report, printed = json.loads(file.read_text()), capsys.readouterr().out
    line = redistribution.goal_line if bench is redistribution else str
    assert report["goals"] and all(line(Goal(**goal)) in printed for goal in report["goals"])
    return report


@pytest.mark.usefixtures("shared_ranks")
@pytest.mark.parametrize(
    ("mode", "op"),
    [
        ("forward", "matmul_all_to_all"),
        ("backward", "all_gather_matmul"),
        ("decode", "matmul_all_reduce"),
        ("batch", "all_to_all_matmul"),
    ],
)
def test_an_op_bench_writes_what_it_prints(
    mode: str, op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"forward": [], "batch": ["--batch", "2"]}.get(mode, [f"--{mode}"])
    report = report_of(ops, [op, *SHAPE, *FEW, *options], tmp_path, capsys)
    assert report["op"] == op and report["rounds"] == 2 and report["versions"]["torch"]
    assert [row["dtype"] for row in report["rows"]] == ["float32", "bfloat16"]
    for row in report["rows"]:
        assert row["speedup"] == row["baseline"]["median"] / row["auto"]["median"]
        assert ("chunked" in row and "unfused" in row) == (mode == "decode")
        assert ("over_roof" in row) == (mode != "decode")
    assert len(report["ragged"]) == (8 if mode in ("forward", "batch") else 0)
    goals = {goal["name"]: goal for goal in report["goals"]}
    mean = goals["baseline / fusedcomm, geometric mean"]
    speedups = [row["speedup"] for row in report["rows"]]
    assert mean["value"] == pytest.approx((speedups[0] * speedups[1]) ** 0.5)
    if mode in ("forward", "batch"):
        assert mean["met"] == (mean["value"] >= ops.GOALS[op].mean)
        ragged = goals["ragged / aligned speed of fusedcomm, minimum"]
        assert ragged["value"] == min(each["auto_kept"] for each in report["ragged"])
    assert report["huge_pages"] is False


def test_a_file_holds_the_figures_of_one_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ops.parse(["--json", str(tmp_path / "bench.json")])
    assert f"holds the figures of one op: name it, got {', '.join(PROGRAMS)}" in capsys.readouterr().err


UNEVEN = ["--tokens", "37", "--heads", "5", "--kv-heads", "1", "--head-dim", "4", "--hidden", "8", "--dtype", "float32"]
STYLES = ["--batch", "1", "--tokens", "4", "--hidden", "16", "--head_dim", "4", "--intermediate", "8"]
BLOCK = ["--batch", "2", "--tokens", "6", "--hidden", "64", *FEW]
BENCHES: dict[Any, tuple[list[str], Callable[[Any], float] | None]] = {  # what the goal of a row is about
    uneven: ([*UNEVEN, "--ranks", "3", "--splits", "2", "30", "5", "--backward", "--rounds", "3"], None),
    parallel_styles: ([*STYLES, "--rounds", "3", "--dtype", "float32"], lambda row: row["torch_over_fused"]["median"]),
    ulysses_block: (BLOCK, lambda row: row["gain"]),
    tensor_parallel_mlp: (BLOCK, lambda row: row["gain"]),
    redistribution: (["--quick"], None),
}


@pytest.mark.usefixtures("shared_ranks")
@pytest.mark.parametrize("module", BENCHES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_bench_writes_what_it_prints(
    module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are checked first: those of plain collectives, too, which pad and slice."""
    monkeypatch.setattr(redistribution, "SHAPES", ((8, 16), (5, 3)))
    monkeypatch.setattr(redistribution, "LARGE_SHAPES", ())
    options, about = BENCHES[module]
    report = report_of(module, options, tmp_path, capsys)
    if about is None:
        assert (len(report["rows"]), len(report["goals"])) == {uneven: (3, 9), redistribution: (4, 5)}[module]
    else:
        assert [goal["value"] for goal in report["goals"]] == [about(row) for row in report["rows"]]


def test_splits_must_be_those_of_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert uneven.main([*UNEVEN, "--splits", "30", "6"]) == 2
    assert "--splits must be 2 sizes that add up to --tokens 37" in capsys.readouterr().err


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


STEP = model_blocks.StepSizes(tokens=4, text=4, heads=4, head_dim=8, layers=1)


def measure_an_interpreted_block(rank: int) -> tuple[model_blocks.StepRow, int]:
    """Also how often the ranks have met."""
    barrier = MagicMock(wraps=rank_barrier(torch.device("cpu")))
    with without_code(), no_latency(), mock.patch.object(model_blocks, "rank_barrier", lambda device: barrier):
        return model_blocks.measure_block(rank, "flux_single", STEP, "float32", "cpu", 2), barrier.call_count


@pytest.mark.nightly
def test_the_bench_of_model_blocks_counts_what_is_fused(ranks: Callable[[int], RankPool]) -> None:
    row, num_met = ranks(2).run(measure_an_interpreted_block)[0]
    assert num_met == (1 + 2 + 2) * row.exchanges  # when it is compiled, warm-up, two rounds
    assert (row.exchanges, row.fused) == (8, 8)
    assert list(row.times) == ["bound", "eager", "plain", "unmoved", "compiled"]


def only_passes(gm: GraphModule, inputs: Any, **options: Any) -> None:
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
        post_grad_passes(gm, False)


@pytest.mark.nightly
def test_the_bench_of_compile_time_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_time, "generate_code", only_passes)
    sizes = ("--layers", "1", "2", "--whole", "2", "--tokens-dim", "0")
    report = report_of(compile_time, [*sizes, *FEW], tmp_path, capsys)
    one, two = report["pass"]
    for row in (one, two):
        assert row["collectives"] == row["fused"] == 8 * row["layers"]
    whole = report["compile"]
    assert whole["layers"] == 2 and whole["fused"] == two["fused"] and 0 < whole["in_pass"] < whole["compiled"]
    growth, share = report["goals"]
    assert growth["value"] == pytest.approx(two["ms_per_layer"] / one["ms_per_layer"])
    assert share["value"] == pytest.approx(100 * whole["in_pass"] / (whole["compiled"] - whole["in_pass"]))
    assert not dist.is_initialized()
