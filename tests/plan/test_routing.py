"""A routing is made on its device: nothing comes from the host or goes there. Its values: tests/ops/test_moe.py."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from fusedcomm.plan.routing import Routing, counts_of, pack


def test_nothing_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meta tensor has no values: whoever asks for one gets an error, as the control does."""
    monkeypatch.setattr(Tensor, "new_tensor", mock.Mock(side_effect=AssertionError))  # a copy of the host's numbers
    ids = torch.empty(24, dtype=torch.int64, device="meta")
    packed = pack(ids, 2, counts_of(ids, 4).repeat(2, 1), 1, 16, 4)
    with pytest.raises(NotImplementedError):
        Routing(packed, 1, 2, 24).runs(0, 1)
