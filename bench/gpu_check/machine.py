"""The GPU, its driver, and the versions and the commit that all other results are of."""

import importlib
from typing import Any

import torch

from fusedcomm.bench.gpu_check import child
from fusedcomm.env import environment
from fusedcomm.launch.provenance import run_facts
from fusedcomm.memory import triton_probe


def cases(device: torch.device) -> child.Cases:
    return {"machine": lambda: machine(device)}


def machine(device: torch.device) -> dict[str, Any]:
    facts = {
        **{key: value for key, value in run_facts().items() if key != "command"},
        **_driver(),
        "environment": environment(),
        "triton_cannot_launch": triton_probe.cannot_launch(device),
    }
    return {**facts, "gpu": _gpu()} if device.type == "cuda" else facts


def _driver() -> dict[str, str | None]:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        driver, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion()
    except Exception as error:  # not installed, no driver, a driver of another version
        return {"driver": None, "cuda_driver": None, "nvml_failure": f"{type(error).__name__}: {error}"}
    return {"driver": driver, "cuda_driver": f"{cuda // 1000}.{cuda % 1000 // 10}", "nvml_failure": None}


def _gpu() -> dict[str, Any]:
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
    }
