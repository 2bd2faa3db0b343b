"""``fusedcomm selftest``: passes here, and fails where something is wrong."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch
from rich.console import Console
from torch import Tensor

import fusedcomm
from fusedcomm.launch import console, world
from fusedcomm.launch.ranks import RankError, RankFailure, RankPool
from fusedcomm.memory import topology
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan.planner import Plan
from fusedcomm.run import calls
from fusedcomm.tools import main, selftest

SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "selftest.json").read_text())
RUN = """
import sys
from fusedcomm.tools import main
if __name__ == "__main__":
    code = main(["selftest", "--device", "cpu", "--json", sys.argv[1]])
    print(*sys.modules, file=sys.stderr)
    sys.exit(code)
"""


@pytest.mark.nightly
def test_it_passes_here_without_the_repository(tmp_path: Path) -> None:
    file, script = tmp_path / "selftest.json", tmp_path / "run.py"
    script.write_text(RUN)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), str(file)]
    result = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing failed, 0 skipped; 2 ranks (cpu)" in result.stdout
    assert not set("\x1b\r") & set(result.stdout + result.stderr)
    roots = {name.partition(".")[0] for name in result.stderr.split()}
    assert "fusedcomm" in roots and not roots & {"tests", "bench", "kernels"}

    assert json.loads(file.read_text())["passed"]


def wrong_reduce_scatter(rank: int) -> Any:
    """One element of the result, on one rank, is wrong."""
    ours = fusedcomm.matmul_reduce_scatter

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        y = ours(*args, **kwargs).clone()
        if rank == 1:
            y.data[..., 3, 1] += 1
        return y

    return mock.patch.object(fusedcomm, "matmul_reduce_scatter", wrong)


@contextlib.contextmanager
def raises_in_chunked(rank: int) -> Iterator[None]:
    """Chunked raises on rank 1 alone, before it calls, so the other rank waits for it."""
    ours = selftest.ExactCall.call

    def raising(data: selftest.ExactCall, group: Any) -> list[Tensor]:
        if rank == 1 and data.plan(group).algorithm == "chunked":
            raise RuntimeError("planted")
        return ours(data, group)

    with mock.patch.object(selftest.ExactCall, "call", raising), mock.patch.object(selftest, "WAIT_S", 2):
        yield


def waits_for_nobody(rank: int) -> Any:
    """A rank waits for nobody where an error is due, but not before."""
    ours = selftest._error_of

    def without_waits(*args: Any) -> Exception | None:
        with mock.patch.object(Workspace, "wait", lambda *args: None):
            return ours(*args)

    return mock.patch.object(selftest, "_error_of", without_waits)


def no_native_part(rank: int) -> Any:
    """The native part is missing on one rank, so the group has no peers' memory."""
    return mock.patch.object(topology, "no_native", lambda: "not built" if rank == 1 else None)


def wrong_chunked(rank: int) -> Any:
    """One element of what chunked makes, on one rank, is wrong, in one dtype."""
    ours = calls.run

    def wrong(plan: Plan, *args: Any) -> calls.Ran:
        ran = ours(plan, *args)
        (y, *_) = ran.returned
        if rank == 1 and (plan.op, plan.algorithm, y.dtype) == ("matmul_reduce_scatter", "chunked", torch.float16):
            y[0, 0] += 1
        return ran

    return mock.patch.object(calls, "run", wrong)


def selftest_in_rank(
    rank: int, plant: Callable[[int], Any], *checks: str, options: tuple[str, ...] = ()
) -> tuple[int, str]:
    kept = {name: selftest.CHECKS[name] for name in checks or selftest.CHECKS}
    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(selftest.CHECKS, kept, clear=True))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(plant(rank))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(mock.patch.object(console, "stdout", lambda: Console(highlight=False, width=400)))
        os.environ.pop("TRITON_INTERPRET", None)  # the interpreter takes most of a minute
        code = main(["selftest", "--device", "cpu", *options])
    return code, out.getvalue()


@pytest.mark.thorough
def test_in_ranks_of_torchrun_it_passes_and_only_rank_0_prints(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    file = tmp_path / "selftest.json"
    results = ranks(2).run(selftest_in_rank, contextlib.nullcontext, options=("--json", str(file)))
    (code_0, out_0), (code_1, out_1) = results
    assert (code_0, code_1, out_1) == (0, 0, "")
    assert "nothing failed, 0 skipped; 2 ranks (cpu)" in out_0 and "on another host" in " ".join(out_0.split())
    report = json.loads(file.read_text())
    jsonschema.validate(report, SCHEMA)
    assert report["passed"] and report["world_size"] == 2
    assert [check["name"] for check in report["checks"]] == list(selftest.CHECKS)
    assert {check["status"] for check in report["checks"]} == {"passed"}
    by_name = {check["name"]: check["found"] for check in report["checks"]}
    assert "fused cannot: on CPU" in by_name["plan"]
    assert "chunked" in by_name["matmul_all_reduce"]


def test_a_wrong_value_on_one_rank_fails_the_check_of_that_op(ranks: Callable[[int], RankPool]) -> None:
    checks = ("matmul_all_reduce", "matmul_reduce_scatter")
    (code, out), _ = ranks(2).run(selftest_in_rank, wrong_reduce_scatter, *checks)
    assert code == 1
    assert "FAILED: matmul_reduce_scatter, 0 skipped;" in out
    words = " ".join(out.split())
    assert "rank 1: unfused: matmul_reduce_scatter: x [" in words and "first at" in words


@pytest.mark.thorough
def test_an_algorithm_that_fails_its_proof_is_reported(ranks: Callable[[int], RankPool]) -> None:
    (code, out), _ = ranks(2).run(selftest_in_rank, wrong_chunked, "proofs", "plan")
    words = " ".join(out.split())
    assert code == 1 and "FAILED: proofs, 0 skipped;" in words and "plan passed" in words
    assert "chunked of float16 failed its proof on " in words and "rank 1 gave wrong values: 1 of " in words
    assert "chunked of float16 in parts of different sizes failed its proof on " in words
    assert words.count("failed its proof") == 2


def test_a_rank_that_fails_alone_is_reported_though_its_peer_waits_first(ranks: Callable[[int], RankPool]) -> None:
    (code, out), _ = ranks(2).run(selftest_in_rank, raises_in_chunked, "matmul_all_to_all", "plan")
    words = " ".join(out.split())
    assert code == 1 and "FAILED: matmul_all_to_all, 0 skipped;" in words and "plan passed" in words
    assert "rank 1: RuntimeError: planted" in words


def test_a_vote_outlasts_a_wait_and_a_check_is_over_before_its_ranks_are_ended() -> None:
    assert selftest._vote_s() > 2 * selftest.WAIT_S
    assert 2 * selftest._vote_s() < selftest.TIMEOUT_S


def test_what_cannot_run_here_is_skipped_and_says_why(ranks: Callable[[int], RankPool]) -> None:
    checks = ("plan", "matmul_all_reduce", "time-out", "mismatch", "fallback, memory", "fallback, vote")
    (code, out), _ = ranks(2).run(selftest_in_rank, no_native_part, *checks)
    words = " ".join(out.split())
    assert code == 0 and "nothing failed" in words
    assert "can run: unfused, pipelined; chunked cannot: rank 1: not built" in words
    assert "unfused, pipelined: 18 tensors each, all exact" in words
    assert words.count(" skipped ") == 4 and words.count("rank 1: not built") >= 4


@pytest.mark.parametrize("check", ["time-out", "mismatch"])
def test_waits_that_do_not_report_fail_the_check(ranks: Callable[[int], RankPool], check: str) -> None:
    (code, out), _ = ranks(2).run(selftest_in_rank, waits_for_nobody, check)
    assert code == 1
    assert f"FAILED: {check}," in out and "got None" in " ".join(out.split())


def test_ranks_that_end_are_a_failure_and_the_rest_is_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def ranks_that_die(*args: Any) -> Iterator[world.CallRanks]:
        def call(fn: Callable[..., Any], name: str, device_type: str) -> selftest.CheckResult:
            if name == "time-out":
                raise RankError([RankFailure(1, "died", None, "SIGSEGV", "")])
            return selftest.CheckResult(name, "", "passed", "")

        yield call

    monkeypatch.setattr(world, "ranks", ranks_that_die)
    assert main(["selftest", "--device", "cpu"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "FAILED: time-out, 3 skipped;" in out and "rank 1 died: SIGSEGV" in out
    assert out.count("its ranks had ended") == 3
