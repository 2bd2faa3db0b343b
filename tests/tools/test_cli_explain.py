"""``fusedcomm explain`` as a user sees it: table, JSON, exit codes; and the same lines from TORCH_LOGS."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

TIMEOUT_S = 120

COMPILES = """\
import contextlib
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from beside import reduced

import fusedcomm.compile


def program(x, w):
    y = x @ w
    left = funcol.all_reduce(y, "sum", dist.group.WORLD)  # LEFT
    return y, left, reduced(x @ w.T)


dist.init_process_group("gloo")
itself = "enables-itself" in sys.argv
with fusedcomm.compile.enabled() if itself else contextlib.nullcontext():
    torch.compile(program)(torch.ones(4, 16), torch.ones(16, 16))
torch.compile(program)  # copies Inductor's config, and in it what has been reported
assert len(fusedcomm.compile.report().collectives) == (0 if itself else 2)
print(f"{__name__} {sys.argv} {dist.get_world_size()}\\n", end="")
dist.destroy_process_group()
"""
BESIDE = """\
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def reduced(y):
    return funcol.all_reduce(y, "sum", dist.group.WORLD)  # FUSED
"""
ENDS = """\
import os
import sys

import torch.distributed as dist

dist.init_process_group("gloo")  # no rank ends before all are here
if sys.argv[1] == "exit":
    sys.exit(3)
os.chdir("/")
raise KeyError("of the script")
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    for name, text in (("compiles.py", COMPILES), ("beside.py", BESIDE), ("ends.py", ENDS)):
        (tmp_path / name).write_text(text)
    return tmp_path


def start(folder: Path, *args: str, **env: str) -> subprocess.Popen[str]:
    without = {name: text for name, text in os.environ.items() if name not in ("TORCH_LOGS", "RANK")}
    return subprocess.Popen(
        [sys.executable, "-m", *args],
        cwd=folder,
        env={**without, "CUDA_VISIBLE_DEVICES": "", "FUSEDCOMM_TIMEOUT_S": "30", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # the launcher then ends its ranks, which have sessions of their own
            process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def python_m(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return finish(start(folder, *args, **env))


def line_of(text: str, mark: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith(f"# {mark}"))


def table_rows(out: str) -> dict[str, str]:
    """The row of each collective, without spaces and without the rows into which long cells run over."""
    found = re.findall(r"^ *inference +(all_reduce\S*) +(.*)$", out, re.MULTILINE)
    return {name: re.sub(" +", " ", rest).strip() for name, rest in found}


LEFT = f"compiles.py:{line_of(COMPILES, 'LEFT')}"
FUSED = f"beside.py:{line_of(BESIDE, 'FUSED')}"
REASON = "matmul_all_reduce: the matmul's result is also returned by the function, or kept for its backward"


def test_a_table_and_json_say_what_became_of_every_collective(scripts: Path) -> None:
    result = python_m(scripts, "fusedcomm", "explain", "--json", "rows.json", "compiles.py", "--json", "theirs")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("__main__ ['compiles.py', '--json', 'theirs'] 2\n") == 2

    rows = table_rows(result.stdout)
    assert set(rows) == {"all_reduce", "all_reduce_1"}  # only rank 0 prints
    assert rows["all_reduce"].startswith("exposed matmul_all_reduce:")
    assert rows["all_reduce"].endswith(LEFT)
    assert re.fullmatch(rf"fused matmul_all_reduce (chunked|unfused) [\d.e-]+ {FUSED}", rows["all_reduce_1"])

    rows = json.loads((scripts / "rows.json").read_text())
    jsonschema.validate(rows, json.loads((Path(__file__).parents[1] / "schemas" / "explain.json").read_text()))
    left, fused = rows
    graph = {"graph": "inference", "collective": "all_reduce"}
    assert left == graph | {
        "status": "exposed",
        "node": "all_reduce",
        "source": LEFT,
        "op": None,
        "reason": REASON,
        "saving_us": 0.0,
        "plan": "",
    }
    assert fused.pop("saving_us") > 0
    assert fused.pop("plan") in ("chunked", "unfused")  # though the script destroyed the group
    assert fused == graph | {
        "status": "fused",
        "node": "all_reduce_1",
        "source": str(scripts / FUSED),
        "op": "matmul_all_reduce",
        "reason": "",
    }
    assert "inference all_reduce" not in result.stderr  # logged only where it is asked for


@pytest.mark.thorough
def test_in_ranks_of_torchrun_a_script_that_enables_the_passes_itself_and_the_log(scripts: Path) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    args = (*torchrun, "fusedcomm", "explain", "compiles.py", "enables-itself")
    result = python_m(scripts, *args, TORCH_LOGS="+fusedcomm")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("__main__ ['compiles.py', 'enables-itself'] 2\n") == 2
    assert set(table_rows(result.stdout)) == {"all_reduce", "all_reduce_1"}

    for rank in (0, 1):
        logged = re.findall(rf"^\[rank{rank}\]:V.*?\] (?:\[.*\] )?(inference .*)$", result.stderr, re.MULTILINE)
        assert len(logged) == 2, result.stderr
        assert logged[0] == f"inference all_reduce all_reduce ({LEFT}): exposed, {REASON}"
        fused = re.escape(f"inference all_reduce all_reduce_1 ({scripts / FUSED}): fused, matmul_all_reduce, saves")
        assert re.fullmatch(rf"{fused} about \d+ us", logged[1])


@pytest.mark.thorough
def test_the_exit_code_is_that_of_sys_exit_and_an_error_comes_after_the_report(scripts: Path) -> None:
    """Both are tested at once, because most of the time is the start of one core."""
    raises = start(scripts, "fusedcomm", "explain", "--nproc", "1", "--json", "rows.json", "ends.py", "raise")
    try:
        result = python_m(scripts, "fusedcomm", "explain", "--nproc", "1", "ends.py", "exit")
    finally:
        raised = finish(raises)
    assert result.returncode == 3, result.stderr
    assert result.stdout == "no graph with a collective was compiled: there is nothing to fuse\n"
    assert "Traceback" not in result.stderr

    result = raised
    assert result.returncode == 1
    assert result.stderr.count("KeyError: 'of the script'") == 1
    assert f'File "ends.py", line {len(ENDS.splitlines())}, in <module>' in result.stderr
    assert result.stdout == "no graph with a collective was compiled: there is nothing to fuse\n"
    assert json.loads((scripts / "rows.json").read_text()) == []  # where it was asked for: the script went elsewhere


def test_files_that_cannot_be_opened_are_refused_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fusedcomm.cli import main

    script = tmp_path / "script.py"
    assert main(["explain", str(script)]) == 2
    script.touch()
    assert main(["explain", "--json", str(tmp_path / "none" / "rows.json"), str(script)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"fusedcomm explain: {script}: No such file or directory",
        f"fusedcomm explain: {tmp_path}/none/rows.json: No such file or directory",
    ]
