"""A user's first commands, and the tests that need a GPU. The selftest needs several GPUs."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.driver import ROOT

LIMIT_S = 55


def cases(device: torch.device) -> child.Cases:
    return {"doctor": doctor, "DeviceToHost": lambda: tests_of_device_to_host(device)}


def doctor() -> dict[str, Any]:
    """The installed command on one GPU, from another folder than the checkout: on all of a host's it takes minutes."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
    for name in ("FUSEDCOMM_TIMEOUT_S", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"):  # this check's, not the user's
        env.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        if run_module("fusedcomm", "--version", cwd=Path(folder)).returncode:
            raise child.Skipped(f"fusedcomm is not installed in {sys.executable}: README's second line installs it")
        file = Path(folder) / "doctor.json"
        done = run_module("fusedcomm", "doctor", "--json", str(file), cwd=Path(folder), env=env)
        found = json.loads(file.read_text()) if file.exists() else None
    return {"exit_code": done.returncode, "doctor": found}


def tests_of_device_to_host(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        raise child.Skipped("these tests need a GPU")
    done = run_module("pytest", "-q", "-m", "gpu", "tests/run/test_device_to_host.py", cwd=ROOT)
    summary = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0 and "passed" in "".join(summary) and "skipped" not in "".join(summary), summary
    return {"tests": summary[0]}


def run_module(*args: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run it to its end. Exit code 1 is a finding; a process that did not come that far is an error."""
    command = [sys.executable, "-m", *args]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode in (0, 1), f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done
