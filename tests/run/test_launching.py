"""Launches of a step, and which calls have one schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedcomm.memory.workspace import Call
from fusedcomm.plan import chunked, fused
from fusedcomm.plan.builder import Device
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.schedule import Launch
from fusedcomm.run import calls, launching
from fusedcomm.testing.virtual import VirtualGroup


class Kernel:
    """Notes what it was launched with, by itself or as what it has compiled."""

    def __init__(self, compiles: Any) -> None:
        self.compiles, self.launched = compiles, list[Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: int) -> Any:
            self.launched.append((grid, args, options))
            return {True: Compiled(self), False: None, "future": object()}[self.compiles]

        return launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.kernel.launched.append((grid, args))


@pytest.mark.parametrize("compiles", [True, False, "future"])  # a future: Triton compiles on a thread
def test_the_second_launch_takes_what_was_compiled(compiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, (workspace,) = Kernel(compiles), VirtualGroup(1, 128, "cpu").workspaces
    monkeypatch.setattr(launching, "kernel", lambda name: kernel)
    work = Launch("module.kernel", 5, (7,), (("num_warps", 4),))
    for _ in range(2):
        launching.launch(work, workspace, 1, lambda place: torch.zeros(1))
    second = ((5, 1, 1), (7,)) if compiles is True else ((5,), (7,), {"num_warps": 4})
    assert kernel.launched == [((5,), (7,), {"num_warps": 4}), second]
    assert len(workspace.kernels) == (compiles is True)


def schedule(workspace: Any, x: torch.Tensor, w: torch.Tensor, exchange: Any, program: Any = fused.push_matmul) -> Any:
    return calls.schedule_of(Call("op", 1, exchange, workspace), program, x, w, None, None)


def exchange_of(x: torch.Tensor, w: torch.Tensor) -> Any:
    return shapes.matmul_all_to_all(x.shape, w.shape, None, 0, 1, 2)


def test_what_differs_has_another_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, x, w = VirtualGroup(2, 1 << 12, "cpu").workspaces[0], torch.zeros(8, 8), torch.zeros(8, 4)
    exchange = exchange_of(x, w)
    first = schedule(workspace, x, w, exchange)
    assert schedule(workspace, torch.ones(8, 8), w, exchange) is first
    behind = torch.zeros(65)[1:].view(8, 8)
    assert behind.data_ptr() % 16
    others = [
        schedule(workspace, behind, w, exchange),
        schedule(workspace, x.mT, w, exchange),
        schedule(workspace, x.bfloat16(), w.bfloat16(), exchange),
        schedule(workspace, x[:6], w, exchange_of(x[:6], w)),
        schedule(workspace, x, w, exchange, chunked.push_matmul),
    ]
    for device in (Device(num_sms=2), Device(allow_tf32=True), Device(architecture=90)):
        monkeypatch.setattr(workspace, "device_facts", lambda device=device: device)
        others.append(schedule(workspace, x, w, exchange))
    assert len({id(each) for each in (first, *others)}) == 1 + len(others)


def test_there_is_an_end_to_schedules_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MOST_KEPT", 4)
    monkeypatch.setattr(launching, "_MOST_KEPT", 4)
    monkeypatch.setattr(launching, "kernel", lambda name: Kernel(True))
    workspace, w = VirtualGroup(2, 1 << 12, "cpu").workspaces[0], torch.zeros(8, 4)
    for rows in range(2, 20, 2):
        x = torch.zeros(rows, 8)
        schedule(workspace, x, w, exchange_of(x, w))
        launching.launch(Launch("module.kernel", 1, (), ()), workspace, 1, lambda place: w)
    assert len(workspace.schedules) <= 4 and len(workspace.kernels) <= 4
