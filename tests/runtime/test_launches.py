"""Launches of a kind are planned once (fusedcomm.runtime.launches)."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from fusedcomm.algorithms import kernel_launch
from fusedcomm.geometry import shapes
from fusedcomm.runtime import launches
from fusedcomm.runtime.launches import Launch, of_kind
from tests.helpers.virtual_ranks import FINGERPRINT, virtual_ranks


class Workspace:
    pass


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
def test_the_second_launch_takes_what_was_compiled(compiles: Any) -> None:
    kernel, (x, y) = Kernel(compiles), torch.zeros(2, 3)
    launch = Launch(kernel, (5,), lambda t: (t, 7), num_warps=4)
    for t in (x, y):
        launch(t)
    second = ((5, 1, 1), (y, 7)) if compiles is True else ((5,), (y, 7), {"num_warps": 4})
    first, found = kernel.launched
    assert first[0] == (5,) and first[1][0] is x and first[2] == {"num_warps": 4}
    assert found[0] == second[0] and found[1][0] is y and found[2:] == second[2:]


def planned(workspace: Any, *facts: Any, t: torch.Tensor | None = None, by: object = None, name: str = "push") -> Any:
    return of_kind(workspace, lambda: Launch(None, (1,), lambda: ()), name, *facts, tensors=(t,), by=by)


def test_what_differs_is_another_kind() -> None:
    workspace, t, by = Workspace(), torch.zeros(8, 8), object()
    first = planned(workspace, 1, t=t, by=by)
    assert planned(workspace, 1, t=torch.ones(8, 8), by=by) is first
    behind = torch.zeros(65)[1:].view(8, 8)
    assert behind.data_ptr() % 16
    others = [
        planned(Workspace(), 1, t=t, by=by),
        planned(workspace, 2, t=t, by=by),
        planned(workspace, 1, t=t, by=by, name="pack"),
        planned(workspace, 1, t=t, by=object()),
        planned(workspace, 1, by=by),
        *(planned(workspace, 1, t=other, by=by) for other in (t.bfloat16(), t[:7], t.mT, behind)),
    ]
    assert len({id(each) for each in (first, *others)}) == 1 + len(others)


def test_a_kind_goes_with_its_workspace_and_keeps_what_it_is_told_by() -> None:
    workspace, by = Workspace(), Workspace()
    launch = planned(workspace, by=by)
    refs = weakref.ref(launch), weakref.ref(by)
    del launch, by
    assert all(ref() is not None for ref in refs)  # the id of another would be taken for it
    del workspace
    assert all(ref() is None for ref in refs)


def test_there_is_an_end_to_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_MOST_KINDS", 4)
    workspace = Workspace()
    for number in range(9):
        planned(workspace, number)
    assert len(launches._kinds[workspace]) == 1


def test_other_sms_and_another_precision_are_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    own, out = virtual_ranks(2, 1 << 12)[0], torch.ones(32, 3)
    (spans,) = shapes.matmul_all_to_all((16, 8), (8, 6), None, 0, 1, 2).rounds(1 << 20)
    grids: list[int] = []

    def grid(kind: str, workspace: Any, num_tiles: int) -> tuple[int]:
        grids.append(num_tiles)
        return (1,)

    monkeypatch.setattr(kernel_launch, "_grid", grid)
    for num_programs, tf32, num_plans in ((2, False, 1), (2, False, 1), (1, False, 2), (1, True, 3), (2, False, 3)):
        monkeypatch.setattr(own, "num_programs", lambda kind, num=num_programs: num)
        monkeypatch.setattr(kernel_launch, "tf32_allowed", lambda allowed=tf32: allowed)
        kernel_launch.pack(out, spans, own, FINGERPRINT)
        assert len(grids) == num_plans
