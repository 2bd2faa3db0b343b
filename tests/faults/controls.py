"""Protections switched off inside ranks, and the cells that must then fail."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fusedcomm.memory import members, segment
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import prepared
from fusedcomm.plan import planner
from tests.faults.cells import Cell, select
from tests.helpers.spies import drop_plans


def ignore_broken_words() -> Any:
    """A rank enters a call although its peers have given up on it."""
    return mock.patch.object(Workspace, "breakers", lambda self, epoch: {})


def keep_failures_to_itself() -> Any:
    """A rank that gives up tells no peer."""
    fail = Workspace.fail

    def quietly(self: Workspace, *args: Any) -> None:
        everywhere, self.addresses = self.addresses, [self.addresses[self.rank]] * self.group_size
        try:
            fail(self, *args)
        finally:
            self.addresses = everywhere

    return mock.patch.object(Workspace, "fail", quietly)


def compare_no_fingerprints() -> Any:
    drop_plans()  # those of the calls before have theirs
    return mock.patch.object(planner, "fingerprint_of", lambda *facts: 1)


def leave_calls_unguarded() -> Any:
    """A round that is left half way is taken for the next one."""
    return mock.patch.object(Workspace, "guarded", lambda self, op: nullcontext())


def leave_prepared_calls_unguarded() -> Any:
    return mock.patch.object(prepared.Rescue, "abandon", lambda self, error: None)


def wait_for_nobody_in_prepared_calls() -> Any:
    """A wait that is not over soon is over."""
    return mock.patch.object(prepared.Rescue, "wait", lambda self, *args: None)


def wait_for_nobody() -> Any:
    return mock.patch.object(Workspace, "wait", lambda self, *args: None)


def count_no_rounds() -> Any:
    """There is one slot, whose flags say of every later round that it has arrived."""
    return mock.patch.object(segment, "NUM_SLOTS", 1)


def have_no_deadline() -> Any:
    wait = Workspace.wait

    def forever(self: Workspace, *args: Any) -> None:
        self.timeout_s = 1e9
        wait(self, *args)

    return mock.patch.object(Workspace, "wait", forever)


def write_beyond_the_slot() -> Any:
    """Chunks go behind what a slot holds for the call."""
    slot_start = Workspace.slot_start
    return mock.patch.object(
        Workspace, "slot_start", lambda self, epoch: slot_start(self, epoch) + self.slot_bytes // 2
    )


def reset_nothing() -> Any:
    return mock.patch.object(members.Member, "reset", lambda self: None)


@dataclass(frozen=True)
class Control:
    """If ``off`` is switched off, the cell must fail and say ``found``."""

    off: Any
    cell: Cell
    found: str


def _control(off: Any, name: str, found: str) -> Control:
    (cell,) = select([name])
    return Control(off, cell, found)


NO_DEADLINE = _control(have_no_deadline, "chunked/all_gather_matmul/one-fewer/later-call", "")  # takes long
CONTROLS = {
    str(control.cell): control
    for control in (
        _control(ignore_broken_words, "chunked/all_to_all_matmul/stop/enter", "must not complete a call"),
        _control(keep_failures_to_itself, "chunked/all_gather_matmul/stop/push", "must not complete a call"),
        _control(compare_no_fingerprints, "chunked/matmul_reduce_scatter/another-dtype/later-call", "is wrong"),
        _control(leave_calls_unguarded, "chunked/matmul_all_to_all/raise/read", "is wrong"),
        _control(wait_for_nobody, "chunked/matmul_all_to_all/delay/push", "must be right, got wrong"),
        _control(wait_for_nobody, "chunked/moe_combine/delay/enter", "must be right, got wrong"),
        _control(count_no_rounds, "chunked/all_gather_matmul/delay/read", "must be right, got"),
        _control(write_beyond_the_slot, "chunked/matmul_reduce_scatter/gc/push", "a segment has changed"),
        _control(reset_nothing, "chunked/matmul_all_reduce/raise/signal", "PeerError"),
        _control(leave_prepared_calls_unguarded, "chunked/all_gather_matmul-prepared/raise/read", "is wrong"),
        _control(wait_for_nobody_in_prepared_calls, "chunked/matmul_all_reduce-prepared/delay/call", "must be right"),
    )
}


@contextmanager
def off_in_its_cell(cell: Cell) -> Iterator[None]:
    """A context around a cell in a rank."""
    control = NO_DEADLINE if cell == NO_DEADLINE.cell else CONTROLS.get(str(cell))
    context: AbstractContextManager[Any] = nullcontext() if control is None else control.off()
    with context:
        yield
