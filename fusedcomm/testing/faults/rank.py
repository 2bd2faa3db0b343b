"""A cell in one rank: the faulty call and those after it, what became of memory, and the way back."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from itertools import product
from typing import Any, ParamSpec
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedcomm
from fusedcomm.errors import PeerError
from fusedcomm.ops import dispatch
from fusedcomm.runtime import group_member, members, results
from fusedcomm.runtime.group import store
from fusedcomm.runtime.vote import agree
from fusedcomm.runtime.workspace import Workspace
from fusedcomm.testing.faults.cells import CALL, MEET_S, OPS, Cell
from fusedcomm.testing.faults.injections import INJECTIONS, RAISED
from fusedcomm.testing.faults.known_calls import (
    LARGE,
    OTHER,
    SLOT_BYTES,
    Guarded,
    GuardedSegment,
    KnownCall,
    warm_results,
)
from fusedcomm.testing.faults.protocol_steps import Fault, Reached, at
from fusedcomm.testing.faults.rank_reports import (
    INJECTED,
    OTHER_ERROR,
    PEER_ERROR,
    RIGHT,
    WRONG,
    CallOutcome,
    RankReport,
)
from fusedcomm.testing.faults.tape_steps import IN_RESULTS, WAIT, at_op, until_posted, until_signalled
from fusedcomm.testing.selftest import settings

NUM_UNPREPARED = 3  # calls in Python before one is on a tape: the first makes the workspace, the third is recorded
LATER_S = 0.3  # longer than a wait in C++

Around = Callable[[Cell], AbstractContextManager[object]]
P = ParamSpec("P")


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
            mock.patch.object(results, "LEAST_BYTES", 1),
            settings(TIMEOUT_S=str(MEET_S), **({"RESULTS_BYTES": "0"} if cell.prepared and not cell.in_place else {})),
            _patient_interpreter(cell),
        ):
            return _Rank(cell, group, other).run(around)
    finally:
        for each in (group, other):
            dist.destroy_process_group(each)


def _patient_interpreter(cell: Cell) -> AbstractContextManager[object]:
    """Kernels that wait in the interpreter leave the cores to the other cells."""
    if cell.algorithm != "fused":
        return nullcontext()
    primitives = importlib.import_module("fusedcomm.kernels.triton.primitives")

    def clock_ns() -> int:
        time.sleep(0.001)
        return time.monotonic_ns()

    return mock.patch.object(primitives, "clock_ns", clock_ns)


def _timed(attempt: Callable[P, CallOutcome]) -> Callable[P, CallOutcome]:
    @wraps(attempt)
    def timed(*args: P.args, **kwargs: P.kwargs) -> CallOutcome:
        start = time.monotonic()
        return replace(attempt(*args, **kwargs), seconds=time.monotonic() - start)

    return timed


class _Rank:
    def __init__(self, cell: Cell, group: ProcessGroup, other: ProcessGroup) -> None:
        self.cell, self.group, self.other = cell, group, other
        self.rank = group.rank()
        self.is_victim = self.rank == cell.victim
        self.reached = Reached(yes=cell.fault not in INJECTIONS)
        self.inputs = Guarded()
        self.results: list[tuple[KnownCall, Tensor]] = []
        self.in_python: list[str] = []  # the ops of calls that run in Python and must be on tapes

    def run(self, around: Around) -> RankReport:
        """``around`` holds from the faulty call on."""
        segments = self._come_together()
        with around(self.cell):
            return self._faulty(segments)

    def _faulty(self, segments: Sequence[GuardedSegment]) -> RankReport:
        cell = self.cell
        with self._on_tapes() if cell.prepared else nullcontext():
            outcomes = list(self._threads() if cell.fault == "threads" else self._calls())
        self._meet(survivors=cell.fault == "kill")
        memory = self._violations(segments)
        self._meet(survivors=cell.fault == "kill")
        after = None
        if cell.fault == "kill":
            after = self._closed()
        elif cell.recovers:
            after = self._after_reset()
            self._meet()
        return RankReport(self.rank, outcomes, self.reached.yes or not self.is_victim, memory, after)

    def _known(self, seed: int) -> KnownCall:
        size = LARGE if self.cell.grows else KnownCall.size
        return KnownCall(self.cell.op, self.cell.group_size, size, seed=seed, uneven=self.cell.uneven)

    def _come_together(self) -> list[GuardedSegment]:
        """Give both groups a workspace, unless the fault is in making it, and mark what must not change."""
        with fusedcomm.force_algorithm("chunked"):
            warm = KnownCall("matmul_all_to_all", self.cell.group_size, seed=50)
            self._must_be_right(warm, warm.run(*warm.inputs(self.rank), self.other))
        segments = []
        if not self.cell.first_call:
            self._warm_up()
        for workspace in self._workspaces() if self.cell.in_place else []:
            warm_results(workspace)
        self._meet()
        used = [] if self.cell.grows else members.members(self.group)  # what is outgrown is unmapped
        for group_members, idle in ((used, False), (members.members(self.other), self.cell.step != "other-group")):
            segments += [GuardedSegment(each.workspace, idle) for each in group_members if each.workspace is not None]
        self._meet()
        return segments

    def _warm_up(self) -> None:
        """Make a call before the faulty one, or as many as it takes to prepare what is called then."""
        cell, groups = self.cell, [self.group]
        seeds = range(51, 51 + (NUM_UNPREPARED if cell.prepared else 1))
        calls = [KnownCall(cell.op, cell.group_size, seed=seed, uneven=cell.uneven) for seed in seeds]
        if cell.prepared:
            calls += [self._variant(call) for call in calls]
            groups += [self.other] * (cell.step == "other-group")
        with fusedcomm.force_algorithm(cell.algorithm):
            for call, group in product(dict.fromkeys(calls), groups):
                self._must_be_right(call, call.run(*call.inputs(self.rank), group))

    @contextmanager
    def _on_tapes(self) -> Iterator[None]:
        """Notes the calls inside that run in Python, unless a rank has failed before."""
        prepare = dispatch.prepare

        def noted(op: str, *args: Any, **kwargs: Any) -> Any:
            if not any(each.breakers(each.epoch + 1) for each in self._workspaces()):
                self.in_python.append(op)
            return prepare(op, *args, **kwargs)

        with mock.patch.object(dispatch, "prepare", noted):
            yield

    def _calls(self) -> Iterator[CallOutcome]:
        """The faulty call and the next one, or several back to back where all must succeed."""
        with self._bounded():
            for i in range(self.cell.num_calls):
                call = self._changed(self._known(i)) if i == 0 else self._known(i)
                if call is not None:
                    yield self._attempt(call, i)
                if not self.cell.harmless:
                    self._meet(survivors=self.cell.fault == "kill")

    def _changed(self, call: KnownCall) -> KnownCall | None:
        """What this rank calls where the others make ``call``, or None if it makes no call."""
        fault, victim = self.cell.fault, self.is_victim
        if fault == "one-more":
            return call if victim else None
        if not victim:
            return call
        if fault == "one-fewer":
            return None
        return self._variant(call)

    def _variant(self, call: KnownCall) -> KnownCall:
        """What a rank calls that is in another call."""
        changes: dict[str, dict[str, Any]] = {
            "another-op": {"op": OPS[(OPS.index(call.op) + 1) % len(OPS)]},
            "another-shape": {"size": OTHER},
            "another-dtype": {"dtype": torch.bfloat16},
        }
        return replace(call, **changes.get(self.cell.fault, {}))

    @_timed
    def _attempt(self, call: KnownCall, index: int) -> CallOutcome:
        """One call, with the fault in it if it is the victim's first one."""
        x, w = (self.inputs.copy_of(t) for t in call.inputs(self.rank))
        facts: dict[str, Any] = {"called": call.op, "epoch_before": self._epoch(), "index": index}
        try:
            with self._injected(index) as run, fusedcomm.force_algorithm(self.cell.algorithm):
                result = run(lambda: call.run(x, w, self.group))
        except (Exception, KeyboardInterrupt) as error:
            facts |= {"text": str(error), "error": type(error).__name__}
            if isinstance(error, PeerError):
                return CallOutcome(PEER_ERROR, op=error.op, epoch=error.epoch, peers=tuple(error.peers), **facts)
            return CallOutcome(INJECTED if isinstance(error, RAISED) else OTHER_ERROR, **facts)
        if wrong := call.wrong(result, self.rank):
            return CallOutcome(WRONG, wrong, **facts)
        self.results.append((call, result))
        return CallOutcome(RIGHT, **facts)

    @contextmanager
    def _injected(self, index: int) -> Iterator[Callable[[Callable[[], Tensor]], Tensor]]:
        """How a call is run: with the fault at its step, if this is the victim's first call."""
        if self.cell.prepared and index == 0:
            self._line_up()
        if not self.is_victim or index > 0 or self.cell.fault not in INJECTIONS:
            yield lambda go_on: go_on()
            return
        injection, timeout_s = INJECTIONS[self.cell.fault], self.cell.timeout_s
        if self.cell.step == CALL:
            self.reached.yes = True
            yield lambda go_on: injection(go_on, timeout_s)
            return
        with self._at_step(lambda go_on: injection(go_on, timeout_s)) as self.reached:
            yield lambda go_on: go_on()

    def _at_step(self, fault: Fault) -> AbstractContextManager[Reached]:
        if self.cell.prepared:
            return at_op(self._workspaces()[0], self.cell.step, fault)
        return at(self.cell.algorithm, self.cell.step, fault)

    def _line_up(self) -> None:
        """Where a step is only reached if the ranks come in an order, come in this one."""
        if self.cell.step in IN_RESULTS and self.is_victim:
            until_posted(self._workspaces()[0], MEET_S)
        if self.cell.step == WAIT and not self.is_victim:
            until_signalled(self._workspaces()[0], self.cell.victim, MEET_S)
            time.sleep(LATER_S)

    def _threads(self) -> list[CallOutcome]:
        """Calls from two threads at once. On one group their order differs between ranks, so all calls are the same."""
        groups = (self.group, self.other if self.cell.step == "other-group" else self.group)
        outcomes: list[CallOutcome] = []

        def work(group: ProcessGroup) -> None:
            for i in range(self.cell.num_calls):
                outcomes.append(self._attempt_in_thread(group, i))

        with fusedcomm.force_algorithm(self.cell.algorithm):
            threads = [threading.Thread(target=work, args=(group,), daemon=True) for group in groups]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(MEET_S)
        return outcomes

    @_timed
    def _attempt_in_thread(self, group: ProcessGroup, index: int) -> CallOutcome:
        call = self._known(seed=0)
        try:
            wrong = call.wrong(call.run(*call.inputs(self.rank), group), self.rank)
        except Exception as error:
            return CallOutcome(OTHER_ERROR, str(error), type(error).__name__, index=index)
        return CallOutcome(WRONG if wrong else RIGHT, wrong or "", index=index)

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Waits inside have the cell's time-out, also those of a workspace that exists already."""
        for workspace in self._workspaces():
            workspace.timeout_s = self.cell.timeout_s
            workspace.arm()
        with settings(TIMEOUT_S=str(self.cell.timeout_s)):
            yield

    @_timed
    def _after_reset(self) -> CallOutcome:
        """A call after ``fusedcomm.reset``, planned as before, or as many as are on a tape again. The other group must
        still work.
        """
        calls = (
            (self.cell.algorithm, self.group, self._known(seed=60)),
            ("chunked", self.other, KnownCall("matmul_all_to_all", self.cell.group_size, seed=61)),
        )
        try:
            fusedcomm.reset(self.group)
            for algorithm, group, call in calls * (NUM_UNPREPARED + 1 if self.cell.prepared else 1):
                with fusedcomm.force_algorithm(algorithm, strict=True):
                    result = call.run(*call.inputs(self.rank), group)
                if wrong := call.wrong(result, self.rank):
                    return CallOutcome(WRONG, wrong)
        except Exception as error:
            return CallOutcome(OTHER_ERROR, str(error), type(error).__name__)
        return CallOutcome(RIGHT)

    @_timed
    def _closed(self) -> CallOutcome:
        """``fusedcomm.close`` without the rank that has died."""
        with settings(TIMEOUT_S=str(self.cell.timeout_s)):
            try:
                fusedcomm.close(self.group)
            except PeerError as error:
                return CallOutcome(PEER_ERROR, str(error), type(error).__name__, peers=tuple(error.peers))
        return CallOutcome(RIGHT)

    def _violations(self, segments: Sequence[GuardedSegment]) -> list[str]:
        found = ["the inputs, or what is around them, have changed"] if self.inputs.changed() else []
        found += ["a segment has changed where no call writes" for each in segments if each.changed()]
        found += [f"a call of {op} must be on a tape, but ran in Python" for op in self.in_python]
        late = [call for call, result in self.results if call.wrong(result, self.rank)]
        return found + [f"the result of call {call.seed} has changed after it" for call in late]

    def _meet(self, survivors: bool = False) -> None:
        """Return when all members, or all but the victim, are here."""
        size = self.group.size() - survivors
        with settings(TIMEOUT_S=str(MEET_S)):
            agree(store(self.group, f"faults/{size}"), self.rank, size, {}, what="fusedcomm faults")

    def _epoch(self) -> int:
        return next((workspace.epoch for workspace in self._workspaces()), 0)

    def _workspaces(self) -> list[Workspace]:
        """The group's one, if it has one."""
        return [member.workspace for member in members.members(self.group) if member.workspace is not None]

    def _must_be_right(self, call: KnownCall, result: Tensor) -> None:
        if wrong := call.wrong(result, self.rank):
            raise AssertionError(f"before the fault: {wrong}")
