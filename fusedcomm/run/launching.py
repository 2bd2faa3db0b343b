"""Launches of Triton kernels from schedules."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan.schedule import Described, Fingerprint, Launch, Place, Table

_MOST_KEPT = 4096  # kernels of a workspace; with more, as when sizes keep changing, it begins anew


def launch(work: Launch, workspace: Workspace, fingerprint: int, tensor: Callable[[Place], Tensor]) -> None:
    """Launch a kernel on the current stream.

    Triton finds the compiled kernel by a look at every argument, the longest part of a launch. A step's arguments
    differ between runs in addresses alone, of one alignment: so it keeps its kernel.
    """
    arguments = [_resolved(each, workspace, fingerprint, tensor) for each in work.arguments]
    kept = workspace.kernels.get(id(work))
    if kept is not None:
        kept[1][work.num_programs, 1, 1](*arguments)
        return
    compiled = kernel(work.kernel)[(work.num_programs,)](*arguments, **dict(work.options))
    if hasattr(type(compiled), "__getitem__"):  # neither futures of Triton nor None have it
        if len(workspace.kernels) >= _MOST_KEPT:
            workspace.kernels.clear()
        workspace.kernels[id(work)] = work, compiled  # which keeps its id


@functools.cache
def kernel(name: str) -> Any:
    """A `Launch.kernel` as a function of Triton."""
    module, function = name.split(".")
    return getattr(importlib.import_module(f"fusedcomm.kernels.triton.{module}"), function)


def _resolved(argument: Any, workspace: Workspace, fingerprint: int, tensor: Callable[[Place], Tensor]) -> Any:
    match argument:
        case Place():
            return tensor(argument)
        case Described(place, shape, strides, block):
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(tensor(place), list(shape), list(strides), list(block))
        case Table():
            return workspace.segments
        case Fingerprint():
            return fingerprint
        case _:
            return argument
