"""What connects this host with others: its adapters, and how NCCL can use them beside a matmul."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from fusedcomm.doctor.findings import ABSENT, OK, WARNING, Finding
from fusedcomm.runtime import nccl_options

LAYERS = {"Ethernet": "RoCE"}  # what an adapter with RDMA is called that is none of InfiniBand's
DMA_BUF = (5, 12)  # the first Linux that lets adapters reach GPU memory without nvidia_peermem


def survey(sys: Path = Path("/sys")) -> dict[str, Any]:
    """What /sys says of the adapters, and torch of its NCCL."""
    return {
        "adapters": [_adapter(port) for port in sorted(sys.glob("class/infiniband/*/ports/*"))],
        "peer_memory": (sys / "module/nvidia_peermem").exists(),
        "no_zero_cta": nccl_options.no_zero_cta(),
        "zero_cta_across_hosts": nccl_options.zero_cta_across_hosts(),
        "registers_windows": nccl_options.registers_windows(),
    }


def find(found: dict[str, Any], num_gpus: int, kernel: str) -> list[Finding]:
    """What groups across hosts would have of it."""
    findings = _adapters(found["adapters"])
    if num_gpus and any(each["active"] for each in found["adapters"]):
        findings.append(_gpu_direct(found["peer_memory"], kernel))
    return findings + _nccl(found)


def _adapters(adapters: list[dict[str, Any]]) -> list[Finding]:
    down = [f"{each['name']} port {each['port']}" for each in adapters if not each["active"]]
    kinds = Counter(f"{each['layer']} {each['rate']}" for each in adapters if each["active"])
    findings = []
    if kinds:
        text = f"{', '.join(f'{count} x {kind}' for kind, count in kinds.items())}, for groups across hosts"
        findings.append(Finding("network", "adapters", OK, text))
    else:
        text = "no InfiniBand or RoCE that is up: groups across hosts go through TCP sockets"
        advice = "a container sees adapters of its host with --device=/dev/infiniband"
        findings.append(Finding("network", "adapters", ABSENT, text, advice))
    if down:
        advice = "ibstat; where GPUs have an adapter each, the others carry what this one should"
        findings.append(Finding("network", "ports", WARNING, f"down: {', '.join(down)}", advice))
    return findings


def _gpu_direct(loaded: bool, kernel: str) -> Finding:
    if loaded:
        return Finding("network", "GPUDirect RDMA", OK, "nvidia_peermem is loaded: adapters reach GPU memory")
    text = "nvidia_peermem is not loaded"
    numbers = tuple(map(int, re.findall(r"\d+", kernel)[:2]))
    if numbers >= DMA_BUF:
        text = f"{text}; DMA-BUF does the same with the driver's open kernel modules (not tried)"
        return Finding("network", "GPUDirect RDMA", OK, text)
    text = f"{text}, and Linux {kernel} has no DMA-BUF: what GPUs send to other hosts is copied to the host first"
    return Finding("network", "GPUDirect RDMA", WARNING, text, "modprobe nvidia-peermem as root")


def _nccl(found: dict[str, Any]) -> list[Finding]:
    """What NCCL can do without SMs: those are what a matmul loses to a collective beside it."""
    version, reason = nccl_options.nccl_version_text(), found["no_zero_cta"]
    if reason is not None and version is None:
        return [Finding("network", "NCCL", ABSENT, f"{reason}: groups across hosts use gloo")]
    if reason is not None:
        text = f"no collectives without SMs: {reason}"
        return [Finding("network", "NCCL", ABSENT, text, "torch 2.11 or newer, in its CUDA build")]
    findings = []
    if found["zero_cta_across_hosts"]:
        text = f"NCCL {version} can run all_gather and all_to_all without SMs, across hosts too"
        findings.append(Finding("network", "NCCL", OK, f"{text}; opt-in: fusedcomm.nccl_options()"))
    else:
        least = ".".join(map(str, nccl_options.ACROSS_HOSTS))
        text = f"NCCL {version} can run all_gather and all_to_all without SMs inside a host, not across"
        advice = (
            f"NCCL {least}, as in torch 2.14 with CUDA 13: a matmul beside them would keep all SMs across hosts too"
        )
        findings.append(Finding("network", "NCCL", ABSENT, text, advice))
    if not found["registers_windows"]:
        text = "this torch registers no symmetric windows: collectives keep their SMs, whatever the options say"
        advice = "a release of torch whose ProcessGroupNCCL.register_mem_pool has the argument symm"
        findings.append(Finding("network", "registered memory", ABSENT, text, advice))
    else:
        text = "torch can register a pool of memory as symmetric windows, which docs/hosts.md shows"
        findings.append(Finding("network", "registered memory", OK, text))
    return findings


def _adapter(port: Path) -> dict[str, Any]:
    layer = _read(port / "link_layer")
    return {
        "name": port.parents[1].name,
        "port": port.name,
        "layer": LAYERS.get(layer, layer),
        "rate": _read(port / "rate"),
        "active": "ACTIVE" in _read(port / "state"),
    }


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return "unknown"
