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

import fusedcomm
from benchmarks import (
    block,
    compile_time,
    model_blocks,
    ops,
    parallel_styles,
    start_program,
    tensor_parallel_mlp,
    ulysses_block,
    uneven,
)
from benchmarks.common import Goal, PairedRatio
from fusedcomm.bench import op_programs
from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.bench.rank_barrier import rank_barrier
from fusedcomm.bench.timing import Timing
from fusedcomm.ops.whole_group import MatmulSize
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


def test_an_interval_is_that_of_the_median_and_not_of_rounds() -> None:
    """One round in five is twice as slow: the median of 101 rounds is known all the same."""
    ours = torch.ones(101, dtype=torch.float64)
    theirs = torch.where(torch.arange(101) % 5 == 0, 2.0, 1.0).double() * torch.linspace(0.99, 1.01, 101).double()
    ratio = PairedRatio.of(theirs, ours)
    assert 0.99 < ratio.low <= ratio.median <= ratio.high < 1.02


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


def test_what_is_no_op_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ops.parse(["matmul"])
    assert f"must be one of {', '.join(PROGRAMS)}, got 'matmul'" in capsys.readouterr().err


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


def test_the_gain_of_a_block_is_of_differences_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences are taken within rounds, so a slow moment that meets a whole round does not count."""
    slow = torch.tensor([0.0, 50.0, 0.0, 7.0, 0.0], dtype=torch.float64)
    seconds = {"baseline": 2.0 + slow, "ours": 1.2 + slow, "bound": 1.0 + slow}
    monkeypatch.setattr(block, "BlockData", MagicMock())
    monkeypatch.setattr(block, "check_values", lambda *args: None)
    monkeypatch.setattr(block, "measure_rounds", lambda *args, **options: seconds)
    row = block.measure_block(0, ulysses_block.UlyssesBlock(), "float32", "cpu", 5)
    assert row.gain == pytest.approx(0.8)
    assert row.drawn_anew == pytest.approx((0.8, 0.8)) and row.single_rounds == pytest.approx((0.8, 0.8))


class WrongOnRank1(op_programs.AllGatherMatmul):
    def ours(self, x: Tensor, w: Tensor) -> Tensor:
        y = super().ours(x, w)
        y[3, 2] += dist.get_rank()
        return y


class WrongBaseline(op_programs.MatmulReduceScatter):
    def baseline(self, x: Tensor, w: Tensor) -> Tensor:
        return super().baseline(x, w) * 2


class WrongGrad(op_programs.MatmulAllReduce):
    def ours(self, x: Tensor, w: Tensor) -> Tensor:
        return fusedcomm.matmul_all_reduce(x, w.detach() + (w - w.detach()) * 2)


@pytest.mark.usefixtures("shared_ranks")
@pytest.mark.parametrize(
    ("bench", "options", "text"),
    [
        (WrongOnRank1(), (), "'auto' gave wrong values: rank 1: result: 1 of 864 elements, first at [3, 2]"),
        (WrongBaseline(), (), "'baseline' gave wrong values: rank 0: result"),
        (WrongGrad(), ("--backward",), "'auto' gave wrong values: rank 0: grad w"),
    ],
)
def test_wrong_values_are_not_timed(
    bench: Any, options: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    assert ops.run(bench, ops.parse([bench.op, *SHAPE, *FEW, *options, "--json", str(file)])) == 1
    assert text in capsys.readouterr().err
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


def test_what_is_compiled_is_not_what_was_compiled_before() -> None:
    """Dynamo keeps compiled code by code object, so the variants must not share one."""
    program = start_program.matmul_and_reshard_heads
    copies = [start_program.same_program(program) for _ in range(2)]
    assert len({id(each.__code__) for each in (program, *copies)}) == 3
    assert all(each.__code__.co_code == program.__code__.co_code for each in copies)


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


def test_ragged_sizes_are_divisible_where_the_group_divides() -> None:
    aligned = MatmulSize(2048, 1024, 2048)
    for bench in PROGRAMS.values():
        for size in bench.ragged(aligned, 4):
            assert size != aligned and size == bench.divisible(size, 4)
            assert bench.cut is None or getattr(size, bench.cut) % 4 == 0
    assert PROGRAMS["matmul_all_reduce"].ragged(aligned, 4)[-1] == MatmulSize(2049, 1021, 2045)
    assert PROGRAMS["all_gather_matmul"].divisible(MatmulSize(2500, 8, 8, batch=2), 8) == MatmulSize(
        2512, 8, 8, batch=2
    )


def test_goals_are_of_the_mode_and_the_worst_case_counts() -> None:
    bench = PROGRAMS["matmul_all_to_all"]

    def row(baseline: float, auto: float) -> ops.SizeRow:
        times = {name: Timing(t, t, t, t, 0.0) for name, t in (("roof", 1.0), ("baseline", baseline), ("auto", auto))}
        return ops.SizeRow(8, 8, 8, "float32", "chunked", times)

    rows = [row(4.0, 1.0), row(1.0, 1.0)]
    mean, worst, roof = ops.summary(bench, rows, [], "forward")
    assert (mean.value, worst.value, roof.value) == (2.0, 1.0, 1.0)
    assert mean.met and worst.met and roof.met
    mean, worst = ops.summary(bench, [*rows, row(0.9, 1.0)], [], "decode")
    assert mean.bound is None and worst.met is False
    assert all(goal.met is None for goal in ops.summary(bench, rows, [], "backward"))
