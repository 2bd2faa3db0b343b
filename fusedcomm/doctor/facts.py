"""The versions and the system, and what is wrong with them. Nothing here touches a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import socket
from pathlib import Path
from typing import Any

import torch

from fusedcomm.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from fusedcomm.machine import PACKAGES, available_cpus, version
from fusedcomm.runtime import topology
from fusedcomm.runtime.nccl_options import nccl_version_text

CONTAINERS = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/.singularity.d": "singularity"}


def versions(driver: str | None, cuda_driver: str | None) -> dict[str, str | None]:
    """Versions by name. ``driver`` and ``cuda_driver`` are what NVML says."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "nccl": nccl_version_text(),
        "driver": driver,
        "cuda of the driver": cuda_driver,
    }


def version_findings(found: dict[str, str | None], num_gpus: int) -> list[Finding]:
    """What is wrong with versions, whose ranges are those of this package's metadata."""
    findings = []
    if found["triton"] is None:
        text = "Triton is not installed: everything on a GPU runs unfused"
        level = WARNING if num_gpus else ABSENT
        findings.append(Finding("versions", "triton", level, text, "pip install triton"))
    if wrong := _wrong_torch(found["torch"]):
        findings.append(Finding("versions", "torch", WARNING, wrong, "install a version in that range"))
    if reason := topology.no_native():
        findings.append(Finding("versions", "native part", WARNING, reason, "needed on CPU only"))
    if not findings:
        findings.append(
            Finding("versions", "packages", OK, "all that is needed is installed, and the native part can be loaded")
        )
    return findings


def system() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "cpus": os.cpu_count(),
        "cpus allowed": available_cpus(),
        "container": container(),
        "limits": {name: _limit(name) for name in ("NOFILE", "MEMLOCK")},
    }


def container() -> str | None:
    """The kind of container that this process seems to be in, or None."""
    for path, name in CONTAINERS.items():
        if Path(path).exists():
            return name
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    return os.environ.get("container")  # noqa: SIM112 (systemd spells it so)


def sees_no_gpu(torch_gpus: int, nvml_gpus: int) -> list[Finding]:
    """What is wrong where NVML has GPUs that torch does not see."""
    if torch_gpus >= nvml_gpus:
        return []
    text = f"torch sees {torch_gpus} of the machine's {nvml_gpus} GPUs"
    if torch.version.cuda is None:
        advice = "this build of torch is for CPUs: install its CUDA build"
        return [Finding("gpus", "torch", ERROR, text, advice)]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [Finding("gpus", "torch", OK, f"{text}: CUDA_VISIBLE_DEVICES says so")]
    advice = "compare the versions of the driver and of torch's CUDA; in a container pass all GPUs (--gpus all)"
    return [Finding("gpus", "torch", ERROR, text, advice)]


def _wrong_torch(installed: str | None) -> str | None:
    """Why the version of torch is outside of the package's range, or None."""
    try:
        requires = importlib.metadata.requires("fusedcomm") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = next((r.removeprefix("torch") for r in requires if re.match(r"torch[<>=!~ ]", r)), "")
    numbers = _numbers(installed or "")
    for bound in spec.split(","):
        least, most = bound.startswith(">="), bound.startswith("<") and not bound.startswith("<=")
        limit = _numbers(bound)
        if (least and numbers < limit) or (most and numbers >= limit):
            return f"torch must be {spec}, got {installed}"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    match = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else ()


def _limit(name: str) -> int | None:
    """The soft limit, None for unlimited."""
    soft = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
    return None if soft == resource.RLIM_INFINITY else soft
