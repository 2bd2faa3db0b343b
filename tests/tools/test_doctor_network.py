"""What the doctor says of the ways to other hosts: adapters in a made-up /sys, and made-up builds of NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusedcomm.doctor import network
from fusedcomm.doctor.findings import ABSENT, OK, WARNING, Finding
from fusedcomm.runtime import nccl_options

NEW, OLD = "6.8.0-45-generic", "5.4.0-150"


def port(sys: Path, name: str, layer: str = "InfiniBand", rate: str = "400 Gb/sec (4X NDR)", state: str = "") -> None:
    folder = sys / "class/infiniband" / name / "ports/1"
    folder.mkdir(parents=True)
    for file, text in (("link_layer", layer), ("rate", rate), ("state", state or "4: ACTIVE")):
        (folder / file).write_text(f"{text}\n")


def found(sys: Path, num_gpus: int = 8, kernel: str = NEW) -> dict[str, Finding]:
    """The findings by name, of which none hides another."""
    findings = network.find(network.survey(sys), num_gpus, kernel)
    by_name = {each.name: each for each in findings}
    assert len(by_name) == len(findings) and {each.section for each in findings} == {"network"}
    assert all(each.advice for each in findings if each.level == WARNING)
    return by_name


def test_adapters_are_counted_by_kind_and_a_port_that_is_down_is_named(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_bond_0", "Ethernet", "100 Gb/sec (4X EDR)")
    seen = found(tmp_path)
    assert (seen["adapters"].level, "ports" in seen) == (OK, False)
    kinds = "1 x InfiniBand 400 Gb/sec (4X NDR), 1 x RoCE 100 Gb/sec (4X EDR)"
    assert seen["adapters"].text == f"{kinds}, for groups across hosts"
    port(tmp_path, "mlx5_1", state="1: DOWN")
    seen = found(tmp_path)
    assert seen["adapters"].text.startswith("1 x InfiniBand")
    assert (seen["ports"].level, seen["ports"].text) == (WARNING, "down: mlx5_1 port 1")


def test_a_host_without_adapters_has_sockets(tmp_path: Path) -> None:
    seen = found(tmp_path)
    assert seen["adapters"].level == ABSENT and "TCP sockets" in seen["adapters"].text
    assert "GPUDirect RDMA" not in seen
    port(tmp_path, "mlx5_0", state="1: DOWN")
    assert found(tmp_path)["adapters"].level == ABSENT


@pytest.mark.parametrize("loaded, kernel, level", [(True, OLD, OK), (False, NEW, OK), (False, OLD, WARNING)])
def test_whether_adapters_reach_gpu_memory(tmp_path: Path, loaded: bool, kernel: str, level: str) -> None:
    port(tmp_path, "mlx5_0")
    if loaded:
        (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    finding = found(tmp_path, kernel=kernel)["GPUDirect RDMA"]
    assert (finding.level, "is loaded" in finding.text) == (level, loaded)
    assert "GPUDirect RDMA" not in found(tmp_path, num_gpus=0)


def nccl(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    usual = {
        "no_zero_cta": None,
        "nccl_version_text": "2.30.7",
        "zero_cta_across_hosts": True,
        "registers_windows": True,
    }
    for name, value in (usual | facts).items():
        monkeypatch.setattr(nccl_options, name, lambda value=value: value)


def test_what_nccl_can_do_without_sms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nccl(monkeypatch)
    seen = found(tmp_path)
    assert seen["NCCL"].level == seen["registered memory"].level == OK
    assert "across hosts too; opt-in: fusedcomm.nccl_options()" in seen["NCCL"].text

    nccl(monkeypatch, nccl_version_text="2.29.7", zero_cta_across_hosts=False, registers_windows=False)
    seen = found(tmp_path)
    assert seen["NCCL"].level == seen["registered memory"].level == ABSENT
    assert seen["NCCL"].text.startswith("NCCL 2.29.7 ") and seen["NCCL"].text.endswith("inside a host, not across")
    assert seen["NCCL"].advice.startswith("NCCL 2.30.7, as in torch 2.14 with CUDA 13")
