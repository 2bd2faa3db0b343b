"""Rows of experts without a group: what the host calls, and torch's grouped matmul."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.plan.routing import Routing, counts_of
from fusedcomm.run import routed_rows
from fusedcomm.run.routed_rows import ByCollective
from tests.helpers.spies import Dispatched
from tests.helpers.token_rows import routings

H = 6


@pytest.mark.parametrize("num_pieces", [1, 2])
def test_calls_of_the_host_do_not_grow_with_experts(num_pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links idle while the host, which has waited for the counts, prepares `unfused` and `pipelined` exchanges."""
    monkeypatch.setattr(routed_rows, "dist", SimpleNamespace(all_to_all_single=mock.Mock()))
    monkeypatch.setattr(routed_rows, "group", mock.Mock())
    way, x = ByCollective(CallMemory(0, 2, "", torch.device("cpu")), num_pieces), torch.ones(64, H)

    def calls(num_experts: int) -> list[str]:
        ids = torch.arange(128) % num_experts
        packed, _ = routings([ids] * 2, 2, num_experts, capacity=512, alignment=8)
        with Dispatched() as host:
            way.counts(counts_of(ids, num_experts))
            rows, _ = way.dispatch(x, None, [], 2, Routing(packed, 0, 2, 128), 512)
            way.collect(rows, None, Routing(packed, 0, 2, 128))
        return [name for name, _ in host.calls]

    assert calls(64) == calls(8)


@pytest.mark.parametrize(
    ("dtype", "n", "arch", "takes"),
    [
        (torch.bfloat16, 8, 90, True),
        (torch.bfloat16, 8, 80, None),
        (torch.float32, 4, 90, None),
        (torch.float32, 5, 90, False),
        (torch.float64, 4, 90, False),
    ],
)
def test_grouped_matmuls_of_torch(monkeypatch: Any, dtype: torch.dtype, n: int, arch: int, takes: bool | None) -> None:
    """``takes``: None where torch multiplies, but waits for the host."""
    size = {"device": torch.device("cuda"), "dtype": dtype, "itemsize": dtype.itemsize, "is_cuda": True}
    h, w = (SimpleNamespace(shape=shape, **size) for shape in ((3, 8), (2, 8, n)))
    monkeypatch.setattr(routed_rows, "architecture", lambda device: arch)
    monkeypatch.setattr(routed_rows, "is_for_capture", lambda device: False)
    assert routed_rows._torch_takes(h, w) == (takes is not False)
    monkeypatch.setattr(routed_rows, "is_for_capture", lambda device: True)
    with nullcontext() if takes else pytest.raises(RuntimeError, match="must be of bfloat16"):
        assert routed_rows._torch_takes(h, w)
