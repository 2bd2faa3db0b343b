"""This host's versions, limits, cache directory and environment variables, and their faults."""

import difflib
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable

import torch

from fusedcomm import env
from fusedcomm.env import PACKAGES, version
from fusedcomm.memory import topology
from fusedcomm.memory.nccl_options import nccl_version_text
from fusedcomm.tools.doctor_findings import ABSENT, ERROR, OK, WARNING, Finding


def _on(value: str) -> bool:
    return value.lower() not in ("", "0", "false", "no", "off")


# Values that make fusedcomm wrong, hang, slow or run unfused, how bad that is with several GPUs, and why
RULES: dict[str, tuple[Callable[[str], bool], str, str]] = {
    "CUDA_LAUNCH_BLOCKING": (_on, ERROR, "a launch that waits for a peer holds up what the peer waits for"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        lambda n: n.isdecimal() and int(n) < 8,
        WARNING,
        "safe, but pushes queue behind waits",
    ),
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": (lambda value: value not in ("", "100"), ERROR, "waiting kernels may not fit"),
    "NCCL_P2P_DISABLE": ("1".__eq__, ERROR, "forbids peer memory: GPUs run unfused"),
    "TORCH_SYMMMEM": (lambda name: name.upper() not in ("", "CUDA"), ERROR, "fusedcomm needs the CUDA backend"),
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": (_on, WARNING, "ranks may share a GPU, and starve each other there"),
    "TORCH_NCCL_BLOCKING_WAIT": (_on, WARNING, "`pipelined` overlaps nothing: the host waits for each collective"),
    "TRITON_INTERPRET": (_on, ERROR, "kernels run in Triton's interpreter, for tests"),
    "FUSEDCOMM_ALGORITHM": (bool, WARNING, "every op runs by this algorithm where it can; the planner is not asked"),
    "FUSEDCOMM_CHECK": (_on, WARNING, "every call waits for all ranks to compare it first: for debugging"),
    "FUSEDCOMM_HOST_ID": (bool, WARNING, "says which ranks share memory, true or not; for tests"),
    "FUSEDCOMM_PROVE": ("0".__eq__, WARNING, "GPUs use algorithms that were not proved on them"),
}


def versions(driver: str | None, cuda_driver: str | None) -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "linux": platform.release(),
        **{name: version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "nccl": nccl_version_text(),
        "driver": driver,
        "cuda of the driver": cuda_driver,
    }


def find_versions(found: dict[str, str | None], num_gpus: int) -> list[Finding]:
    """Faults of versions; the range of torch is that of this package's metadata."""
    wrong = []
    if found["triton"] is None:
        text = "Triton is not installed: everything on a GPU runs unfused"
        wrong.append(("triton", WARNING if num_gpus else ABSENT, text, "pip install triton"))
    if problem := _wrong_torch(found["torch"]):
        wrong.append(("torch", WARNING, problem, "install a version in that range"))
    if reason := topology.no_native():
        advice = (
            "build it: without it ops on CPUs run unfused, and calls on GPUs in Python, at several times the host time"
        )
        wrong.append(("native part", WARNING, reason, advice))
    fine = ("packages", OK, "all that is needed is installed, and the native part can be loaded", "")
    return [Finding("versions", *each) for each in wrong or [fine]]


def sees_no_gpu(torch_gpus: int, nvml_gpus: int) -> list[Finding]:
    """Faults where NVML has GPUs that torch does not see."""
    if torch_gpus >= nvml_gpus or (torch.version.cuda is not None and "CUDA_VISIBLE_DEVICES" in os.environ):
        return []
    advice = "compare the versions of the driver and of torch's CUDA; in a container pass all GPUs (--gpus all)"
    if torch.version.cuda is None:
        advice = "this build of torch is for CPUs: install its CUDA build"
    return [Finding("gpus", "torch", ERROR, f"torch sees {torch_gpus} of the machine's {nvml_gpus} GPUs", advice)]


def find_settings(num_gpus: int) -> list[Finding]:
    """Faults of environment variables, and of the cache directory."""
    found = []
    for name, value in sorted(os.environ.items()):
        bad, level, text = RULES.get(name, (bool, OK, ""))
        if name in env.SETTINGS:
            try:
                env.SETTINGS[name]()
            except ValueError as error:
                advice = "correct it or unset it: until then every op fails"
                found.append(Finding("settings", name, ERROR, str(error), advice))
                continue
        elif name.startswith("FUSEDCOMM_"):  # its value may be a secret: it is not told
            near = difflib.get_close_matches(name, env.SETTINGS, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(env.SETTINGS))}"
            found.append(Finding("settings", name, WARNING, "no setting of fusedcomm: ignored", advice))
        if text and bad(value):
            found.append(Finding("settings", name, WARNING if num_gpus < 2 else level, text, "unset it"))
    folder = next((os.environ[name] for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if os.environ.get(name)), "/tmp")
    if not (os.access(folder, os.W_OK | os.X_OK) and len(folder) < 80):
        text = f"torch's symmetric memory on GPUs needs sockets in a short path that can be written, got {folder}"
        found.append(
            Finding(
                "settings",
                "TMPDIR",
                ERROR if num_gpus >= 2 else WARNING,
                text,
                "set another, the same for all ranks of a machine",
            )
        )
    try:
        cache = env.cache_dir().absolute()
        if not os.access(next(each for each in (cache, *cache.parents) if os.path.exists(each)), os.W_OK | os.X_OK):
            raise PermissionError(f"{cache} cannot be written")
    except OSError as error:
        advice = "set FUSEDCOMM_CACHE_DIR to one of yours; without it nothing that was tuned is kept"
        found.append(Finding("settings", "cache directory", WARNING, str(error), advice))
    return found or [Finding("settings", "environment", OK, "nothing is set that breaks fusedcomm")]


def _wrong_torch(installed: str | None) -> str | None:
    """Why the version of torch is outside of the package's range, or None."""
    try:
        requires = importlib.metadata.requires("fusedcomm") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = next((r.removeprefix("torch") for r in requires if re.match(r"torch[<>=!~ ]", r)), "")
    bounds, numbers = dict(re.findall(r"(>=|<)([\d.]+)", spec)), _numbers(installed)
    fits = _numbers(bounds.get(">=")) <= numbers < _numbers(bounds.get("<", "99.0"))
    return None if fits else f"torch must be {spec}, got {installed}"


def _numbers(text: str | None) -> tuple[int, ...]:
    match = re.search(r"(\d+)\.(\d+)", text or "")
    return tuple(map(int, match.groups())) if match else ()
