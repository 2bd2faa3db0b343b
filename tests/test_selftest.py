"""``fusedcomm selftest``: passes here, and fails where something is wrong."""

from __future__ import annotations

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
from torch import Tensor

import fusedcomm
from fusedcomm import topology
from fusedcomm.cli import launch, main
from fusedcomm.testing import selftest
from fusedcomm.testing.ranks import RankError, RankFailure, RankPool
from fusedcomm.workspace import Workspace

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "selftest.json").read_text())
RUN = """
import sys
from fusedcomm.cli import main
if __name__ == "__main__":
    code = main(["selftest", "--device", "cpu", "--json", sys.argv[1]])
    print(*sys.modules, file=sys.stderr)
    sys.exit(code)
"""


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
    assert "fusedcomm" in roots and not roots & {"tests", "bench", "kernels", "matplotlib"}

    report = json.loads(file.read_text())
    jsonschema.validate(report, SCHEMA)
    assert report["passed"] and report["world_size"] == 2
    assert [check["name"] for check in report["checks"]] == list(selftest.CHECKS)
    assert {check["status"] for check in report["checks"]} == {"passed"}
    by_name = {check["name"]: check["found"] for check in report["checks"]}
    assert "fused cannot: on CPU" in by_name["plan"]
    assert "chunked" in by_name["matmul_all_reduce"]


def wrong_reduce_scatter(rank: int) -> Any:
    """One element of the result, on one rank, is wrong."""
    ours = fusedcomm.matmul_reduce_scatter

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        y = ours(*args, **kwargs).clone()
        if rank == 1:
            y.data[..., 3, 1] += 1
        return y

    return mock.patch.object(fusedcomm, "matmul_reduce_scatter", wrong)


def waits_for_nobody(rank: int) -> Any:
    return mock.patch.object(Workspace, "wait", lambda *args: None)


def no_native_part(rank: int) -> Any:
    """Missing on one rank: the group has no peers' memory."""
    return mock.patch.object(topology, "no_native", lambda: "not built" if rank == 1 else None)


def nothing_wrong(rank: int) -> Any:
    return contextlib.nullcontext()


def selftest_in_rank(rank: int, plant: Callable[[int], Any], *checks: str) -> tuple[int, str]:
    """As under torchrun: this rank has RANK and a group."""
    kept = {name: selftest.CHECKS[name] for name in checks}
    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(selftest.CHECKS, kept, clear=True))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(plant(rank))
        stack.enter_context(contextlib.redirect_stdout(out))
        os.environ.pop("TRITON_INTERPRET", None)  # the interpreter takes most of a minute
        code = main(["selftest", "--device", "cpu"])
    return code, out.getvalue()


def test_in_ranks_of_torchrun_only_rank_0_prints(ranks: Callable[[int], RankPool]) -> None:
    (code_0, out_0), (code_1, out_1) = ranks(2).run(selftest_in_rank, nothing_wrong, "plan", "fallback, vote")
    assert (code_0, code_1, out_1) == (0, 0, "")
    assert "nothing failed" in out_0 and "on another host" in " ".join(out_0.split())


def test_a_wrong_value_on_one_rank_fails_the_check_of_that_op(ranks: Callable[[int], RankPool]) -> None:
    checks = ("matmul_all_reduce", "matmul_reduce_scatter")
    (code, out), _ = ranks(2).run(selftest_in_rank, wrong_reduce_scatter, *checks)
    assert code == 1
    assert "FAILED: matmul_reduce_scatter, 0 skipped;" in out
    words = " ".join(out.split())
    assert "rank 1: AssertionError:" in words and "first at" in words


def test_what_cannot_run_here_is_skipped_and_says_why(ranks: Callable[[int], RankPool]) -> None:
    checks = ("plan", "matmul_all_reduce", "time-out", "mismatch", "fallback, memory", "fallback, vote")
    (code, out), _ = ranks(2).run(selftest_in_rank, no_native_part, *checks)
    words = " ".join(out.split())
    assert code == 0 and "nothing failed" in words
    assert "can run: unfused; chunked cannot: rank 1: not built" in words
    assert "unfused: 18 tensors each, all exact" in words
    assert words.count(" skipped ") == 4 and words.count("rank 1: not built") >= 4


@pytest.mark.parametrize("check", ["time-out", "mismatch"])
def test_waits_that_do_not_report_fail_the_check(ranks: Callable[[int], RankPool], check: str) -> None:
    (code, out), _ = ranks(2).run(selftest_in_rank, waits_for_nobody, check)
    assert code == 1
    assert f"FAILED: {check}," in out


def test_ranks_that_end_are_a_failure_and_the_rest_is_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def ranks_that_die(*args: Any) -> Iterator[launch.Call]:
        def call(fn: Callable[..., Any], name: str, device_type: str) -> selftest.Result:
            if name == "time-out":
                raise RankError([RankFailure(1, "died", None, "SIGSEGV", "")])
            return selftest.Result(name, "", "passed", "")

        yield call

    monkeypatch.setattr(launch, "ranks", ranks_that_die)
    assert main(["selftest", "--device", "cpu"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "FAILED: time-out, 3 skipped;" in out and "rank 1 died: SIGSEGV" in out
    assert out.count("its ranks had ended") == 3


def test_wrong_arguments_are_refused_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["selftest", "--json", str(tmp_path / "none" / "x.json")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["selftest", "--device", "cuda", "--world-size", "2"]) == 2
    assert "each rank needs a GPU of its own, got 2 ranks and 1 GPUs" in capsys.readouterr().err
