"""bench/gpu_check without a GPU: its driver with parts that go wrong, and the parts in Triton's interpreter."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedcomm
from fusedcomm.bench import launch_now
from fusedcomm.bench.gpu_check import (
    check_parts,
    child,
    commands,
    compile_kernels,
    driver,
    kernel_speed,
    pools,
    processes,
    results,
    speeds,
)
from fusedcomm.bench.gpu_check.__main__ import main
from fusedcomm.bench.gpu_check.check_parts import PARTS
from fusedcomm.bench.gpu_check.driver import Part, PartResult, run_parts
from fusedcomm.bench.gpu_check.gpu_calls import OPS, SMALL
from fusedcomm.launch.ranks import RankError, RankFailure
from tests.helpers.broken_parts import FAULTS
from tests.helpers.tiers import nightly_but
from tests.helpers.waiting import is_alive

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CASE_S = 4.0
OF_THE_CHECK = {"FUSEDCOMM_TIMEOUT_S", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"}
WHERE = {  # what a part's problem says
    "hang": f"killed in hang: it took longer than {CASE_S:g} s",
    "crash": "killed in crash by SIGSEGV",
    "half_a_line": 'wrote what is no report: {"case": "half_a_line", "ok": true',
}


def broken(kind: str, folder: Path, limit_s: float = 20) -> Part:
    return Part(kind, "tests.helpers.broken_parts", limit_s, CASE_S, (kind, str(folder)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "TRACE_S", 0.2)
    monkeypatch.setattr(driver, "LOOK_S", 0.02)


def run(*asked: Part, budget_s: float = 60) -> tuple[list[PartResult], list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []
    return run_parts(asked, "cpu", budget_s, lines.append), lines


def leftover(folder: Path) -> int | None:
    """The process that the part had started, if it lives; it is ended here."""
    pid = int((folder / "pid").read_text())
    deadline = time.monotonic() + 1
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    if not is_alive(pid):
        return None
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.parametrize("kind", nightly_but(["crash", "hang", "half_a_line"], FAULTS))
def test_a_part_that_goes_wrong_loses_one_case(kind: str, quick: None, tmp_path: Path) -> None:
    """A new process runs the cases behind it, and the next part runs."""
    (result, after), lines = run(broken(kind, tmp_path), broken("good", tmp_path))
    assert (result.status, after.status) == ("failed", "passed")
    assert result.names == ["first", kind, "last"] and not result.not_run
    assert result.failed == [kind]
    assert result.cases["first"]["found"] == result.cases["last"]["found"] == {"answer": 42}
    assert WHERE.get(kind, "") in "\n".join(result.problems)
    assert bool(result.problems) == (kind != "poison")  # which has said itself what is wrong
    named = [(line["part"], line.get("case")) for line in lines]
    of_part = [(kind, "first"), (kind, kind), (kind, "last"), (kind, None)]
    assert named == [*of_part, *(("good", case) for case in ("first", "good", "last", None))]
    if kind == "hang":
        assert leftover(tmp_path) is None


def test_a_part_that_fails_behind_its_last_case_has_failed(quick: None, tmp_path: Path) -> None:
    ((result,), _) = run(broken("unfinished", tmp_path))
    assert result.status == "failed" and result.problems == ["ended with 3 behind its last case"]


def test_a_plan_whose_proof_has_failed_is_a_failure() -> None:
    text = "chunked of bfloat16 failed its proof on a GPU: rank 0 ..."
    processes.proved(fusedcomm.Plan(OPS[0], "unfused", "estimated 1 us, default numbers"))
    with pytest.raises(AssertionError, match=text.partition(":")[0]):
        processes.proved(fusedcomm.Plan(OPS[0], "unfused", text))


def test_a_part_that_names_no_case_is_not_started_again(quick: None, tmp_path: Path) -> None:
    ((result,), _) = run(dataclasses.replace(broken("mute", tmp_path), case_s=20))
    assert result.status == "failed" and result.problems == ["ended with 3 and named no case"]


def module_of(part: Part) -> Any:
    return importlib.import_module(f"fusedcomm.bench.gpu_check.{part.arguments[0]}")


def names_on_a_gpu() -> Iterator[str]:
    for part in PARTS:
        yield from (f"{part.name}/{name}" for name in module_of(part).cases(torch.device("cuda"), *part.arguments[1:]))


def test_every_case_of_a_part_has_a_name_of_its_own() -> None:
    """They are named without a GPU. A case belongs to the part that has its name."""
    names = [*names_on_a_gpu()]
    assert len(names) > 250 and len(set(names)) == len(names)


def test_the_halves_fit_and_their_parts_are_modules() -> None:
    assert check_parts.budget_s(check_parts.asked(["right", "fast"], "cuda"), "cuda") <= 760
    for name, half in check_parts.HALVES.items():
        assert check_parts.asked([name], "cuda") == half
        assert check_parts.budget_s(half, "cuda") == check_parts.HALF_S == 380
        assert half[0].name == "machine" and half[1].name == f"compile {name}"
        for part in half:
            assert part.case_s <= part.limit_s < check_parts.HALF_S


def test_the_committed_result_fills_every_row_of_speeds_and_finds_what_is_worse(tmp_path: Path) -> None:
    """The last result of a case counts, for each GPU model."""
    names, cases = results.last_cases("NVIDIA H200")
    assert names[0] == "gpu-h200-2026-11-26.json" and cases["processes/2 ranks chunked"]["ok"]
    lines = speeds.lines(results.found_in(cases))
    for row, line in zip(speeds.TABLE, lines, strict=True):
        assert line.startswith(f"{row.name}: ") and line.endswith(f" (goal: {row.goal}; bound: {row.bound})")
    push = "kernel speed/push 8192 x 4096 x 4096"
    recorded = {"gpu": "NVIDIA H200", "run": {"date": "2026-11-28T"}, "cases": {push: cases[push]}}
    assert results.compared(recorded)[-1].endswith("nothing is worse.")
    slow = {"ok": True, "found": {"ratio": 0.9}}
    failing = {"graphs/matmul_all_reduce": {"ok": False}}
    assert results.compared({**recorded, "cases": {push: slow, **failing}})[1:] == [
        "  fails now: graphs/matmul_all_reduce",
        f"  worse: push over cuBLAS: push 8192 x 4096 x 4096: 0.9, was {cases[push]['found']['ratio']:.3g}",
    ]
    assert results.compared(recorded, tmp_path) == ["No committed result of an NVIDIA H200 to compare with."]
    (tmp_path / results.file_name(recorded)).write_text(results.text({**recorded, "cases": {push: slow}}))
    assert results.last_cases("NVIDIA H200", tmp_path) == (["gpu-h200-2026-11-28.json"], {push: slow})
    assert results.last_cases("NVIDIA H100", tmp_path) == ([], {})


class StandInPool:
    """A RankPool without processes."""

    def __init__(self, world_size: int, **options: Any) -> None:
        self.world_size, self.options, self.dead, self.closed = world_size, options, False, False

    def run(self, fn: Any, *args: Any) -> list[Any]:
        return [fn(rank, *args) for rank in range(self.world_size)]

    def close(self) -> None:
        self.closed = True


def lose_the_context(rank: int, device_type: str) -> None:
    raise RankError([RankFailure(rank, "raised", "AcceleratorError", "an illegal instruction was encountered", "")])


def test_ranks_that_lose_their_context_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """So are those with another environment; others are used again."""
    monkeypatch.setattr(pools, "RankPool", StandInPool)
    every: Any = pools.Pools(CPU)
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert every.run(2, lambda rank, device_type: rank + 5, env=env) == 5
    first = every.get(2, env)
    with pytest.raises(RankError, match="illegal instruction"):
        every.run(2, lose_the_context, env=env)
    second = every.get(2, env)
    assert (
        first.closed
        and second is not first
        and second is every.get(2, dict(env))
        and second.options["env"] == pools.ONE_DEVICE | env
    )
    assert every.get(2) is not second and second.closed


def test_a_case_is_reported_before_the_next_begins() -> None:
    lines: list[dict[str, Any]] = []

    def fail() -> None:
        raise ValueError("three")

    def skip() -> None:
        raise child.Skipped("no streams")

    cases: child.Cases = {"one": lambda: 1, "two": skip, "three": fail, "four": lambda: 4}
    assert not child.run(cases, None, CPU, lines.append)
    assert [next(iter(line)) for line in lines] == ["cases", *["begun", "case"] * 4]
    one, two, three, four = lines[2::2]
    assert (one["found"], two["skipped"], four["ok"]) == (1, "no streams", True)
    assert three["error"] == "ValueError: three" and "in fail" in three["traceback"] and not three["poisoned"]
    behind: list[dict[str, Any]] = []
    assert child.run(cases, "three", CPU, behind.append)
    assert behind[0] == lines[0] and [line["case"] for line in behind if "case" in line] == ["four"]


def test_nothing_runs_in_a_lost_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reports the error of a kernel at the next synchronization, and again at each one after it."""

    def lost(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(child, "_synchronize", lost)
    assert not child.run({"one": lambda: 1, "two": lambda: 2}, None, CPU, lines.append)
    assert [line.get("case", line.get("begun")) for line in lines[1:]] == ["one", "one"] and lines[-1]["poisoned"]


def test_the_command_writes_what_it_ran_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "check.jsonl"
    assert main(["--device", "cpu", "--only", "machine", "--json", str(file)]) == 0
    first, case, part, last = map(json.loads, file.read_text().splitlines())
    command = f"python -m fusedcomm.bench.gpu_check --device cpu --only machine --json {file.name}"
    assert first["run"]["command"] == last["summary"]["command"] == command
    found = last["summary"]["machine"]
    assert found == case["found"] and found["versions"]["torch"] == torch.__version__
    assert {"commit", "driver", "cuda_driver", "date", "environment"} <= set(found)
    assert (found["triton_cannot_launch"], part["status"]) == (None, "passed")
    assert "machine: passed" in capsys.readouterr().out


def test_the_doctor_looks_at_one_gpu_in_the_environment_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**dict.fromkeys(OF_THE_CHECK, "1"), "CUDA_VISIBLE_DEVICES": "2,3"}.items():
        monkeypatch.setenv(name, value)
    environments: list[dict[str, str]] = []

    def run(command: list[str], env: dict[str, str] | None = None, **options: Any) -> Any:
        environments.append(env or dict(os.environ))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    commands.doctor()
    assert environments[-1]["CUDA_VISIBLE_DEVICES"] == "2" and not OF_THE_CHECK & environments[-1].keys()


def test_wrong_values_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = launch_now.unpack
    monkeypatch.setattr(launch_now, "unpack", lambda out, *args: (unpack(out, *args), out[0, 0].zero_()))
    with pytest.raises(AssertionError, match="wrong values"):
        kernel_speed.cases(CPU)["unpack"]()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_gpu_check_passes_on_a_cpu(tmp_path: Path) -> None:
    """All parts in their own processes, as far as they run there."""
    file = tmp_path / "check.jsonl"
    command = [sys.executable, "-m", "fusedcomm.bench.gpu_check", "--device", "cpu", "--json", str(file)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1150)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    summary = lines[-1]["summary"]
    assert done.returncode == 0, done.stdout
    assert summary["parts"] == {part.name: "passed" for part in PARTS}
    graphs = [f"graphs/{op}" for op in OPS]
    assert summary["skipped"] == [*graphs, "moe/graph", "commands/DeviceToHost"]
    assert not summary["failed"] and not summary["not_run"]
    found = {(line["part"], line["case"]): line.get("found") for line in lines if "case" in line}
    for half in compile_kernels.JOBS:
        compiled = found[f"compile {half}", f"kernels of {half}"]
        assert compiled["arch"] == 90 and compiled["launches"] > 3
    assert found["kernel speed", f"push {kernel_speed.TINY.name}"]["ratio"] > 0
    assert {op for part, op in found if part == "op speed"} == {*OPS}
    for algorithm in processes.ALGORITHMS:
        assert all(found["processes", f"2 ranks {algorithm}: {case}"]["calls"] for case in SMALL)
    assert all(found["queues", f"1 hardware queues chunked: {op}"]["gradients"] for op in OPS)
    assert found["programs", "compiled chunked"] == {"fused": 2}
    said = "\n".join(summary["speeds"])
    assert all(row.name in said for row in speeds.TABLE)
    (recorded,) = tmp_path.glob("gpu-none-*.json")
    assert len(json.loads(recorded.read_text())["cases"]) == sum("case" in line for line in lines)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_clone_that_is_not_installed_has_it(tmp_path: Path) -> None:
    """A venv that has torch alone: what needs the native part or an installed command is skipped."""
    clone, there = tmp_path / "clone", tmp_path / "venv"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    venv.create(there)
    (purelib,) = there.glob("lib/python*/site-packages")
    (purelib / "torch.pth").write_text(sysconfig.get_path("purelib"))  # torch, but not this checkout
    arguments = f"PYTHON={there / 'bin/python'}", "GPU_CHECK_ARGS=--device cpu --only machine processes commands"
    env = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    done = subprocess.run(["make", "gpu-check", *arguments], cwd=clone, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (clone / "build/gpu-check.jsonl").read_text().splitlines()]
    cases = {f"{line['part']}/{line['case']}": line for line in lines if "case" in line}
    assert all(cases[f"processes/2 ranks unfused: {case}"]["found"]["calls"] for case in SMALL)
    assert "(it was not built)" in cases[f"processes/2 ranks chunked: {SMALL[0]}"]["skipped"]
    assert "is not installed" in cases["commands/doctor"]["skipped"]
