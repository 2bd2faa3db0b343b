"""Who sends what a gather of `fused` takes: copy engines, or a kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedcomm.algorithms import fused
from fusedcomm.runtime import stream_writes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("change", "sends"),
    [
        ({}, True),
        ({"run_bytes": MIB - 2}, False),  # copies of short runs take SMs
        ({"device": "cpu"}, False),
        ({"captured": True}, False),  # the host does not know the epoch
        ({"shares_gpu": True}, False),  # copies within a GPU take SMs
        ({"for_capture": True}, False),  # a graph would fix the slots
        ({"for_capture": True, "least_copied": 0}, True),  # a proof before a capture
        ({"writes_words": False}, False),  # kernels that signal take SMs
        ({"run_bytes": 2, "least_copied": 0}, True),  # a proof
    ],
    ids=str,
)
def test_copy_engines_send_only_what_takes_no_sms(
    change: dict[str, Any], sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"run_bytes": MIB, "device": "cuda", "for_capture": False, "writes_words": True, **change}
    monkeypatch.setattr(fused, "is_for_capture", lambda device: given["for_capture"])
    monkeypatch.setattr(stream_writes, "available", lambda device: given["writes_words"])
    workspace = SimpleNamespace(
        device=torch.device(given["device"]),
        captured=given.get("captured", False),
        shares_gpu=given.get("shares_gpu", False),
        least_copied=given.get("least_copied", MIB),
    )
    exchange = SimpleNamespace(sent_run=given["run_bytes"] // 2, gathers=True)
    call: Any = SimpleNamespace(workspace=workspace, exchange=exchange)
    assert fused._copy_engines_send(call, 2) == sends
    assert fused.loads_for_capture(call, 2) != sends  # a graph has the kernel that sends
    exchange.gathers = False
    assert fused.loads_for_capture(call, 2)
