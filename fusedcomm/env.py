"""The environment of this process: its variables, versions and CPUs, read when they are needed and never at import.

Nothing here touches a GPU.
"""

import errno
import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

ALGORITHMS = ("unfused", "chunked", "fused", "pipelined")
WITH_WORKSPACE = ("chunked", "fused")  # they wait by flags in symmetric memory
CGROUP = Path("/sys/fs/cgroup")
PACKAGES = ("fusedcomm", "torch", "triton", "nvidia-ml-py")
RELEVANT = re.compile(
    r"(FUSEDCOMM|NCCL|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|GLOO|TRITON|OMP|THP)_\w+|TORCH_?LOGS|TORCH_SYMMMEM"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|XDG_CACHE_HOME"
)
_MOST_S, _MOST_BYTES = 1e9, float(1 << 62)  # that threads can wait, and int64 can count


def timeout_s() -> float:
    """``FUSEDCOMM_TIMEOUT_S``: the bound of every wait for a peer, in seconds (default 300, at most 1e9)."""
    return min(_positive("FUSEDCOMM_TIMEOUT_S", 300.0), _MOST_S)


def workspace_bytes() -> int:
    """``FUSEDCOMM_WORKSPACE_BYTES``: the most memory a group's workspace may hold on one device (default 1 GiB)."""
    return int(min(_positive("FUSEDCOMM_WORKSPACE_BYTES", float(1 << 30)), _MOST_BYTES))


def plan_bytes() -> int:
    """``FUSEDCOMM_PLAN_BYTES``: the most memory for the plans of a group's calls, on one device (default 256 MiB)."""
    return int(min(_positive("FUSEDCOMM_PLAN_BYTES", float(256 << 20)), _MOST_BYTES))


def algorithm() -> str | None:
    """``FUSEDCOMM_ALGORITHM``: the algorithm every op should use where it can run, or None for the planner's choice."""
    name = os.environ.get("FUSEDCOMM_ALGORITHM") or None
    if name is not None and name not in ALGORITHMS:
        raise ValueError(f"FUSEDCOMM_ALGORITHM must be one of {', '.join(ALGORITHMS)}, got {name!r}")
    return name


def cache_dir() -> Path:
    """Where measured numbers are kept: ``FUSEDCOMM_CACHE_DIR``, else fusedcomm in XDG_CACHE_HOME or ~/.cache.

    Raises FileNotFoundError if neither is set and the user has no home.
    """
    own = os.environ.get("FUSEDCOMM_CACHE_DIR")
    if own:
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedcomm"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "this user has no home: set FUSEDCOMM_CACHE_DIR", "~") from None


def backend_sums() -> bool:
    """``FUSEDCOMM_BACKEND_SUMS=1``: in `pipelined`, sums are left to the backend, in its order and precision."""
    return _flag("FUSEDCOMM_BACKEND_SUMS", "0")


def check() -> bool:
    """``FUSEDCOMM_CHECK=1``: ranks compare their calls before they make them, and slots have guard bytes."""
    return _flag("FUSEDCOMM_CHECK", "0")


def prove() -> bool:
    """``FUSEDCOMM_PROVE=0``: GPUs use algorithms that the group has not proved there (default 1: they do not)."""
    return _flag("FUSEDCOMM_PROVE", "1")


def early_launch() -> bool:
    """``FUSEDCOMM_EARLY_LAUNCH=0``: no kernel is launched before the one in front of it has ended (default 1)."""
    return _flag("FUSEDCOMM_EARLY_LAUNCH", "1")


def dump_dir() -> Path | None:
    """``FUSEDCOMM_DUMP_DIR``: the folder for ranks' last calls, written on a failure and on SIGUSR1, or None."""
    folder = os.environ.get("FUSEDCOMM_DUMP_DIR")
    return Path(folder) if folder else None


def host_id() -> str:
    """An id that is equal for ranks that can map each other's memory. ``FUSEDCOMM_HOST_ID`` overrides it (tests do).

    The boot id tells hosts apart. The PID namespace must be shared too: memory is handed over through /proc/<pid>/fd.
    """
    try:
        return known_host_id()
    except OSError:
        return f"unknown host of process {os.getpid()}"


def known_host_id() -> str:
    """``host_id``, or an OSError if this process cannot find it out."""
    override = os.environ.get("FUSEDCOMM_HOST_ID")
    if override:
        return override
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"


def _flag(name: str, default: str) -> bool:
    text = os.environ.get(name) or default
    if text not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def _positive(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ValueError(f"{name} must be a positive number, got {text!r}")
    return value


SETTINGS: dict[str, Callable[[], object]] = {  # each function raises ValueError where the value is wrong
    "FUSEDCOMM_ALGORITHM": algorithm,
    "FUSEDCOMM_BACKEND_SUMS": backend_sums,
    "FUSEDCOMM_CACHE_DIR": cache_dir,
    "FUSEDCOMM_CHECK": check,
    "FUSEDCOMM_DUMP_DIR": dump_dir,
    "FUSEDCOMM_EARLY_LAUNCH": early_launch,
    "FUSEDCOMM_HOST_ID": host_id,
    "FUSEDCOMM_PLAN_BYTES": plan_bytes,
    "FUSEDCOMM_PROVE": prove,
    "FUSEDCOMM_TIMEOUT_S": timeout_s,
    "FUSEDCOMM_WORKSPACE_BYTES": workspace_bytes,
}


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
