"""The machine's GPUs and the NVLinks between them, by NVML through pynvml, or by a test's stand-in."""

import ctypes
import importlib
import itertools
import os
from dataclasses import dataclass, field, replace
from typing import Any

from fusedcomm.tools.doctor_findings import ABSENT, ERROR, OK, WARNING, Finding

CAPS = {"nvlink": 2, "write": 1}  # NVML's numbers of the vote's questions: memory/topology.py
STATUS = ("ok", "chipset not supported", "GPU not supported", "topology not supported", "disabled", "not supported")
NO_NVLINK = {STATUS[code] for code in (1, 2, 3, 5)}  # where no link is up, these say that there is none
NO_PERMISSION = 4  # NVML's error for a GPU that this process may not use
MAX_LINKS = 36
DRIVER_TRACES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    uuid: str  # as torch writes it
    mig: bool
    links: int  # NVLinks that are up
    fabric: str | None  # a fault of its NVSwitch fabric


@dataclass(frozen=True)
class Pair:
    """P2P from one GPU to another: "ok", or NVML's status."""

    a: int
    b: int
    nvlink: str
    write: str


@dataclass(frozen=True)
class Machine:
    driver: str | None = None
    cuda_driver: str | None = None
    gpus: list[Gpu] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    failure: str | None = None  # why NVML could not be asked
    lost: dict[int, str] = field(default_factory=dict)  # by index, why a GPU could not be asked


def survey(nvml: Any = None) -> Machine:
    gpus, handles, lost = [], {}, {}
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(_gpu(nvml, index, handles[index]))
            except nvml.NVMLError as error:
                if getattr(error, "value", None) != NO_PERMISSION:  # else it belongs to another container
                    lost[index] = str(error)
        found = itertools.permutations((gpu.index for gpu in gpus), 2)
        pairs = [Pair(a, b, *(_p2p(nvml, handles[a], handles[b], cap) for cap in CAPS)) for a, b in found]
        driver, cuda = (_ask(nvml, f"nvmlSystemGet{what}DriverVersion") for what in ("", "Cuda"))
        return Machine(driver, cuda and f"{cuda // 1000}.{cuda % 1000 // 10}", gpus, pairs, lost=lost)
    except Exception as error:  # not installed, no driver, a driver of another version
        return Machine(failure=f"{type(error).__name__}: {error}")


def of(machine: Machine, uuids: set[str] | None) -> Machine:
    """The machine with torch's GPUs ``uuids`` alone, or with all if they are not known (None)."""
    if uuids is None:
        return machine
    in_parts = bool(uuids - {gpu.uuid for gpu in machine.gpus})  # of a MIG GPU torch sees parts, under ids of their own
    gpus = [gpu for gpu in machine.gpus if gpu.uuid in uuids or (gpu.mig and in_parts)]
    indices = {gpu.index for gpu in gpus}
    return replace(machine, gpus=gpus, pairs=[pair for pair in machine.pairs if {pair.a, pair.b} <= indices])


def no_nvlink(machine: Machine) -> bool:
    """Whether the GPUs were made, or built in, without NVLink, so that there is nothing to repair."""
    up = any(gpu.links for gpu in machine.gpus)
    return bool(machine.pairs) and not up and all(pair.nvlink in NO_NVLINK for pair in machine.pairs)


def find(machine: Machine) -> list[Finding]:
    """The faults of the machine's GPUs."""
    wrong, count = [], len(machine.gpus)
    if machine.failure is not None and any(map(os.path.exists, DRIVER_TRACES)):
        advice = "run nvidia-smi: driver and libraries must be of one version; in a container pass the utility part"
        wrong.append(("NVML", ERROR, f"a driver is there, but not NVML ({machine.failure})", advice))
    for index, text in machine.lost.items():
        advice = "nvidia-smi; dmesg has an Xid: reset the GPU, or restart the machine"
        wrong.append((f"GPU {index}", ERROR, f"cannot be asked: {text}", advice))
    for gpu in machine.gpus:
        if gpu.mig:
            text, advice = "MIG is on: no other GPU reaches its memory", "nvidia-smi -mig 0 as root, with no job on it"
            wrong.append((f"GPU {gpu.index}", ERROR if count > 1 else WARNING, text, advice))
        if gpu.fabric:
            text, advice = f"its NVSwitch fabric is not there ({gpu.fabric})", "see the log of nvidia-fabricmanager"
            wrong.append((f"GPU {gpu.index}", ERROR, text, advice))
    for pair in machine.pairs if not no_nvlink(machine) else ():
        if missing := [f"{name}: {status}" for name in CAPS if (status := getattr(pair, name)) != "ok"]:
            advice = "fusedcomm needs NVLink between all GPUs of a group; others run unfused"
            wrong.append((f"GPUs {pair.a} -> {pair.b}", ERROR, "; ".join(missing), advice))
    model = f"{count} x {machine.gpus[0].name}" if count else ""
    if no_nvlink(machine):
        wrong.append(("NVLink", ABSENT, f"{model} without NVLink: they run unfused", ""))
    elif count < 2 and (count or not wrong):
        text = f"{model}: it has no peers" if count else f"no GPU{f' ({machine.failure})' if machine.failure else ''}"
        wrong.append(("GPUs", ABSENT, text, ""))
    return [Finding("gpus", *each) for each in wrong or [("GPUs", OK, f"{model}, all reach all by NVLink", "")]]


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    mig = _ask(nvml, "nvmlDeviceGetMigMode", handle)  # now, and after a reset
    links = sum(_ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) == 1 for link in range(MAX_LINKS))
    try:
        info = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        state, status = int(info.state), int(info.status)  # 0: there is none; 3: completed, and the status counts
        fabric = f"state {state}, status {status}" if state in (1, 2) or (state == 3 and status) else None
    except Exception:  # a driver, or a pynvml, without it
        fabric = None
    return Gpu(index, name, uuid.removeprefix("GPU-"), bool(mig and mig[0] == 1), links, fabric)


def _p2p(nvml: Any, a: Any, b: Any, cap: str) -> str:
    code = _ask(nvml, "nvmlDeviceGetP2PStatus", a, b, CAPS[cap])
    return STATUS[code] if code in range(len(STATUS)) else "unknown"


def _ask(nvml: Any, question: str, *args: Any) -> Any:
    """The answer, or None if this driver, GPU or pynvml does not know the question."""
    try:
        return getattr(nvml, question)(*args)
    except (nvml.NVMLError, AttributeError):
        return None
