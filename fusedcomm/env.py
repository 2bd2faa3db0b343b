"""Every environment variable of fusedcomm, read when it is needed and never at import."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

ALGORITHMS = ("unfused", "chunked", "fused", "pipelined")
WITH_WORKSPACE = ("chunked", "fused")  # they wait by flags in symmetric memory
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
    "FUSEDCOMM_HOST_ID": host_id,
    "FUSEDCOMM_PLAN_BYTES": plan_bytes,
    "FUSEDCOMM_PROVE": prove,
    "FUSEDCOMM_TIMEOUT_S": timeout_s,
    "FUSEDCOMM_WORKSPACE_BYTES": workspace_bytes,
}
