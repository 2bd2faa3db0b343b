"""The examples run as their first lines say, and their own comparison with the plain model holds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.thorough import thorough_but

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
RANKS = {"train_gqa": 4}  # else 2
TIMEOUT_S = 120


def torchrun(name: str, world_size: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "FUSEDCOMM_TIMEOUT_S": "30"}
    process = subprocess.Popen(
        [*command, str(ROOT / "examples" / f"{name}.py")],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a time-out ends the ranks too
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_examples_are_there() -> None:
    assert EXAMPLES == ["tensor_parallel_mlp", "train_gqa", "train_tp", "ulysses_attention"]


@pytest.mark.parametrize("name", thorough_but(["ulysses_attention"], EXAMPLES))
def test_example(name: str) -> None:
    num_ranks = RANKS.get(name, 2)
    result = torchrun(name, num_ranks)
    assert result.returncode == 0, result.stdout + result.stderr
    *steps, last = result.stdout.strip().splitlines()
    assert last == f"{name}: the losses on {num_ranks} ranks equal those of a single process"
    losses = [tuple(map(float, re.findall(r"\d+\.\d+", step))) for step in steps]
    assert len(losses) == 5
    assert all(ours == pytest.approx(single, rel=1e-4) for ours, single in losses)
    assert losses[-1][0] < losses[0][0]
    assert "runs unfused" not in result.stderr, result.stderr  # it runs chunked, without a fallback
