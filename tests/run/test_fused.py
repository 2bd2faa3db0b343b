"""Who sends what a gather of `fused` takes: copy engines, or a kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusedcomm
from fusedcomm.memory import stream_writes, topology
from fusedcomm.plan import fused
from fusedcomm.plan.builder import Device
from fusedcomm.testing.virtual import VirtualGroup

MIB = 1 << 20


GPU = Device(is_gpu=True, writes_by_stream=True, least_copied=MIB)


@pytest.mark.parametrize(
    ("device", "run_bytes", "sends"),
    [
        (GPU, MIB, True),
        (GPU, MIB - 2, False),  # copies of short runs take SMs
        (GPU._replace(is_gpu=False), MIB, False),
        (GPU._replace(for_capture=True), MIB, False),  # a graph would fix the slots, and move the epoch
        (GPU._replace(shares_gpu=True), MIB, False),  # copies within a GPU take SMs
        (GPU._replace(writes_by_stream=False), MIB, False),  # kernels that signal take SMs
        (GPU._replace(least_copied=0), 2, True),  # a proof
    ],
    ids=str,
)
def test_copy_engines_send_only_what_takes_no_sms(device: Device, run_bytes: int, sends: bool) -> None:
    exchange: Any = SimpleNamespace(sent_run=run_bytes // 2)
    assert fused.copy_engines_send(exchange, device, 2) == sends


@pytest.mark.parametrize(
    ("captured", "least_copied", "for_capture"),
    [(True, MIB, True), (False, MIB, True), (False, 0, False), (True, 0, True)],
)
def test_a_workspace_knows_what_is_for_a_capture(
    captured: bool, least_copied: int, for_capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside `before_capture` every call is, but for a proof, and a workspace of graphs always."""
    (found,) = VirtualGroup(1, 128, "cpu").workspaces
    found.device, found.captured, found.least_copied = torch.device("cuda"), captured, least_copied
    for name in ("architecture", "triton_version"):
        monkeypatch.setattr(topology, name, lambda *args: 0)
    monkeypatch.setattr(stream_writes, "available", lambda device: True)
    with fusedcomm.before_capture():
        assert found.device_facts().for_capture == for_capture
