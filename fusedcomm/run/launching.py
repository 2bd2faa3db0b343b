"""Launches of Triton kernels from schedules."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fusedcomm.plan.schedule import Launch, Place
from fusedcomm.runtime.workspace import Workspace


def launch(work: Launch, workspace: Workspace, fingerprint: int, tensor: Callable[[Place], Tensor]) -> None:
    raise NotImplementedError
