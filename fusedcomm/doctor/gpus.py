"""The machine's GPUs and what connects them, as NVML tells it; only questions are asked.

``nvml`` is the module pynvml, or what a test puts in its place. A question that a driver or a GPU does not know gives
None.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fusedcomm.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding

# NVML's numbers stand here because pynvml 13 has a tuple for NVML_P2P_CAPS_INDEX_READ
CAPS = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3}
STATUS = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by registry key",
    5: "not supported",
    6: "unknown",
}
LEVELS = {0: "INTERNAL", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
FABRIC = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
SLOWED = {8: "hardware", 32: "temperature", 64: "temperature (hardware)", 128: "power brake"}
NO_NVLINK = {STATUS[code] for code in (1, 2, 3, 5)}  # where no link is up, these say that there is none
NO_PERMISSION = 4  # NVML's error for a GPU that this process may not use
SM_CLOCK = 1
MAX_LINKS = 36
DRIVER_TRACES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")


@dataclass(frozen=True)
class Gpu:
    """What NVML knows of a GPU. None is unknown; clocks are in MHz."""

    index: int
    name: str
    uuid: str
    serial: str | None
    memory_bytes: int | None
    mig: bool | None
    ecc: bool | None
    persistence: bool | None
    compute_mode: str | None
    sm_clock: int | None
    max_sm_clock: int | None
    slowed_by: list[str]
    links: list[bool]  # NVLinks that are up
    fabric: str | None
    fabric_status: int | None  # NVML's error code, which counts once the fabric is completed
    clique: int | None


@dataclass(frozen=True)
class Pair:
    """P2P from one GPU to another: "ok", or what NVML says."""

    a: int
    b: int
    read: str
    write: str
    nvlink: str
    atomics: str
    path: str  # NV<links>, or the nearest common ancestor: PIX, PXB, PHB, NODE, SYS

    @property
    def missing(self) -> list[str]:
        return [f"{name}: {status}" for name in CAPS if (status := getattr(self, name)) != "ok"]


@dataclass(frozen=True)
class Machine:
    driver: str | None
    cuda_driver: str | None
    gpus: list[Gpu]
    pairs: list[Pair]
    failure: str | None = None  # why NVML could not be asked
    lost: dict[int, str] = field(default_factory=dict)  # by index, why a GPU could not be asked


def survey(nvml: Any = None) -> Machine:
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        gpus, handles, lost = _gpus(nvml)
        pairs = [_pair(nvml, a, b, handles) for a in gpus for b in gpus if a != b]
        driver = _ask(nvml, "nvmlSystemGetDriverVersion")
        version = _ask(nvml, "nvmlSystemGetCudaDriverVersion")
    except Exception as error:  # not installed, no driver, a driver of another version
        return Machine(None, None, [], [], f"{type(error).__name__}: {error}")
    cuda_driver = None if version is None else f"{version // 1000}.{version % 1000 // 10}"
    return Machine(_text(driver), cuda_driver, gpus, pairs, lost=lost)


def of(machine: Machine, uuids: set[str] | None) -> Machine:
    """The machine with the GPUs that torch sees alone, or with all where None says that these are not known."""
    if uuids is None:
        return machine
    known = {_bare(gpu.uuid) for gpu in machine.gpus}
    in_parts = bool(uuids - known)  # torch sees parts of a MIG GPU, under ids of their own
    gpus = [gpu for gpu in machine.gpus if _bare(gpu.uuid) in uuids or (gpu.mig and in_parts)]
    indices = {gpu.index for gpu in gpus}
    pairs = [pair for pair in machine.pairs if {pair.a, pair.b} <= indices]
    return replace(machine, gpus=gpus, pairs=pairs)


def no_nvlink(machine: Machine) -> bool:
    """Whether the GPUs were made, or built in, without NVLink, so that there is nothing to repair."""
    up = any(link for gpu in machine.gpus for link in gpu.links)
    return bool(machine.pairs) and not up and all(pair.nvlink in NO_NVLINK for pair in machine.pairs)


def find(machine: Machine) -> list[Finding]:
    """What is wrong with the machine's GPUs."""
    if machine.failure is not None:
        if any(Path(trace).exists() for trace in DRIVER_TRACES):
            advice = "run nvidia-smi: driver and libraries must be of one version; in a container pass the utility part"
            return [Finding("gpus", "NVML", ERROR, f"a driver is there, but not NVML ({machine.failure})", advice)]
        return [Finding("gpus", "NVML", ABSENT, f"no GPU, no driver ({machine.failure})")]
    advice = "nvidia-smi; dmesg has an Xid: reset the GPU, or restart the machine"
    lost = [
        Finding("gpus", f"GPU {index}", ERROR, f"cannot be asked: {text}", advice)
        for index, text in machine.lost.items()
    ]
    if not machine.gpus:
        return lost or [Finding("gpus", "GPUs", ABSENT, "no GPU")]
    findings = lost + [found for gpu in machine.gpus for found in _states(gpu, alone=len(machine.gpus) == 1)]
    if no_nvlink(machine):
        text = f"{len(machine.gpus)} x {machine.gpus[0].name} without NVLink: they run unfused"
        return [*findings, Finding("gpus", "NVLink", ABSENT, text)]
    findings += _links(machine.gpus) + _pairs(machine.pairs)
    if not findings:
        findings.append(Finding("gpus", "GPUs", OK, f"{len(machine.gpus)} x {machine.gpus[0].name}, all reach all"))
    if len(machine.gpus) == 1:
        findings = [each for each in findings if each.level != OK]
        findings.append(Finding("gpus", "GPUs", ABSENT, f"one GPU, {machine.gpus[0].name}: it has no peers"))
    return findings


def _states(gpu: Gpu, alone: bool) -> list[Finding]:
    name, findings = f"GPU {gpu.index}", []
    if gpu.mig:
        text = "MIG is on: no other GPU reaches its memory"
        advice = "nvidia-smi -mig 0 as root, with no job on it"
        findings.append(Finding("gpus", name, WARNING if alone else ERROR, text, advice))
    if gpu.compute_mode == "prohibited":
        findings.append(Finding("gpus", name, ERROR, "compute mode is prohibited", "nvidia-smi -c 0 as root"))
    elif gpu.compute_mode not in (None, "default"):
        text = f"compute mode is {gpu.compute_mode}: one process at a time"
        findings.append(Finding("gpus", name, WARNING, text, "checks fail beside a job; nvidia-smi -c 0 as root"))
    if gpu.fabric in ("not started", "in progress"):
        text = f"its NVSwitch fabric is {gpu.fabric}: no peer access, often no CUDA"
        findings.append(Finding("gpus", name, ERROR, text, "start nvidia-fabricmanager, of the driver's version"))
    if gpu.fabric == "completed" and gpu.fabric_status:
        text = f"its NVSwitch fabric has failed: status {gpu.fabric_status} of NVML"
        advice = "nvidia-smi -q has it under Fabric; see the log of nvidia-fabricmanager"
        findings.append(Finding("gpus", name, ERROR, text, advice))
    if gpu.slowed_by:
        text = f"slowed down now: {', '.join(gpu.slowed_by)}"
        findings.append(Finding("gpus", name, WARNING, text, "look at power and cooling; figures are not comparable"))
    return findings


def _links(gpus: Sequence[Gpu]) -> list[Finding]:
    """A finding for a GPU with fewer links than another; links that no GPU has are not missed."""
    most = max(sum(gpu.links) for gpu in gpus)
    findings = []
    for gpu in gpus:
        if sum(gpu.links) < most:
            down = [link for link, up in enumerate(gpu.links) if not up]
            which = f" (down: {', '.join(map(str, down))})" if down else ""
            text = f"{sum(gpu.links)} NVLinks are up, other GPUs have {most}{which}"
            findings.append(Finding("gpus", f"GPU {gpu.index}", WARNING, text, "nvidia-smi nvlink -s; look for Xid 74"))
    return findings


def _pairs(pairs: Sequence[Pair]) -> list[Finding]:
    """What P2P lacks. Without NVLink and writes the planner uses no peer memory; the rest is for the checks to try."""
    findings = []
    for pair in pairs:
        if pair.missing:
            level, advice = WARNING, "NVML may be wrong: what the checks say holds"
            if (pair.nvlink, pair.write) != ("ok", "ok"):
                level, advice = ERROR, "fusedcomm needs NVLink between all GPUs of a group; others run unfused"
            text = f"{'; '.join(pair.missing)} ({pair.path})"
            findings.append(Finding("gpus", f"GPUs {pair.a} -> {pair.b}", level, text, advice))
    return findings


def _gpus(nvml: Any) -> tuple[list[Gpu], dict[int, Any], dict[int, str]]:
    """The GPUs that answer, and by index their handles and others' errors. A GPU of another container is left out."""
    gpus, handles, lost = [], {}, {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(_gpu(nvml, index, handles[index]))
        except nvml.NVMLError as error:
            if getattr(error, "value", None) != NO_PERMISSION:
                lost[index] = str(error)
    return gpus, handles, lost


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    slowed = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    return Gpu(
        index,
        _text(nvml.nvmlDeviceGetName(handle)) or "",
        _text(nvml.nvmlDeviceGetUUID(handle)) or "",
        _text(_ask(nvml, "nvmlDeviceGetSerial", handle)),
        None if memory is None else memory.total,
        _on(_first(_ask(nvml, "nvmlDeviceGetMigMode", handle))),
        _on(_first(_ask(nvml, "nvmlDeviceGetEccMode", handle))),
        _on(_ask(nvml, "nvmlDeviceGetPersistenceMode", handle)),
        COMPUTE_MODES.get(_ask(nvml, "nvmlDeviceGetComputeMode", handle)),
        _ask(nvml, "nvmlDeviceGetClockInfo", handle, SM_CLOCK),
        _ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, SM_CLOCK),
        [reason for bit, reason in SLOWED.items() if slowed & bit],
        _link_states(nvml, handle),
        *_fabric(nvml, handle),
    )


def _link_states(nvml: Any, handle: Any) -> list[bool]:
    states = []
    for link in range(MAX_LINKS):
        state = _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if state is None:  # no such link
            break
        states.append(state == 1)
    return states


def _fabric(nvml: Any, handle: Any) -> tuple[str | None, int | None, int | None]:
    """The state, status and clique of the NVSwitch fabric."""
    try:
        info = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        return FABRIC.get(int(info.state)), int(info.status), int(info.cliqueId)
    except Exception:  # a driver, or a pynvml, without it
        return None, None, None


def _pair(nvml: Any, a: Gpu, b: Gpu, handles: dict[int, Any]) -> Pair:
    status, both = {}, (handles[a.index], handles[b.index])
    for name, index in CAPS.items():
        code = _ask(nvml, "nvmlDeviceGetP2PStatus", *both, index)
        status[name] = STATUS.get(6 if code is None else code, f"status {code}")
    if status["nvlink"] == "ok":
        path = f"NV{min(sum(a.links), sum(b.links))}"
    else:
        ancestor = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", *both)
        path = "unknown" if ancestor is None else LEVELS.get(ancestor, f"level {ancestor}")
    return Pair(a.index, b.index, path=path, **status)


def _ask(nvml: Any, question: str, *args: Any) -> Any:
    """The answer, or None where this driver, GPU or pynvml does not know the question."""
    try:
        return getattr(nvml, question)(*args)
    except (nvml.NVMLError, AttributeError):
        return None


def _bare(uuid: str) -> str:
    """The UUID as torch writes it."""
    return uuid.removeprefix("GPU-")


def _first(pair: Any) -> Any:
    """The current one of (current, pending)."""
    return None if pair is None else pair[0]


def _on(mode: Any) -> bool | None:
    return None if mode is None else mode == 1


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
