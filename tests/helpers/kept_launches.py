"""Kept schedules and kernels, beside such that are made anew, in the pretended driver of tests/helpers/launch_path.py.

    python -m tests.helpers.kept_launches FOLDER ARCH

It prints a line of JSON for each call: as calls are kept, then as if a fact that they are kept by were left out.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fusedcomm
from fusedcomm.ops import dispatch
from fusedcomm.plan.builder import Layout, layout_of
from fusedcomm.run import calls, launching, python_executor
from tests.helpers.launch_path import ALIGNED, RAGGED, LaunchPath, call, calls_of_views, member

Calls = list[tuple[str, Callable[[], Any]]]  # by name


def kept(path: LaunchPath, *left_out: str) -> Iterator[dict[str, Any]]:
    """Calls on one workspace, each twice.

    A kept schedule must be what a new one would be, and the kernel the one that Triton finds for it. ``left_out``: of
    what calls are kept by, for negative controls.
    """
    inputs: Calls = [(str(each), partial(call, each, torch.bfloat16, False)) for each in [*RAGGED, *ALIGNED]]
    with path.gpu.kept(), fusedcomm.force_algorithm("fused", strict=True), _by_less(left_out):
        views: Calls = list(calls_of_views())  # which alone differ in what can be left out
        with member(path):
            for turn, (name, start) in itertools.product(range(2), views if left_out else [*inputs, *views]):
                with _compared(path) as found:
                    case = path.case(name, start)
                launched = [each["kernel"] for each in case["launches"]]
                yield {"case": name, "turn": turn, "refused": case["refused"], "launched": launched, **found}


class _Less(Layout):
    """Equal to those that differ in ``left_out`` alone."""

    left_out: Sequence[str] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Less) and self._rest() == other._rest()

    def __hash__(self) -> int:
        return hash(self._rest())

    def _rest(self) -> tuple[Any, ...]:
        return tuple(value for name, value in self._asdict().items() if name not in self.left_out)


def _by_less(left_out: Sequence[str]) -> AbstractContextManager[Any]:
    less = type("Less", (_Less,), {"left_out": left_out})
    return mock.patch.object(dispatch, "layout_of", lambda t: less(*layout_of(t)))


@contextmanager
def _compared(path: LaunchPath) -> Iterator[dict[str, Any]]:
    """Count the launches inside that are kept, and the calls and launches that are not what new ones would be."""
    found: dict[str, Any] = {"kept": 0, "wrong": []}
    schedule_of = calls.schedule_of

    def compared_schedule(plan: Any, memory: Any, *program: Any) -> Any:
        kept = schedule_of(plan, memory, *program)
        if calls.build(plan, memory, *program) != kept:
            found["wrong"].append(program[0])
        return kept

    def compared_launch(work: Any, workspace: Any, fingerprint: int, tensor: Callable[[Any], Tensor]) -> None:
        if id(work) in workspace.kernels:
            arguments = [launching._resolved(each, workspace, fingerprint, tensor) for each in work.arguments]
            function, options = launching.kernel(work.kernel), dict(work.options)
            kernel = path._run(function, *arguments, grid=(work.num_programs,), warmup=True, **options)
            found["kept"] += 1
            if kernel is not workspace.kernels[id(work)][1]:
                found["wrong"].append(work.kernel)
        launching.launch(work, workspace, fingerprint, tensor)

    with (
        mock.patch.object(calls, "schedule_of", compared_schedule),
        mock.patch.object(python_executor, "launch", compared_launch),
    ):
        yield found


def main(folder: Path, arch: int) -> None:
    path = LaunchPath(folder, arch)
    for left_out in ((), ("alignment",), ("strides",)):
        for found in kept(path, *left_out):
            print(json.dumps({"left_out": left_out} | found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
