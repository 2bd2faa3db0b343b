"""Faults in prepared calls, which call no function of the package: a step is an op of torch, by its memory.

All that the lab knows of plans is here, but for `Cell.prepared`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusedcomm.kernels.native_part import loaded
from fusedcomm.memory.segment import FINGERPRINT_BITS
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import dispatch
from tests.faults.steps import CALL, CALLS, LATER_CALL, STOPPING, Fault, GoOn, Reached, replaced

SLOTS = ("push", "signal", "read")  # about to write a chunk into a slot, about to signal it, about to read one
WAIT = "wait"  # a wait that is over soon stays in C++, and a longer one comes to Python
NUM_UNPREPARED = 3  # calls in Python before one is prepared: the first makes the workspace, the third makes the plan
LATER_S = 0.3  # longer than a wait in C++

_NO_TENSOR_HAS_IT = "TESTING_ONLY_GenericMode"  # a dispatch key before all others, also in C++

See = Callable[[Any, tuple[Any, ...], dict[str, Any], GoOn], Any]  # op, its arguments, and what runs it


def faults_and_steps(op: str) -> Iterator[tuple[str, str]]:
    for step in (CALL, *SLOTS, WAIT):
        for fault in STOPPING:
            yield fault, step
    for fault in CALLS:
        yield fault, LATER_CALL


@contextmanager
def noting_python(workspaces: Callable[[], list[Workspace]], ops: list[str]) -> Iterator[None]:
    """Add to ``ops`` the calls inside that run in Python, unless a rank has failed before."""
    prepare = dispatch.prepare

    def noted(op: str, *args: Any, **kwargs: Any) -> Any:
        if not any(each.breakers(each.epoch + 1) for each in workspaces()):
            ops.append(op)
        return prepare(op, *args, **kwargs)

    with mock.patch.object(dispatch, "prepare", noted):
        yield


def line_up(workspace: Workspace, step: str, victim: int, bound_s: float) -> None:
    """A wait is only reached where the others come later."""
    if step == WAIT and workspace.rank != victim:
        until_signalled(workspace, victim, bound_s)
        time.sleep(LATER_S)


def at_op(workspace: Workspace, step: str, fault: Fault) -> AbstractContextManager[Reached]:
    """Inside, the first time that this thread comes to the step in a prepared call, it meets ``fault``."""
    if step == WAIT:
        return replaced("fusedcomm.ops.prepared:Rescue.wait", fault)
    return _at_memory(workspace, step, fault)


@contextmanager
def _at_memory(workspace: Workspace, step: str, fault: Fault) -> Iterator[Reached]:
    reached = Reached()
    peers = [buffer for rank, buffer in enumerate(workspace.buffers) if rank != workspace.rank]
    memory, written = ([workspace.segment], False) if step == "read" else (peers, True)

    def see(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], go_on: GoOn) -> Any:
        touched = [] if reached.yes else _tensors(op, args, kwargs, written)
        if not any(_lies_in(t, buffer) for t in touched for buffer in memory):
            return go_on()
        reached.yes = True
        if step == "signal":  # once the chunk is written
            made = go_on()
            return _unseen(fault, lambda: made)
        return _unseen(fault, go_on)

    with ops_seen(see):
        yield reached


@contextmanager
def ops_seen(see: See) -> Iterator[None]:
    """Inside, ``see`` runs in place of each op of torch that this thread calls, also in C++."""
    library = torch.library.Library("_", "IMPL")

    def fallback(keys: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op.namespace == "aten":  # what it calls is none of the steps
            return see(op, args, kwargs, partial(_unseen, op, *args, **kwargs))
        return see(op, args, kwargs, partial(op.redispatch, keys - _keys(), *args, **kwargs))

    library.fallback(fallback, _NO_TENSOR_HAS_IT, with_keyset=True)
    try:
        with torch._C._IncludeDispatchKeyGuard(_key()):
            yield
    finally:
        library._destroy()


def _unseen(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_keys()):
        return function(*args, **kwargs)


def until_signalled(workspace: Workspace, src_rank: int, bound_s: float) -> None:
    epoch, deadline = workspace.epoch + 1, time.monotonic() + bound_s
    flag = workspace.addresses[workspace.rank] + workspace.layout.flag(epoch, src_rank)
    while loaded().load(flag) >> FINGERPRINT_BITS < epoch:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {src_rank} must come to round {epoch} within {bound_s:g} s")
        time.sleep(0.001)


def _tensors(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: bool) -> Iterator[Tensor]:
    """The tensors that an op writes, or those that it only reads."""
    for i, argument in enumerate(op._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if written == (argument.alias_info is not None and argument.alias_info.is_write):
            yield from (t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor))


def _lies_in(t: Tensor, buffer: Tensor) -> bool:
    return buffer.data_ptr() <= t.data_ptr() < buffer.data_ptr() + buffer.nbytes


def _key() -> Any:
    return torch._C._parse_dispatch_key(_NO_TENSOR_HAS_IT)


def _keys() -> Any:
    return torch._C.DispatchKeySet(_key())
