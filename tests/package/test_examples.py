"""The examples run as their first lines say, and their own comparison with the plain model holds."""

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.tiers import nightly_but

ROOT = Path(__file__).parents[2]
SINGLE = "train_gqa_single"
COMPARED = ["tensor_parallel_mlp", "ulysses_attention"]  # with a single process, by themselves
TIMEOUT_S = 120


def torchrun(name: str, world_size: int, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "FUSEDCOMM_TIMEOUT_S": "30"}
    process = subprocess.Popen(
        [*command, str(ROOT / "examples" / f"{name}.py"), *arguments],
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
    assert process.returncode == 0, out + err
    assert "runs unfused" not in err, err
    return out


@pytest.mark.thorough
@pytest.mark.parametrize("name", nightly_but(COMPARED[:1], COMPARED))
def test_example(name: str) -> None:
    *steps, last = torchrun(name, 2).strip().splitlines()
    assert last == f"{name}: the losses on 2 ranks equal those of a single process"
    losses = [tuple(map(float, re.findall(r"\d+\.\d+", step))) for step in steps]
    assert len(losses) == 5
    assert all(ours == pytest.approx(single, rel=1e-4) for ours, single in losses)
    assert losses[-1][0] < losses[0][0]


@pytest.mark.thorough
def test_decode_loop() -> None:
    *tokens, last = torchrun("decode_loop", 2).strip().splitlines()
    assert last == "decode_loop: the tokens on 2 ranks equal those of a single process"
    assert len({each.partition(":")[2] for each in tokens}) > 4


@pytest.mark.nightly
def test_engine_linear() -> None:
    lines = torchrun("engine_linear", 2).splitlines()
    assert lines == ["1 rows: fused", "16 rows: fused", "64 rows: fused", "128 rows: plain"]


@pytest.mark.nightly
@pytest.mark.parametrize("options", [(), ("--compile",)], ids=["eager", "compiled"])
def test_train_tp(options: tuple[str, ...], tmp_path: Path) -> None:
    """Its losses on 2 x 2 ranks, before and after it goes on from a checkpoint, are those of the plain model."""
    losses = []
    for steps in ("3", "5"):
        out = torchrun("train_tp", 4, *options, "--steps", steps, "--checkpoint", str(tmp_path / "checkpoint"))
        losses += re.findall(r"^step (\d): loss (\d+\.\d+)$", out, re.M)
    assert [step for step, _ in losses] == list("12345")
    example = runpy.run_path(str(ROOT / "examples/train_tp.py"))
    plain = example["Training"](example["model_of"](0, torch.device("cpu")))
    wants = [plain.step(example["batch_of"](step)).item() for step in range(5)]
    assert [float(loss) for _, loss in losses] == pytest.approx(wants, rel=1e-5)
    assert wants[-1] < wants[0]


@pytest.mark.nightly
def test_grouped_queries_on_four_ranks_train_as_in_one_process() -> None:
    command = [sys.executable, str(ROOT / "examples" / f"{SINGLE}.py")]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    single = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    wants, losses = (
        [float(number) for number in re.findall(r"^step \d: loss (\d+\.\d+)$", out, re.MULTILINE)]
        for out in (single.stdout, torchrun("train_gqa", 4))
    )
    assert len(losses) == len(wants) == 5 and losses[-1] < losses[0]
    assert losses == pytest.approx(wants, rel=1e-6)
