"""Machines for the doctor's tests: an NVML of made-up GPUs, and ranks that give made-up answers."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fusedcomm.launch.ranks import RankPool
from fusedcomm.tools import doctor_ranks

UUID = "0badcafe-0000-4000-8000-00000000000"


class NvmlError(Exception):
    value = property(lambda self: self.args[1])


class _Fabric(ctypes.Structure):
    _fields_ = [("state", ctypes.c_uint), ("status", ctypes.c_uint)]


def raises(error: Exception) -> Any:
    raise error


def fake_nvml(
    num_gpus: int = 2,
    mig: int = 0,
    fabric: tuple[int, int] = (3, 0),  # state, status
    num_links: int = 18,
    refused: tuple[Any, ...] = (),  # of the GPU 0, which cannot be opened: why
    p2p: dict[tuple[int, int, int], int] | None = None,  # (gpu, gpu, caps index): status, if not OK
    unknown: tuple[str, ...] = (),  # questions that the driver does not know
) -> Any:
    """Stands for the module pynvml, as far as the doctor asks it. A handle is the GPU's index."""

    def fill(handle: int, info: Any) -> None:
        info._obj.state, info._obj.status = fabric

    answers: dict[str, Callable[..., Any]] = {
        "Init": lambda: None,
        "DeviceGetCount": lambda: num_gpus,
        "DeviceGetHandleByIndex": lambda index: index if index or not refused else raises(NvmlError(*refused)),
        "SystemGetDriverVersion": lambda: "580.65.06",
        "SystemGetCudaDriverVersion": lambda: 13000,
        "DeviceGetName": lambda handle: "NVIDIA H200",
        "DeviceGetUUID": lambda handle: f"GPU-{UUID}{handle}",
        "DeviceGetMigMode": lambda handle: [mig, 0],
        "DeviceGetNvLinkState": lambda handle, link: int(link < num_links),
        "DeviceGetGpuFabricInfoV": fill,
        "DeviceGetP2PStatus": lambda a, b, cap: (p2p or {}).get((a, b, cap), 0),
    }
    answers |= {name: lambda *args: raises(NvmlError("Not Supported", 3)) for name in unknown}
    functions = {f"nvml{name}": answer for name, answer in answers.items()}
    return SimpleNamespace(**functions, NVMLError=NvmlError, c_nvmlGpuFabricInfoV_t=_Fabric)


def shared(ranks: Callable[[int], RankPool]) -> type[doctor_ranks.CheckRanks]:
    """doctor_ranks.CheckRanks over the pools of the test session."""

    class Shared(doctor_ranks.CheckRanks):
        def __init__(self, world_size: int, backend: str = "gloo") -> None:
            super().__init__(world_size, backend)
            self.pool = ranks(world_size)

        def close(self) -> None:
            pass

    return Shared


def canned(answers: dict[str, Any]) -> type[doctor_ranks.CheckRanks]:
    """doctor_ranks.CheckRanks without processes: an answer, or exception, is given by the check's function's name."""

    class Canned(doctor_ranks.CheckRanks):
        def run(self, limit_s: float, fn: Callable[..., Any], *args: Any) -> Any:
            answer = answers.get(f"{fn.__name__} {args[0] if args else ''}".strip(), answers.get(fn.__name__))
            return raises(answer) if isinstance(answer, Exception) else answer

    return Canned


def rank_facts(**changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"host": "h", "boot": "b", "visible": None, "gpus": [], "gpu": None}
    settings = {"FUSEDCOMM_ALGORITHM": None, "FUSEDCOMM_TIMEOUT_S": None}
    return facts | {"versions": {"python": "3.11", "torch": "2.13"}, "settings": settings} | changes
