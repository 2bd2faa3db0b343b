"""Launches of a step, and which calls have one plan and one schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedcomm.ops import dispatch, table
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.plan.builder import Device
from fusedcomm.plan.call_plan import Plan
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


def test_kernels_of_a_workspace_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MOST_KEPT", 4)
    monkeypatch.setattr(launching, "kernel", lambda name: Kernel(True))
    (workspace,) = VirtualGroup(1, 128, "cpu").workspaces
    for _ in range(9):
        launching.launch(Launch("module.kernel", 1, (), ()), workspace, 1, lambda place: torch.zeros(1))
    assert 0 < len(workspace.kernels) <= 4


def test_a_plan_has_another_schedule_for_another_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, x, w = VirtualGroup(2, 1 << 12, "cpu").workspaces[0], torch.zeros(8, 8), torch.zeros(8, 4)
    plan = Plan("op", "fused", "test", exchange=shapes.matmul_all_to_all(x.shape, w.shape, None, 0, 1, 2))
    made = [calls.schedule_of(plan, workspace, "push_matmul", (x, w, None, None), {}) for _ in range(2)]
    for device in (Device(num_sms=2), Device(allow_tf32=True), Device(architecture=90)):
        monkeypatch.setattr(workspace, "device_facts", lambda device=device: device)
        made.append(calls.schedule_of(plan, workspace, "push_matmul", (x, w, None, None), {}))
    assert len({id(each) for each in made}) == 4 and made[0] is made[1] and made[-1] is plan.schedule


def test_calls_that_differ_are_of_other_kinds() -> None:
    x, w = torch.zeros(8, 8), torch.zeros(8, 4)
    behind, spec = torch.zeros(65)[1:].view(8, 8), table.MATMUL_ALL_TO_ALL
    assert behind.data_ptr() % 16
    args = Arguments(x, [w], [None], 2, "group", gather_dim=0, scatter_dim=1)
    kinds = [
        dispatch.kind_of(spec, each)
        for each in (
            args,
            *(args._replace(x=t) for t in (torch.ones(8, 8), behind, x.mT, x.bfloat16(), x[:6])),
            *(args._replace(gather_dim=1), args._replace(out_shape=[2, 2]), args._replace(biases=[torch.zeros(4)])),
        )
    ]
    assert kinds[0] == kinds[1] and len({*kinds}) == len(kinds) - 1
