"""Steps of the protocol, by name: the function of the package that runs next when a rank is there."""

import pkgutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from fusedcomm.plan.schedule import Base

GoOn = Callable[[], Any]  # does what the rank would do at the step
Fault = Callable[[GoOn], Any]  # goes on once, twice or not at all, later, or after something else

STOPPING = ("delay", "gc", "pause", "stop", "kill", "raise", "interrupt")  # faults that may come at any step
CALLS = ("another-op", "another-shape", "another-dtype", "one-more", "one-fewer")  # what the victim calls instead
FIRST_CALL, LATER_CALL, CALL = "first-call", "later-call", "call"

FIRST = {  # steps of a group's first call
    "vote": "fusedcomm.memory.topology:probe",
    "allocate": "fusedcomm.memory.workspace:Workspace.initialise",
    "rendezvous": "fusedcomm.memory.group_member:Member._rendezvous",
}
GROWTH = {  # steps of a call that needs a larger workspace
    "grow": "fusedcomm.memory.group_member:Member._come_together",
    "grow-allocate": "fusedcomm.memory.workspace:Workspace.initialise",
}
EXECUTOR = "fusedcomm.run.python_executor:Execution"
ENTER = {"enter": "fusedcomm.memory.workspace:Workspace.enter"}
CHUNKED = {
    **ENTER,
    "push": f"{EXECUTOR}.step",
    "signal": "fusedcomm.memory.workspace:Workspace.signal",
    "wait": "fusedcomm.memory.workspace:Workspace.wait",
    "read": f"{EXECUTOR}.step",
    "end": "fusedcomm.memory.workspace:Workspace._epoch_word",
}
ROWS = {  # instead of a schedule's steps: the rows of a dispatch, and the peers' that a combine reads
    "rows": "fusedcomm.run.routed_rows:BySlots.send fusedcomm.run.routed_rows:_missing_zero"
}
FUSED = {
    **ENTER,
    **{
        f"launch-{name}": f"fusedcomm.kernels.triton.{module}:{kernel}.run"
        for name, module, kernel in (
            ("push", "push_matmul", "push_matmul_kernel"),
            ("pack", "copy", "pack_kernel"),
            ("gather_matmul", "gather_matmul", "gather_matmul_kernel"),
            ("reduce", "reduce", "reduce_kernel"),
            ("reduce_norm", "reduce_norm", "reduce_norm_kernel"),
            ("unpack", "copy", "unpack_kernel"),
            *((name, "token_rows", f"{name}_kernel") for name in ("send_rows", "take_rows", "return_rows", "add_rows")),
            *((name, "grouped_matmul", f"{name}_kernel") for name in ("grouped_matmul", "experts_matmul")),
        )
    },
    "signal": "fusedcomm.kernels.triton.primitives:signal",
    "wait": "fusedcomm.kernels.triton.primitives:acquired",
    "end": "fusedcomm.memory.workspace:Workspace.launched",
    "result": "fusedcomm.memory.workspace:Workspace.empty",
}
BY_ALGORITHM = {
    "chunked": FIRST | GROWTH | CHUNKED | ROWS | {"result": "fusedcomm.memory.workspace:Workspace.empty"},
    "fused": FUSED,
}


@dataclass
class Reached:
    yes: bool = False


def writes_a_slot(execution: Any, work: Any, stream: Any) -> bool:
    return any(place.base == Base.SLOT for place in (getattr(work, "to", None), getattr(work, "out", None)) if place)


def reads_a_slot(execution: Any, work: Any, stream: Any) -> bool:
    read = (getattr(work, "source", None), getattr(work, "x", None), *getattr(work, "parts", ()))
    return any(place.base == Base.SLOT for place in read if place)


ONLY = {"push": writes_a_slot, "read": reads_a_slot}  # which calls of the function are at the step


def at_step(algorithm: str, step: str, fault: Fault) -> AbstractContextManager[Reached]:
    """Inside, the first time that this process comes to the step of a call in Python, it meets ``fault``."""
    return replaced(BY_ALGORITHM[algorithm][step], fault, ONLY.get(step, lambda *args: True))


@contextmanager
def replaced(paths: str, fault: Fault, only: Callable[..., bool] = lambda *args: True) -> Iterator[Reached]:
    """Inside, the first call of a ``module:Class.function`` of ``paths`` that ``only`` accepts is one of ``fault``."""
    reached, lock = Reached(), threading.Lock()

    def faulty(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with lock:
            first = not reached.yes and only(*args)
            reached.yes |= first
        go_on = partial(function, *args, **kwargs)
        return fault(go_on) if first else go_on()

    with ExitStack() as patches:
        for path in paths.split():
            owner_path, _, name = path.replace(":", ".").rpartition(".")
            owner = pkgutil.resolve_name(owner_path)
            patches.enter_context(mock.patch.object(owner, name, _bound(faulty, getattr(owner, name))))
        yield reached


def _bound(faulty: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function, so that a method among those replaced gets its object."""
    return lambda *args, **kwargs: faulty(function, *args, **kwargs)
