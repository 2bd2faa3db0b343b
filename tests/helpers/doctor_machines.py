"""Machines for the doctor's tests: an NVML of made-up GPUs, and ranks that give made-up answers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from fusedcomm.doctor import checks
from fusedcomm.launch.ranks import RankPool

UUID = "GPU-0badcafe-0000-4000-8000-00000000000"
NUM_LINKS = 18


class NvmlError(Exception):
    def __init__(self, text: str, value: int = 3) -> None:
        super().__init__(text)
        self.value = value  # as that of pynvml


class _Fabric(ctypes.Structure):
    _fields_ = [("state", ctypes.c_uint), ("status", ctypes.c_uint), ("cliqueId", ctypes.c_uint)]


@dataclass
class Nvml:
    """Stands for the module pynvml, as far as the doctor asks it. A handle is the GPU's index."""

    num_gpus: int = 2
    mig: int = 0
    compute_mode: int = 0
    slowed: int = 0
    fabric: int = 3
    fabric_status: int = 0
    num_links: int = NUM_LINKS
    refused: dict[int, NvmlError] = field(default_factory=dict)  # GPUs that cannot be opened
    links_down: set[tuple[int, int]] = field(default_factory=set)  # (gpu, link)
    p2p: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (gpu, gpu, caps index): status, if not OK
    unknown: set[str] = field(default_factory=set)  # questions that the driver does not know
    init: Exception | None = None
    NVMLError: type[Exception] = NvmlError
    c_nvmlGpuFabricInfoV_t: type = _Fabric

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in super().__getattribute__("unknown"):
            return self.refuse
        return super().__getattribute__(name)

    def refuse(self, *args: Any) -> None:
        raise NvmlError("Not Supported")

    def nvmlInit(self) -> None:
        if self.init is not None:
            raise self.init

    def nvmlDeviceGetCount(self) -> int:
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.refused:
            raise self.refused[index]
        return index

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"{UUID}{handle}".encode()

    def nvmlDeviceGetSerial(self, handle: int) -> str:
        return f"165400000000{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=141 << 30)

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [self.mig, 0]

    def nvmlDeviceGetEccMode(self, handle: int) -> list[int]:
        return [1, 1]

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:
        return 1

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return self.compute_mode

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return 345

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.slowed

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self.num_links:
            raise NvmlError("Invalid Argument")
        return int((handle, link) not in self.links_down)

    def nvmlDeviceGetGpuFabricInfoV(self, handle: int, info: Any) -> None:
        info._obj.state, info._obj.status, info._obj.cliqueId = self.fabric, self.fabric_status, 7

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, index: int) -> int:
        return self.p2p.get((a, b, index), 0)

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return 50


def shared(ranks: Callable[[int], RankPool]) -> type[checks.CheckRanks]:
    """checks.CheckRanks over the pools of the test session."""

    class Shared(checks.CheckRanks):
        def __init__(self, world_size: int, backend: str = "gloo") -> None:
            super().__init__(world_size, backend)
            self.pool = ranks(world_size)

        def __exit__(self, *exc: object) -> None:
            pass

    return Shared


def canned(answers: dict[str, Any]) -> type[checks.CheckRanks]:
    """checks.CheckRanks without processes.

    A check's answer, or the exception it raises, is given by its function's name.
    """

    class Canned(checks.CheckRanks):
        def run(self, limit_s: float, fn: Callable[..., Any], *args: Any) -> Any:
            answer = answers.get(f"{fn.__name__} {args[0] if args else ''}".strip(), answers.get(fn.__name__))
            if isinstance(answer, Exception):
                raise answer
            return answer(*args) if callable(answer) else answer

    return Canned


def rank_facts(**changes: Any) -> dict[str, Any]:
    """What a rank tells the others of itself."""
    facts: dict[str, Any] = {"host": "h", "boot": "b", "visible": None, "gpus": [], "gpu": None}
    versions = {"python": "3.11", "torch": "2.13", "triton": "3.9"}
    return {
        **facts,
        "versions": versions,
        "settings": {"FUSEDCOMM_ALGORITHM": None, "FUSEDCOMM_TIMEOUT_S": None},
    } | changes
