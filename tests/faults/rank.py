"""A cell in one rank: the faulty call and those after it, what became of memory, and the way back."""

import importlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedcomm
from fusedcomm.memory import group_member, members
from fusedcomm.memory.errors import PeerError
from fusedcomm.memory.group import store
from fusedcomm.memory.vote import agree
from fusedcomm.memory.workspace import Workspace
from fusedcomm.tools.selftest import settings
from tests.faults import prepared_calls
from tests.faults.cells import MEET_S, Cell
from tests.faults.injections import INJECTIONS, RAISED
from tests.faults.judge import INJECTED, OTHER_ERROR, PEER_ERROR, RIGHT, WRONG, CallOutcome, RankReport
from tests.faults.known_calls import LARGE, OTHER, SLOT_BYTES, Guarded, KnownCall
from tests.faults.steps import CALL, Fault, Reached, at_step
from tests.helpers.problems import OPS

Around = Callable[[Cell], AbstractContextManager[object]]


def run_in_rank(rank: int, cell: Cell, group_ranks: Sequence[int], around: Around = nullcontext) -> RankReport | None:
    """Run the cell. All living ranks call this, members of the group or not. ``around``: what tests switch off."""
    logging.getLogger("fusedcomm").setLevel(logging.ERROR)  # fallbacks are part of what is tried
    gloo_s = cell.timeout_s if cell.by_group else MEET_S
    group = dist.new_group(list(group_ranks), timeout=timedelta(seconds=gloo_s))
    other = dist.new_group(list(group_ranks), timeout=timedelta(seconds=MEET_S))
    if rank not in group_ranks:
        return None
    try:
        with (
            mock.patch.object(group_member, "_MIN_SLOT_BYTES", SLOT_BYTES),
            settings(TIMEOUT_S=str(MEET_S)),
            _patient_interpreter() if cell.algorithm == "fused" else nullcontext(),
        ):
            return _Rank(cell, group, other).run(around)
    finally:
        for each in (group, other):
            dist.destroy_process_group(each)


def _patient_interpreter() -> AbstractContextManager[object]:
    """Kernels that wait in the interpreter leave the cores to the other cells."""
    primitives = importlib.import_module("fusedcomm.kernels.triton.primitives")

    def clock_ns() -> int:
        time.sleep(0.001)
        return time.monotonic_ns()

    return mock.patch.object(primitives, "clock_ns", clock_ns)


def _timed(attempt: Callable[[], CallOutcome]) -> CallOutcome:
    start = time.monotonic()
    return replace(attempt(), seconds=time.monotonic() - start)


class _Rank:
    def __init__(self, cell: Cell, group: ProcessGroup, other: ProcessGroup) -> None:
        self.cell, self.group, self.other = cell, group, other
        self.rank = group.rank()
        self.is_victim = self.rank == cell.victim
        self.reached = Reached(yes=cell.fault not in INJECTIONS)
        self.guarded = Guarded()
        self.results: list[tuple[KnownCall, Tensor]] = []
        self.in_python: list[str] = []  # the ops of calls that run in Python and must be prepared

    def run(self, around: Around) -> RankReport:
        """``around`` holds from the faulty call on."""
        self._come_together()
        with around(self.cell):
            return self._faulty()

    def _faulty(self) -> RankReport:
        cell, one_is_dead = self.cell, self.cell.fault == "kill"
        with prepared_calls.noting_python(self._workspaces, self.in_python) if cell.prepared else nullcontext():
            outcomes = list(self._calls())
        self._meet(survivors=one_is_dead)
        memory = self._violations()
        self._meet(survivors=one_is_dead)
        after = None
        if one_is_dead:
            after = _timed(self._closed)
        elif cell.recovers:
            after = _timed(self._after_reset)
            self._meet()
        return RankReport(self.rank, outcomes, self.reached.yes or not self.is_victim, memory, after)

    def _known(self, seed: int) -> KnownCall:
        return KnownCall(self.cell.op, self.cell.group_size, LARGE if self.cell.grows else KnownCall.size, seed=seed)

    def _come_together(self) -> None:
        """Give both groups a workspace, unless the fault is in making it, and mark what must not change."""
        with fusedcomm.force_algorithm("chunked"):
            self._must_be_right(KnownCall("matmul_all_to_all", self.cell.group_size, seed=50), self.other)
        if not self.cell.first_call:
            self._warm_up()
        self._meet()
        for workspace in [] if self.cell.grows else self._workspaces():  # what is outgrown is unmapped
            self.guarded.watch_segment(workspace, idle=False)
        for workspace in self._workspaces(self.other):
            self.guarded.watch_segment(workspace, idle=True)
        self._meet()

    def _warm_up(self) -> None:
        """Make a call before the faulty one, or as many as it takes to prepare what is called then."""
        num_calls = prepared_calls.NUM_UNPREPARED if self.cell.prepared else 1
        calls = [KnownCall(self.cell.op, self.cell.group_size, seed=51 + i) for i in range(num_calls)]
        if self.cell.prepared:
            calls += [self._variant(call) for call in calls]
        with fusedcomm.force_algorithm(self.cell.algorithm):
            for call in dict.fromkeys(calls):
                self._must_be_right(call, self.group)

    def _calls(self) -> Iterator[CallOutcome]:
        with self._bounded():
            for i in range(self.cell.num_calls):
                call = self._changed(self._known(i)) if i == 0 else self._known(i)
                if call is not None:
                    yield _timed(partial(self._attempt, call, i))
                if not self.cell.harmless:
                    self._meet(survivors=self.cell.fault == "kill")

    def _changed(self, call: KnownCall) -> KnownCall | None:
        """The call that this rank makes where the others make ``call``, or None."""
        if self.cell.fault == "one-more":
            return call if self.is_victim else None
        if not self.is_victim:
            return call
        return None if self.cell.fault == "one-fewer" else self._variant(call)

    def _variant(self, call: KnownCall) -> KnownCall:
        changes: dict[str, dict[str, Any]] = {
            "another-op": {"op": dict(pairwise(OPS)).get(call.op, OPS[0])},
            "another-shape": {"size": OTHER},
            "another-dtype": {"dtype": torch.bfloat16},
        }
        return replace(call, **changes.get(self.cell.fault, {}))

    def _attempt(self, call: KnownCall, index: int) -> CallOutcome:
        """One call, with the fault in it if it is the victim's first one."""
        x, w = (self.guarded.copy_of(t) for t in call.inputs(self.rank))
        facts: dict[str, Any] = {"called": call.called, "epoch_before": self._epoch(), "index": index}
        if self.cell.prepared and index == 0:
            prepared_calls.line_up(self._workspaces()[0], self.cell.step, self.cell.victim, MEET_S)
        meets_fault = self.is_victim and index == 0 and self.cell.fault in INJECTIONS
        try:
            with fusedcomm.force_algorithm(self.cell.algorithm):
                result = (self._meeting_fault if meets_fault else _run)(lambda: call.run(x, w, self.group))
        except (Exception, KeyboardInterrupt) as error:
            facts |= {"text": str(error), "error": type(error).__name__}
            if isinstance(error, PeerError):
                return CallOutcome(PEER_ERROR, op=error.op, epoch=error.epoch, peers=tuple(error.peers), **facts)
            return CallOutcome(INJECTED if isinstance(error, RAISED) else OTHER_ERROR, **facts)
        if wrong := call.wrong(result, self.rank):
            return CallOutcome(WRONG, wrong, **facts)
        self.results.append((call, result))
        return CallOutcome(RIGHT, **facts)

    def _meeting_fault(self, call: Callable[[], Tensor]) -> Tensor:
        fault, step = INJECTIONS[self.cell.fault], self.cell.step
        if step == CALL:
            self.reached.yes = True
            return fault(call)
        with self._at(step, fault) as self.reached:
            return call()

    def _at(self, step: str, fault: Fault) -> AbstractContextManager[Reached]:
        if self.cell.prepared:
            return prepared_calls.at_op(self._workspaces()[0], step, fault)
        return at_step(self.cell.algorithm, step, fault)

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Waits inside have the cell's time-out, also those of a workspace that exists already."""
        for workspace in self._workspaces():
            workspace.timeout_s = self.cell.timeout_s
            workspace.arm()
        with settings(TIMEOUT_S=str(self.cell.timeout_s)):
            yield

    def _after_reset(self) -> CallOutcome:
        """A call after `reset`, planned as before, or as many as are prepared again; the other group works on."""
        calls = (
            (self.cell.algorithm, self.group, self._known(seed=60)),
            ("chunked", self.other, KnownCall("matmul_all_to_all", self.cell.group_size, seed=61)),
        )
        try:
            fusedcomm.reset(self.group)
            for algorithm, group, call in calls * (prepared_calls.NUM_UNPREPARED + 1 if self.cell.prepared else 1):
                with fusedcomm.force_algorithm(algorithm, strict=True):
                    result = call.run(*call.inputs(self.rank), group)
                if wrong := call.wrong(result, self.rank):
                    return CallOutcome(WRONG, wrong)
        except Exception as error:
            return CallOutcome(OTHER_ERROR, str(error), type(error).__name__)
        return CallOutcome(RIGHT)

    def _closed(self) -> CallOutcome:
        with settings(TIMEOUT_S=str(self.cell.timeout_s)):
            try:
                fusedcomm.close(self.group)
            except PeerError as error:
                return CallOutcome(PEER_ERROR, str(error), type(error).__name__, peers=tuple(error.peers))
        return CallOutcome(RIGHT)

    def _violations(self) -> list[str]:
        found = self.guarded.changed()
        found += [f"a call of {op} must be prepared, but ran in Python" for op in self.in_python]
        late = [call for call, result in self.results if call.wrong(result, self.rank)]
        return found + [f"the result of call {call.seed} has changed after it" for call in late]

    def _meet(self, survivors: bool = False) -> None:
        """Return when all members, or all but the victim, are here."""
        size = self.group.size() - survivors
        with settings(TIMEOUT_S=str(MEET_S)):
            agree(store(self.group, f"faults/{size}"), self.rank, size, {}, what="tests.faults")

    def _epoch(self) -> int:
        return next((workspace.epoch for workspace in self._workspaces()), 0)

    def _workspaces(self, group: ProcessGroup | None = None) -> list[Workspace]:
        found = [member.workspace for member in members.members(group or self.group)]
        return [workspace for workspace in found if workspace is not None]

    def _must_be_right(self, call: KnownCall, group: ProcessGroup) -> None:
        if wrong := call.wrong(call.run(*call.inputs(self.rank), group), self.rank):
            raise AssertionError(f"before the fault: {wrong}")


def _run(call: Callable[[], Tensor]) -> Tensor:
    return call()
