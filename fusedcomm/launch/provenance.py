"""A report's facts about its run: versions, machine, command, date and commit."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fusedcomm.env import cpu_name, version
from fusedcomm.kernels.native_part import native
from fusedcomm.launch.world import system_huge_pages


def run_facts() -> dict[str, Any]:
    """The JSON that stands beside figures."""
    return {
        "command": shlex.join([os.path.basename(sys.executable), *sys.orig_argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("fusedcomm", "torch", "triton")},
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
            "native part": native is not None,
        },
        "machine": {
            "cpu": cpu_name(),
            "cpus": os.cpu_count(),
            "transparent_huge_pages": system_huge_pages(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def _commit() -> str | None:
    """The commit of the checkout that this file is part of, if it is part of one.

    "+" stands for local changes outside bench/results.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None

    def git(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10)

    try:
        changed = git("status", "--porcelain", "--", ".", ":!bench/results")
        return git("rev-parse", "HEAD").strip() + "+" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None
