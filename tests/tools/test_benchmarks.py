"""The benches through their own main: what they check, compute and write. Figures of such sizes mean nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from benchmarks import (
    compile_time,
    model_blocks,
    ops,
    parallel_styles,
    start_program,
    tensor_parallel_mlp,
    ulysses_block,
    uneven,
)
from benchmarks.common import Goal
from fusedcomm.bench import op_programs
from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.bench.rank_barrier import rank_barrier
from fusedcomm.testing import RankPool
from tests.helpers.block_checks import interpreted, no_latency

SHAPE = ("--shape", "36", "16", "24")
FEW = ("--rounds", "2")


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
    file = tmp_path / "bench.json"
    options = {"forward": [], "batch": ["--batch", "2"]}.get(mode, [f"--{mode}"])
    assert ops.main([op, *SHAPE, *FEW, *options, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
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
    printed = capsys.readouterr().out
    assert str(Goal(**mean)) in printed and report["huge_pages"] is False and "pages: torch's default" in printed


@pytest.mark.usefixtures("shared_ranks")
def test_ops_are_measured_in_the_order_in_which_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["matmul_all_reduce", "all_gather_matmul"]
    assert ops.main([*names, *SHAPE, *FEW, "--decode", "--dtype", "float32"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line in PROGRAMS] == names


def test_a_file_holds_the_figures_of_one_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ops.parse(["--json", str(tmp_path / "bench.json")])
    assert f"holds the figures of one op: name it, got {', '.join(PROGRAMS)}" in capsys.readouterr().err


UNEVEN = ["--tokens", "37", "--heads", "5", "--kv-heads", "1", "--head-dim", "4", "--hidden", "8", "--dtype", "float32"]


@pytest.mark.usefixtures("shared_ranks")
def test_uneven_sizes_are_measured_beside_padded_ones(tmp_path: Path) -> None:
    """Values are checked first: those of plain collectives, too, which pad and slice."""
    file = tmp_path / "bench.json"
    options = ["--ranks", "3", "--splits", "2", "30", "5", "--backward", "--rounds", "3", "--json", str(file)]
    assert uneven.main([*UNEVEN, *options]) == 0
    report = json.loads(file.read_text())
    assert [row["program"] for row in report["rows"]] == ["q", "kv", "out"] and len(report["goals"]) == 9
    assert all(each["median"] > 0 for row in report["rows"] for each in row["times"].values())
    assert all(row["cost"]["low"] <= row["cost"]["median"] <= row["cost"]["high"] for row in report["rows"])
    assert (report["ranks"], report["backward"]) == (3, True)


def test_splits_must_be_those_of_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert uneven.main([*UNEVEN, "--splits", "30", "6"]) == 2
    assert "--splits must be 2 sizes that add up to --tokens 37" in capsys.readouterr().err


@pytest.mark.usefixtures("shared_ranks")
def test_styles_are_measured_beside_torchs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    sizes = ["--batch", "1", "--tokens", "4", "--hidden", "16", "--head_dim", "4", "--intermediate", "8"]
    options = ["--rounds", "3", "--dtype", "float32", "--json", str(file)]
    assert parallel_styles.main([*sizes, *options]) == 0
    report, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert [row["model"] for row in report["rows"]] == list(parallel_styles.MODELS)
    assert all(list(row["times"]) == ["removed", "torch", "fused"] for row in report["rows"])
    for row, goal in zip(report["rows"], report["goals"], strict=True):
        assert goal["value"] == row["torch_over_fused"]["median"]
        assert goal["met"] == (goal["value"] >= parallel_styles.FASTER[row["model"]])
        assert str(Goal(**goal)) in printed


@pytest.mark.usefixtures("shared_ranks")
@pytest.mark.parametrize("module", [ulysses_block, tensor_parallel_mlp], ids=lambda module: module.__name__)
def test_a_block_bench_writes_what_it_prints(module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    sizes = ("--batch", "2", "--tokens", "6", "--hidden", "64")
    assert module.main([*sizes, *FEW, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["sizes"]["tokens"] == 6
    for row, goal in zip(report["rows"], report["goals"], strict=True):
        assert goal["value"] == row["gain"]
    assert str(Goal(**goal)) in capsys.readouterr().out


class WrongOnRank1(op_programs.AllGatherMatmul):
    def ours(self, x: Tensor, w: Tensor) -> Tensor:
        y = super().ours(x, w)
        y[3, 2] += dist.get_rank()
        return y


@pytest.mark.usefixtures("shared_ranks")
def test_wrong_values_are_not_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, bench = tmp_path / "bench.json", WrongOnRank1()
    assert ops.run(bench, ops.parse([bench.op, *SHAPE, *FEW, "--json", str(file)])) == 1
    expected = "'auto' gave wrong values: rank 1: result: 1 of 864 elements, first at [3, 2]"
    assert expected in capsys.readouterr().err
    assert not file.exists()


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
    file = tmp_path / "bench.json"
    assert start_program.main([*PROGRAM, *FEW, "--dtype", "bfloat16", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    (row,) = report["rows"]
    assert row["fused"] == report["sizes"]["pairs"] == 2
    assert list(row["times"]) == ["roof", "plain", "exchange", "compiled", "op"]
    faster, not_slower = report["goals"]
    assert faster["value"] == row["plain_over_compiled"]["median"] and faster["met"] == (faster["value"] >= 1.3)
    assert not_slower["value"] == row["op_over_compiled"]["median"]
    assert str(Goal(**faster)) in capsys.readouterr().out


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
    file = tmp_path / "bench.json"
    sizes = ("--layers", "1", "2", "--whole", "2", "--tokens-dim", "0")
    assert compile_time.main([*sizes, *FEW, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    one, two = report["pass"]
    for row in (one, two):
        assert row["collectives"] == row["fused"] == 8 * row["layers"]
    whole = report["compile"]
    assert whole["layers"] == 2 and whole["fused"] == two["fused"] and 0 < whole["in_pass"] < whole["compiled"]
    growth, share = report["goals"]
    assert growth["value"] == pytest.approx(two["ms_per_layer"] / one["ms_per_layer"])
    assert share["value"] == pytest.approx(100 * whole["in_pass"] / (whole["compiled"] - whole["in_pass"]))
    printed = capsys.readouterr().out
    assert all(str(Goal(**goal)) in printed for goal in (growth, share))
    assert not dist.is_initialized()
