"""Steps of the protocol, by name: the function of the package that runs next when a rank is there."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

GoOn = Callable[[], Any]  # does what the rank would do at the step
Fault = Callable[[GoOn], Any]  # goes on once, twice or not at all, later, or after something else

FIRST = {  # steps of a group's first call
    "vote": "fusedcomm.runtime.topology:probe",
    "allocate": "fusedcomm.runtime.workspace:Workspace.initialise",
    "rendezvous": "fusedcomm.runtime.group_member:Member._rendezvous",
}
GROWTH = {  # steps of a call that needs a larger workspace
    "grow": "fusedcomm.runtime.group_member:Member._come_together",
    "grow-allocate": "fusedcomm.runtime.workspace:Workspace.initialise",
}
ENTER = {"enter": "fusedcomm.runtime.workspace:Workspace.enter"}
CHUNKED = {
    **ENTER,
    "push": "fusedcomm.runtime.workspace:Round.part",
    "signal": "fusedcomm.runtime.workspace:Round.signal",
    "wait": "fusedcomm.runtime.workspace:Round.wait",
    "read": "fusedcomm.runtime.workspace:Round.received",
    "end": "fusedcomm.runtime.workspace:Workspace._epoch_word",
}
IN_PLACE = {  # steps of a call whose results peers can write
    "post": "fusedcomm.runtime.workspace:Round.post",
    "look": "fusedcomm.runtime.workspace:Round.posted",
}
LAUNCHES = {  # steps of `fused`, before each kernel
    f"launch-{name}": f"fusedcomm.algorithms.kernel_launch:{name}"
    for name in ("push", "pack", "gather_matmul", "reduce", "unpack")
}
IN_KERNELS = {
    "signal": "fusedcomm.kernels.triton.rounds:signal",
    "wait": "fusedcomm.kernels.triton.rounds:wait",
}
FUSED = {**ENTER, **LAUNCHES, **IN_KERNELS, "end": "fusedcomm.runtime.workspace:Workspace.launched"}
# memory for the result of a call
CHUNKED_RESULT = "fusedcomm.algorithms.transport:CpuTransport.result"
FUSED_RESULT = "torch:Tensor.new_empty"

BY_ALGORITHM = {
    "chunked": {**FIRST, **GROWTH, **CHUNKED, **IN_PLACE, "result": CHUNKED_RESULT},
    "fused": {**FIRST, **GROWTH, **FUSED, "result": FUSED_RESULT},
}


@dataclass
class Reached:
    """Whether a rank has come to the step."""

    yes: bool = False


@contextmanager
def at(algorithm: str, step: str, fault: Fault) -> Iterator[Reached]:
    """Inside, the first time that a thread of this process comes to the step, ``fault`` is called in its place."""
    if algorithm not in BY_ALGORITHM:
        raise ValueError(f"algorithm must be one that has steps, {' or '.join(BY_ALGORITHM)}, got {algorithm!r}")
    steps = BY_ALGORITHM[algorithm]
    if step not in steps:
        raise ValueError(f"step of {algorithm} must be one of {', '.join(steps)}, got {step!r}")
    with replaced(steps[step], fault) as reached:
        yield reached


@contextmanager
def replaced(path: str, fault: Fault) -> Iterator[Reached]:
    """Inside, the first call of ``module:Class.function`` in this process is one of ``fault``."""
    reached, lock = Reached(), threading.Lock()
    owner, name = _found(path)
    function = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        with lock:
            first, reached.yes = not reached.yes, True
        go_on = partial(function, *args, **kwargs)
        return fault(go_on) if first else go_on()

    with mock.patch.object(owner, name, faulty):
        yield reached


def _found(path: str) -> tuple[Any, str]:
    """``module:Class.function`` as its owner and its name."""
    module, _, names = path.partition(":")
    *owners, name = names.split(".")
    owner = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    return owner, name
