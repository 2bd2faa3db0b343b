"""Launches that are kept, beside such that are planned anew, in the pretended driver of tests/helpers/launch_path.py.

    python -m tests.helpers.kept_launches FOLDER ARCH

It prints a line of JSON for each call: as launches are kept, then as if a fact that they are kept by were left out.
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
from triton.tools.tensor_descriptor import TensorDescriptor

import fusedcomm
from fusedcomm.algorithms import kernel_launch
from fusedcomm.runtime import launches, signals
from tests.helpers.launch_path import ALIGNED, RAGGED, LaunchPath, call, calls_of_views, member

Calls = list[tuple[str, Callable[[], Any]]]  # by name


def kept(path: LaunchPath, *left_out: str) -> Iterator[dict[str, Any]]:
    """Calls on one workspace, each twice.

    What a kept launch gives the device must be what a new one would, and the kernel the one that Triton finds for it.
    ``left_out``: of what launches are kept by, for negative controls.
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


def _by_less(left_out: Sequence[str]) -> AbstractContextManager[Any]:
    layout: Any = launches._layout

    def less(t: Tensor | None) -> str:
        facts = zip(("dtype", "shape", "stride", "alignment"), layout(t) or (), strict=False)
        return str([fact for name, fact in facts if name not in left_out])

    return mock.patch.object(launches, "_layout", less)


@contextmanager
def _compared(path: LaunchPath) -> Iterator[dict[str, Any]]:
    """Count the launches inside that are kept, and those that are not what new ones would be."""
    found: dict[str, Any] = {"kept": 0, "wrong": []}
    launch = launches.Launch.__call__
    plans: dict[int, Callable[[], Any]] = {}

    def of_kind(workspace: Any, plan: Callable[[], Any], *facts: Any, **options: Any) -> Any:
        kept = launches.of_kind(workspace, plan, *facts, **options)
        plans[id(kept)] = plan
        return kept

    def compared(kept: Any, *tensors: Any) -> None:
        if kept._compiled is not None:
            new = plans[id(kept)]()
            arguments = new._arguments(*tensors)
            kernel = path._run(new._kernel, *arguments, grid=new._grid, warmup=True, **new._options)
            found["kept"] += 1
            same = kernel is kept._compiled and new._grid == kept._grid
            if not same or _flat(arguments) != _flat(kept._arguments(*tensors)):
                found["wrong"].append(new._kernel.__name__)
        launch(kept, *tensors)

    with (
        mock.patch.object(kernel_launch, "of_kind", of_kind),
        mock.patch.object(signals, "of_kind", of_kind),
        mock.patch.object(launches.Launch, "__call__", compared),
    ):
        yield found


def _flat(value: Any) -> Any:
    """What can be compared: addresses in place of tensors."""
    if isinstance(value, Tensor):
        return value.data_ptr(), value.dtype
    if isinstance(value, TensorDescriptor):
        return _flat(value.base), value.shape, value.strides, value.block_shape
    return tuple(map(_flat, value)) if isinstance(value, tuple) else value


def main(folder: Path, arch: int) -> None:
    path = LaunchPath(folder, arch)
    for left_out in ((), ("alignment",), ("stride",)):
        for found in kept(path, *left_out):
            print(json.dumps({"left_out": left_out} | found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
