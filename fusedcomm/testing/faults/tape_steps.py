"""Steps of a call that runs on a tape, which calls no function of the package: its ops of torch, by their memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedcomm.runtime.native_part import loaded
from fusedcomm.runtime.segment import FINGERPRINT_BITS
from fusedcomm.runtime.workspace import Workspace
from fusedcomm.testing.faults.protocol_steps import Fault, GoOn, Reached, replaced

SLOTS = ("push", "signal", "read")  # about to write a chunk into a slot, about to signal it, about to read one
IN_RESULTS = ("place", "mark")  # about to write a chunk into a peer's result, about to say so
WAIT = "wait"  # a wait that is over soon stays in C++, and a longer one comes to Python

_NO_TENSOR_HAS_IT = "TESTING_ONLY_GenericMode"  # a dispatch key before all others, also in C++
_WORD = 8

See = Callable[[Any, tuple[Any, ...], dict[str, Any], GoOn], Any]  # op, its arguments, and what runs it


def at_op(workspace: Workspace, step: str, fault: Fault) -> AbstractContextManager[Reached]:
    """Inside, the first time that this thread comes to the step in a call on a tape, it meets ``fault``."""
    if step == WAIT:
        return replaced("fusedcomm.ops.prepared:Rescue.wait", fault)
    return _at_memory(workspace, step, fault)


@contextmanager
def _at_memory(workspace: Workspace, step: str, fault: Fault) -> Iterator[Reached]:
    reached = Reached()
    peers = [buffer for rank, buffer in enumerate(_buffers(workspace, step)) if rank != workspace.rank]
    memory, written = ([workspace.segment], False) if step == "read" else (peers, True)

    def see(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], go_on: GoOn) -> Any:
        touched = [] if reached.yes else _tensors(op, args, kwargs, written)
        if not any(_lies_in(t, buffer) for t in touched for buffer in memory):
            return go_on()
        reached.yes = True
        if step in ("signal", "mark"):  # once the chunk is written
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


def until_posted(workspace: Workspace, bound_s: float) -> None:
    """Return when every peer has said where its result of the next round is."""
    own = workspace.addresses[workspace.rank]
    stamps = [own + workspace.layout.post(r) + 2 * _WORD for r in range(workspace.group_size) if r != workspace.rank]
    _until_epoch(stamps, workspace.epoch + 1, bound_s)


def until_signalled(workspace: Workspace, src_rank: int, bound_s: float) -> None:
    """Return when src_rank has signalled the next round."""
    flag = workspace.addresses[workspace.rank] + workspace.layout.flag(workspace.epoch + 1, src_rank)
    _until_epoch([flag], workspace.epoch + 1, bound_s)


def _until_epoch(words: Sequence[int], epoch: int, bound_s: float) -> None:
    deadline = time.monotonic() + bound_s
    while any(loaded().load(word) >> FINGERPRINT_BITS < epoch for word in words):
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks must come to round {epoch} within {bound_s:g} s")
        time.sleep(0.001)


def _buffers(workspace: Workspace, step: str) -> list[Tensor]:
    if step in IN_RESULTS:
        assert workspace.results is not None
        return workspace.results.buffers
    return workspace.buffers


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
