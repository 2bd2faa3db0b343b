"""`fusedcomm bench`: what it checks, computes and writes. Figures of such sizes mean nothing."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench import bench_plain as plain
from fusedcomm.bench import common, decode, overhead, start_program, timing
from fusedcomm.bench.measure import Options, measure_op
from fusedcomm.bench.op_bench import PROGRAMS
from fusedcomm.bench.overhead import CallRow, measure_overhead
from fusedcomm.bench.scaled_bench import BENCHES
from fusedcomm.bench.timing import Timing, ValuesDiffer, measure
from fusedcomm.launch import world
from fusedcomm.memory import captures
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.testing import RankPool
from fusedcomm.tools import main
from tests.helpers.block_checks import interpreted
from tests.helpers.on_ranks import on_ranks

SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "bench.json").read_text())
SHAPE = ("--shape", "36", "16", "24")
FEW = ("--rounds", "2", "--warmup", "1")
SIZE = MatmulSize(36, 16, 24)
ONE_ROUND = Options("cpu", rounds=1, warmup=1, check=False, graph=False)


def bench(tmp_path: Path, *options: str) -> dict[str, Any]:
    file = tmp_path / "bench.json"
    assert main(["bench", *options, *FEW, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    jsonschema.validate(report, SCHEMA)
    return report


@pytest.mark.usefixtures("shared_ranks")
@pytest.mark.parametrize("op", PROGRAMS)
def test_every_figure_follows_from_the_times(op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directions, algorithms = ["forward", "backward", "both"], ["auto", "unfused"]
    options = [op, *SHAPE, "--pass", *directions, "--algorithm", *algorithms, "--dtype", "bfloat16", "--check"]
    rows = bench(tmp_path, *options)["rows"]
    assert [(row["direction"], row["algorithm"]) for row in rows] == [(d, a) for d in directions for a in algorithms]
    assert {row["planned"] for row in rows if row["algorithm"] == "unfused"} == {"unfused"}
    exchanged = 36 * (16 if PROGRAMS[op].gathers else 24) * 2  # bfloat16
    for row in rows:
        roof, collective, baseline, ours = (row[name]["median"] for name in ("roof", "collective", "baseline", "ours"))
        matmuls = {"forward": 1, "backward": 2, "both": 3}[row["direction"]]
        exchanges = {"forward": 1, "backward": 1, "both": 2}[row["direction"]]
        if op == "matmul_all_reduce" and row["direction"] != "forward":
            exchanges -= 1
        assert row["num_bytes"] == exchanged * exchanges
        assert row["flops"] == 2 * 36 * 16 * 24 * matmuls
        assert row["ratio"] == pytest.approx(baseline / ours)
        assert row["percent_over_roof"] == pytest.approx((ours - roof) / roof * 100)
        assert row["exposed"] == pytest.approx(ours - roof)
        if exchanges:
            assert row["overlap_efficiency"] == pytest.approx((roof + collective - ours) / min(roof, collective))
        else:  # there is nothing that could be hidden
            assert row["overlap_efficiency"] is None and collective == 0
        assert row["tflops"] == pytest.approx(row["flops"] / ours * 1e-12)
        assert row["algbw"] == pytest.approx(row["num_bytes"] / ours * 1e-9)
        assert row["busbw"] == pytest.approx(row["algbw"] * (1.0 if op == "matmul_all_reduce" else 0.5))
    assert f"{rows[0]['ratio']:.2f}" in capsys.readouterr().out


@pytest.mark.usefixtures("shared_ranks")
def test_files_of_all_ops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    report = bench(tmp_path, "ops", *SHAPE, "--trace", str(trace))
    assert {row["dtype"] for row in report["rows"]} == {"float32"}  # by default, on CPUs
    assert [row["op"] for row in report["rows"]] == list(PROGRAMS)
    assert [line["op"] for line in report["summary"]] == list(PROGRAMS)
    assert report["summary"][0]["speedup_minimum"] == pytest.approx(report["rows"][0]["ratio"])
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {f"fusedcomm::{op}" for op in PROGRAMS} <= names
    assert capsys.readouterr().err == ""  # no progress bar: this is no terminal


@pytest.mark.usefixtures("shared_ranks")
def test_sizes_in_bytes_are_of_what_is_exchanged(tmp_path: Path) -> None:
    sweep = ("-b", "4K", "-e", "20K", "-f", "2")
    rows = bench(tmp_path, "all_gather_matmul", *sweep, "-K", "64", "-N", "8", "--dtype", "float32")["rows"]
    assert [(row["num_bytes"], row["rows"]) for row in rows] == [(4096, 16), (8192, 32), (16384, 64)]
    options = ("-b", "6000", "-e", "12K", "-f", "2", "-K", "8", "-N", "64", "--dtype", "float32")
    rows = bench(tmp_path, "matmul_all_to_all", *options)["rows"]
    assert [row["num_bytes"] for row in rows] == [5888, 11776]


class LastElementWrong(type(PROGRAMS["all_gather_matmul"])):  # type: ignore[misc]
    """The last element is wrong on rank 1, from the ``first`` call on."""

    def __init__(self, first: int) -> None:
        self.first, self.calls = first, 0

    def ours(self, x: Tensor, w: Tensor) -> Tensor:
        y = super().ours(x, w).clone()
        self.calls += 1
        if dist.get_rank() == 1 and self.calls >= self.first:
            y.view(-1)[-1] += 1
        return y


class CollectiveWrong(type(PROGRAMS["matmul_reduce_scatter"])):  # type: ignore[misc]
    def collective(self, t: Tensor) -> Tensor:
        return super().collective(t) * 2


def measure_planted(rank: int, planted: Any, options: Options, direction: str = "forward") -> Any:
    with mock.patch.dict(BENCHES, {planted.op: planted}):
        try:
            (row,) = measure_op(rank, planted.op, SIZE, "float32", direction, options)
        except ValuesDiffer as error:
            return str(error)
    return row.ratio


def test_a_wrong_value_stops_all_ranks_before_timing(ranks: Callable[[int], RankPool]) -> None:
    texts = ranks(2).run(measure_planted, LastElementWrong(first=1), ONE_ROUND, "both")
    assert texts[0] == texts[1]
    assert texts[0].startswith("'auto' gave wrong values: rank 1: result: 1 of 864 elements, first at [35, 23]")
    texts = ranks(2).run(measure_planted, CollectiveWrong(), ONE_ROUND)
    assert "gave wrong values: rank 0: result" in texts[0]


def test_a_late_wrong_value_is_found_by_check(ranks: Callable[[int], RankPool]) -> None:
    planted = LastElementWrong(first=4)  # the first two are checked anyway, one is for warm-up
    checked = Options("cpu", rounds=2, warmup=1, check=True, graph=False)
    text = ranks(2).run(measure_planted, planted, checked)[0]
    assert text.startswith("wrong values: rank 1: 'auto' in round 2: result: 1 of 864 elements")
    ratio = ranks(2).run(measure_planted, planted, Options("cpu", rounds=2, warmup=1, check=False, graph=False))[0]
    assert isinstance(ratio, float)  # the control: without --check it is not noticed


def test_a_backward_alone_is_not_captured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(world, "missing_gpus", lambda world_size: None)
    assert main(["bench", "ops", "--graph", "--device", "cuda", "--pass", "forward", "backward"]) == 2
    assert "--graph captures a forward, alone or with its backward" in capsys.readouterr().err


def measure_replays(rank: int, op: str) -> int:
    """A replay runs the kernels of its program again."""

    def captured(variant: Callable[[], Any]) -> Callable[[], Any]:
        variant()
        return variant

    with mock.patch("fusedcomm.bench.measure.captured", captured):
        return len(measure_op(rank, op, SIZE, "float32", "forward", replace(ONE_ROUND, graph=True)))


def test_replays_find_the_inputs_of_the_first_call(ranks: Callable[[int], RankPool]) -> None:
    assert [ranks(2).run(measure_replays, op) for op in ("matmul_all_reduce", "matmul_all_to_all")] == [[1, 1]] * 2


# The clock of all benches: wrong values stop every rank, times are the slowest rank's.
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


def test_a_gpu_pauses_until_all_calls_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(timing, "L2_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    for name in ("cuda.Event", "cuda.synchronize", "distributed.barrier", "distributed.all_reduce"):
        monkeypatch.setattr(f"torch.{name}", mock.MagicMock())

    def rounds(timed: dict[str, Any], device: torch.device, calls: int = 1, **options: Any) -> dict[str, Any]:
        timing._CudaClock(device, calls)(timed["x"])
        return {}

    monkeypatch.setattr(common, "measure_rounds", rounds)
    common.rounds_of_one({"x": bool}, 64 << 10, CPU, 1)
    assert slept == [64 * timing.SKEW_CYCLES]


# `fusedcomm bench plain` and `decode`: values are checked, and every row has its figures.
@pytest.mark.usefixtures("shared_ranks")
def test_every_op_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plain.json"
    assert main(["bench", "plain", *["--device", "cpu", "--bytes", "4.01K", "--rounds", "2", "--json"], str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {(row["dtype"], row["num_bytes"]) for row in rows} == {("float32", 4104)}
    assert [row["op"] for row in rows] == list(plain.CALLS)
    for row in rows:
        assert row["ratio"] == row["ours"]["median"] / row["backend"]["median"] and row["op"] in row["plan"]
        assert row["op"] in capsys.readouterr().out or row is not rows[0]


@on_ranks(2)
def test_wrong_values_are_found(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValuesDiffer, match="rank 1"):
        patch.setitem(plain.CALLS, "all_reduce", (fusedcomm.all_reduce, lambda x: fusedcomm.all_reduce(x) + rank))
        plain.measure_plain(rank, "all_reduce", 64, "float32", "cpu", 1)
    assert torch.equal(fusedcomm.all_reduce(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.usefixtures("shared_ranks")
def test_moe_has_a_row(tmp_path: Path) -> None:
    file = tmp_path / "moe.json"
    sizes = ("--tokens", "8", "--hidden", "4", "--rounds", "2")
    assert main(["bench", "moe", *sizes, "--dtype", "float32", "bfloat16", "--json", str(file)]) == 0
    for row in json.loads(file.read_text())["rows"]:
        assert row["tokens"] == 8 and row["ratio"] == row["ours"]["median"] / row["today"]["median"]


@pytest.mark.usefixtures("shared_ranks")
def test_decode_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "decode.json"
    sizes = ("--rows", "512", "600", "--hidden", "4096", "--K", "4", "--rounds", "1")  # of which one call is measured
    assert main(["bench", "decode", *sizes, "--json", str(file)]) == 0
    rows, printed = json.loads(file.read_text())["rows"], capsys.readouterr().out
    assert [(row["dtype"], row["rows"]) for row in rows] == [("float32", 512), ("float32", 600)]
    for row in rows:
        times = {name: timing["median"] for name, timing in row["times"].items()}
        assert row["tail_ratio"]["median"] == pytest.approx(times["tail"] / times["unfused tail"])
        assert row["ratio"]["median"] == pytest.approx(times["fused"] / times["unfused"])
        above = times["fused"] - times["matmul"]
        assert row["exposed_ratio"]["median"] == pytest.approx(above / times["unfused tail"], abs=1e-6)
        assert f"{row['tail_ratio']['median']:.2f}" in printed
        assert row["plan"].startswith("matmul_all_reduce_norm: chunked")


@on_ranks(2)
@pytest.mark.parametrize("result", [0, 1])
def test_wrong_values_of_a_tail_are_found(rank: int, result: int) -> None:
    call = fusedcomm.all_reduce_norm

    def wrong(*args: torch.Tensor) -> list[torch.Tensor]:
        return [each + rank * (i == result) for i, each in enumerate(call(*args))]

    with mock.patch.object(fusedcomm, "all_reduce_norm", wrong), pytest.raises(ValuesDiffer, match="rank 1"):
        decode.measure_decode(rank, 2, 8, 4, "float32", "cpu", 1)


@on_ranks(2)
def test_decode_on_gpus_checks_its_replays_and_explains_their_plan(rank: int) -> None:
    gpu, explain = world.rank_device("cpu"), fusedcomm.explain
    explained: list[int] = []

    def plan(*args: Any) -> fusedcomm.Plan:
        explained.append(captures._warm_ups)
        return explain(*args)

    def wrong(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: [each + rank for each in call()]

    with (
        mock.patch.object(world, "rank_device", lambda device_type: gpu),
        mock.patch.object(fusedcomm, "explain", plan),
        mock.patch.object(decode, "captured", lambda call: call),
    ):
        decode.measure_decode(rank, 2, 8, 4, "float32", "cuda", 1)
        assert explained == [1]
        with mock.patch.object(decode, "captured", wrong), pytest.raises(ValuesDiffer, match="rank 1"):
            decode.measure_decode(rank, 2, 8, 4, "float32", "cuda", 1)


def without_code() -> Any:
    """Inside, graphs are run op by op: Inductor's code takes long to compile."""
    compile_ = torch.compile
    return mock.patch.object(torch, "compile", lambda fn, **options: compile_(fn, backend=interpreted, **options))


PROGRAM = ("--pairs", "2", "--tokens", "6", "--k", "8", "--n", "32", "--heads", "4", "--rounds", "2")


def measure_an_interpreted_program(rank: int, *arguments: Any) -> start_program.ProgramRow:
    with without_code():
        return start_program.measure_program(rank, *arguments)


@pytest.mark.nightly
@pytest.mark.usefixtures("shared_ranks")
def test_the_bench_of_the_start_program_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start_program, "measure_program", measure_an_interpreted_program)
    file = tmp_path / "program.json"
    assert start_program.main([*PROGRAM, "--dtype", "bfloat16", "--json", str(file)]) == 0
    report, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert report["goals"] and all(str(start_program.Goal(**goal)) in printed for goal in report["goals"])
    (row,) = report["rows"]
    assert row["fused"] == report["sizes"]["pairs"] == 2
    assert list(row["times"]) == ["roof", "plain", "exchange", "compiled", "op"]
    faster, not_slower = report["goals"]
    assert faster["value"] == row["plain_over_compiled"]["median"] and faster["met"] == (faster["value"] >= 1.3)
    assert not_slower["value"] == row["op_over_compiled"]["median"]


def test_a_start_program_on_gpus_says_nothing_of_cpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ratio = common.Ratio(1.5, 1.4, 1.6)
    row = mock.Mock(dtype="bfloat16", plain_over_compiled=ratio, op_over_compiled=ratio)
    monkeypatch.setattr(world, "asked_for", lambda args: ("cuda", 2, None))
    monkeypatch.setattr(common, "run_cases", lambda *args: args[-1]([row])["goals"])
    assert start_program.main([]) == [] and "CPU" not in capsys.readouterr().out
    monkeypatch.setattr(world, "asked_for", lambda args: ("cpu", 2, None))
    assert len(start_program.main([])) == 2 and "goal on CPU" in capsys.readouterr().out  # type: ignore[arg-type]


# `fusedcomm bench overhead`: planted costs are found where they belong.
OP = "matmul_all_to_all"
PLANTED_S = 0.05
FEW_CALLS = {"WARMUP": 0, "HOT_CALLS": 3, "WARM_CALLS": 1, "COLD_CALLS": 2, "LAST_CALLS": 2}


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_ranks")
def test_every_figure_of_overhead_follows_from_the_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directions = ["forward", "both"]
    file = tmp_path / "overhead.json"
    options = ["--op", OP, "--pass", *directions, "--rounds", "1", "--json", str(file)]
    assert main(["bench", "overhead", *options]) == 0
    report = json.loads(file.read_text())
    assert {row["op"] for row in report["rows"]} == {OP} and report["counts"]["HOT_CALLS"] == overhead.HOT_CALLS
    for direction in directions:
        calls = {row["name"]: row for row in report["rows"] if row["direction"] == direction}
        assert list(calls) == ["torch.mm", "empty op", "baseline", "unfused", "chunked"]
        for call in calls.values():
            assert call["over_baseline"] == pytest.approx(call["hot"]["median"] / calls["baseline"]["hot"]["median"])
            assert call["cpu_over_empty"] == pytest.approx(call["cpu"]["median"] / calls["empty op"]["cpu"]["median"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and any("docs/benchmark.md explains each" in line for line in lines)


def slow_op(*args: Any) -> Tensor:
    time.sleep(PLANTED_S)
    return torch.ops.fusedcomm.matmul_all_to_all(
        *args[:2], None, None, *args[2:], *[None] * 5, dist.get_world_size(), dist.group.WORLD.group_name
    )


def planted_overhead(rank: int) -> list[CallRow]:
    with mock.patch.dict(vars(overhead), FEW_CALLS), mock.patch.object(fusedcomm, OP, slow_op):
        return measure_overhead(rank, OP, "forward", "cpu", rounds=1)


def test_a_planted_delay_of_the_op_is_no_cpu_time(ranks: Callable[[int], RankPool]) -> None:
    (chunked,) = (row for row in ranks(2).run(planted_overhead)[0] if row.name == "chunked")
    assert min(chunked.hot.median, chunked.cold.median) >= PLANTED_S > chunked.cpu.median  # asleep
