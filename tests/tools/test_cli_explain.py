"""``fusedcomm explain`` as a user sees it: table, JSON, exit codes; and the same lines from TORCH_LOGS."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jsonschema
import pytest
import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import fusedcomm.compile
from fusedcomm.launch.ranks import RankPool
from fusedcomm.tools import main
from tests.helpers.block_checks import interpreted

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


def python_m(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    without = {name: text for name, text in os.environ.items() if name not in ("TORCH_LOGS", "RANK")}
    return subprocess.run(
        [sys.executable, "-m", *args],
        cwd=folder,
        env={**without, "CUDA_VISIBLE_DEVICES": "", "FUSEDCOMM_TIMEOUT_S": "30", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def line_of(text: str, mark: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith(f"# {mark}"))


def table_rows(out: str) -> dict[str, str]:
    """The row of each collective, without spaces and without the rows into which long cells run over."""
    found = re.findall(r"^ *inference +(all_reduce\S*) +(.*)$", out, re.MULTILINE)
    return {name: re.sub(" +", " ", rest).strip() for name, rest in found}


LEFT = f"compiles.py:{line_of(COMPILES, 'LEFT')}"
FUSED = f"beside.py:{line_of(BESIDE, 'FUSED')}"
REASON = "matmul_all_reduce: the matmul's result is also returned by the function, or kept for its backward"


def explain_in_rank(rank: int, folder: Path) -> tuple[int, str]:
    compile_, handler, path, cwd = torch.compile, signal.getsignal(signal.SIGTERM), list(sys.path), Path.cwd()
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        for config in (inductor_config, functorch_config):
            stack.enter_context(config.patch({}))
        for name in ("init_process_group", "destroy_process_group"):
            stack.enter_context(mock.patch.object(dist, name))
        stack.enter_context(mock.patch.object(sys, "argv", ["fusedcomm"]))
        stack.enter_context(
            mock.patch.object(torch, "compile", lambda fn: compile_(fn, backend=interpreted, dynamic=False))
        )
        stack.callback(fusedcomm.compile.disable)
        try:
            os.chdir(folder)
            code = main(["explain", "--json", "rows.json", "compiles.py", "--json", "theirs"])
        finally:
            os.chdir(cwd)
            signal.signal(signal.SIGTERM, handler)
            sys.path[:] = path
            sys.modules.pop("beside", None)
            torch._dynamo.reset()
    return code, out.getvalue()


@pytest.mark.thorough
def test_a_table_and_json_say_what_became_of_every_collective(scripts: Path, ranks: Callable[[int], RankPool]) -> None:
    (code_0, out_0), (code_1, out_1) = ranks(2).run(explain_in_rank, scripts)
    begun = "__main__ ['compiles.py', '--json', 'theirs'] 2\n"
    assert (code_0, code_1, out_1) == (0, 0, begun) and out_0.startswith(begun)

    rows = table_rows(out_0)
    assert set(rows) == {"all_reduce", "all_reduce_1"}
    assert rows["all_reduce"].startswith("plain all_reduce, matmul_all_reduce:")
    assert rows["all_reduce"].endswith(LEFT)
    assert re.fullmatch(rf"fused matmul_all_reduce (chunked|unfused) [\d.e-]+ {FUSED}", rows["all_reduce_1"])

    rows = json.loads((scripts / "rows.json").read_text())
    jsonschema.validate(rows, json.loads((Path(__file__).parents[1] / "schemas" / "explain.json").read_text()))
    left, fused = rows
    graph = {"graph": "inference", "collective": "all_reduce"}
    assert left.pop("plan") in ("chunked", "unfused")
    assert left == graph | {
        "status": "plain",
        "node": "all_reduce",
        "source": LEFT,
        "op": "all_reduce",
        "reason": REASON,
        "saving_us": 0.0,
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


@pytest.mark.nightly
def test_in_ranks_of_torchrun_a_script_that_enables_the_passes_itself_and_the_log(scripts: Path) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    args = (*torchrun, "fusedcomm", "explain", "compiles.py", "enables-itself")
    result = python_m(scripts, *args, TORCH_LOGS="+fusedcomm")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("__main__ ['compiles.py', 'enables-itself'] 2\n") == 2
    assert set(table_rows(result.stdout)) == {"all_reduce", "all_reduce_1"}  # only rank 0 prints

    for rank in (0, 1):
        logged = re.findall(rf"^\[rank{rank}\]:V.*?\] (?:\[.*\] )?(inference .*)$", result.stderr, re.MULTILINE)
        assert len(logged) == 2, result.stderr
        assert logged[0] == f"inference all_reduce all_reduce ({LEFT}): plain, all_reduce, {REASON}"
        fused = re.escape(f"inference all_reduce all_reduce_1 ({scripts / FUSED}): fused, matmul_all_reduce, saves")
        assert re.fullmatch(rf"{fused} about \d+ us", logged[1])


@pytest.mark.nightly
def test_the_exit_code_is_that_of_sys_exit_and_an_error_comes_after_the_report(scripts: Path) -> None:
    result = python_m(scripts, "fusedcomm", "explain", "--nproc", "1", "ends.py", "exit")
    assert result.returncode == 3, result.stderr
    assert result.stdout == "no graph with a collective was compiled: there is nothing to fuse\n"
    assert "Traceback" not in result.stderr

    result = python_m(scripts, "fusedcomm", "explain", "--nproc", "1", "--json", "rows.json", "ends.py", "raise")
    assert result.returncode == 1
    assert result.stderr.count("KeyError: 'of the script'") == 1
    assert f'File "ends.py", line {len(ENDS.splitlines())}, in <module>' in result.stderr
    assert result.stdout == "no graph with a collective was compiled: there is nothing to fuse\n"
    assert json.loads((scripts / "rows.json").read_text()) == []  # where it was asked for: the script went elsewhere
