"""The versions, the environment and the CPUs of this process. Nothing here touches a GPU."""

import importlib.metadata
import math
import os
import platform
import re
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
PACKAGES = ("fusedcomm", "torch", "triton", "nvidia-ml-py")
RELEVANT = re.compile(
    r"(FUSEDCOMM|NCCL|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|GLOO|TRITON|OMP|THP)_\w+|TORCH_?LOGS|TORCH_SYMMMEM"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|XDG_CACHE_HOME"
)


def environment() -> dict[str, str]:
    """The variables of fusedcomm and of the libraries below it."""
    return {name: value for name, value in sorted(os.environ.items()) if RELEVANT.fullmatch(name)}


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def available_cpus() -> int:
    """CPUs that this process may run on at a time: by its affinity, and by the quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, _quota() or allowed)


def _quota() -> int | None:
    """The CPUs that the cgroup's CPU time is enough for, rounded up, or None if it is not bounded."""
    version_1 = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    for names in (("cpu.max",), version_1):
        try:
            quota, period = map(int, " ".join((CGROUP / name).read_text() for name in names).split())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:
            return math.ceil(quota / period)
    return None
