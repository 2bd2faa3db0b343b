"""Runs a program in one rank: every step, with this rank's own delays. Results are compared a few steps later."""

from __future__ import annotations

import gc
import logging
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from threading import Lock
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedcomm
from fusedcomm.memory import group_member, members
from fusedcomm.memory.group import store
from fusedcomm.memory.vote import agree
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops.exact_problem import difference
from fusedcomm.plan.planner import Plan
from fusedcomm.tools.selftest import settings
from tests.helpers.groups import empty_is_nan
from tests.soak import invoke
from tests.soak.jitter import jitter
from tests.soak.known_values import KnownValues
from tests.soak.outcome import Failure, SoakOutcome
from tests.soak.random_program import MESH_DIMS, SoakCall, SoakGroup, SoakProgram, SoakStep, draw_program

WAIT_S = {"cpu": 90, "cuda": 120}  # bound of a wait: a peer may be in Triton's interpreter, or compiling kernels
DELAY_S = 0.005  # the longest pause before a step
LEAST_SLOT_BYTES = 1 << 12  # slots without a cap are so small that small calls already make them grow
NUM_STREAMS = 3


def run_program(
    rank: int,
    seed: int,
    index: int,
    device_type: str = "cpu",
    steps: Sequence[int] | None = None,
    deadline: float = math.inf,
) -> SoakOutcome:
    """Findings of all ranks. ``steps``: what is left of a program that is cut down; ``deadline``: may be over."""
    program = draw_program(seed, index, dist.get_world_size(), device_type)
    if steps is not None:
        program = program.only(steps)
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    with settings(TIMEOUT_S=str(WAIT_S[device_type])), empty_is_nan(warn_only=True), _quiet():
        outcome = _Worker(rank, program, device).run()
        outcome.late = time.time() > deadline
        what = "; ".join(map(str, outcome.failures)) or "a soak program"
        return SoakOutcome.of(_meet(device_type, outcome.facts(), what))


def _meet(device_type: str, facts: dict[str, Any], what: str) -> list[dict[str, Any]]:
    """All ranks' facts, by WORLD's store alone."""
    assert dist.group.WORLD is not None
    with settings(TIMEOUT_S=str(3 * WAIT_S[device_type])):  # a late rank may itself have waited
        return agree(store(dist.group.WORLD, "soak"), dist.get_rank(), dist.get_world_size(), facts, what=what)


class _Worker:
    def __init__(self, rank: int, program: SoakProgram, device: torch.device) -> None:
        self.rank, self.program, self.device = rank, program, device
        self.seed = f"{program.seed} {program.index} rank {rank}"
        self.random = Random(self.seed)  # the main thread draws from it
        self.outcome = SoakOutcome()
        self.counting = Lock()
        self.results: list[_Result] = []  # still to be compared
        self.streams = [torch.cuda.Stream(device) for _ in range(NUM_STREAMS)] if device.type == "cuda" else []

    def run(self) -> SoakOutcome:
        """Run the steps. A rank that fails leaves its program, and its peers find out when they wait for it."""
        step: SoakStep | None = None
        try:
            with (
                mock.patch.object(group_member, "_MIN_SLOT_BYTES", LEAST_SLOT_BYTES),
                jitter(self.seed, self.program.jitter),
                ThreadPoolExecutor(1) as self.beside,
            ):
                timeout = timedelta(seconds=2 * WAIT_S[self.device.type])
                fusedcomm.close()  # WORLD's next workspace has the bounds set here
                self.groups = SoakGroups(self.rank, self.program.groups, self.device, timeout)
                for step in self.program.steps:
                    self._take(step)
                self._compare()
                _meet(self.device.type, {}, "the end of a soak program")  # gloo: a peer may still be sending
                self.groups.destroy()
                fusedcomm.close()
        except Exception as error:
            self._fail(step, f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}")
            self.outcome.broken = True
        return self.outcome

    def _take(self, step: SoakStep) -> None:
        mine = self.rank in step.group.ranks
        if self.random.random() < 0.2:
            time.sleep(self.random.uniform(0, DELAY_S))
        if step.action == "call":
            self._call(step)
        elif step.action == "remake":
            self.groups.remake(step.group)
        elif step.action == "collect" and self.random.random() < 0.5:
            gc.collect()
        elif step.action in ("reset", "close") and mine:
            getattr(fusedcomm, step.action)(self.groups.handle(step.group))
        self._count("action", step.action, step.group)
        if step.compare:
            self._compare()

    def _call(self, step: SoakStep) -> None:
        calls = [call for call in step.calls if self.rank in call.group.ranks]
        if not calls:
            return
        with fusedcomm.force_algorithm(calls[0].algorithm):  # for all threads of the process
            beside = [self.beside.submit(self._run, step, call) for call in calls[1:]]
            self.results += [self._run(step, calls[0]), *(future.result() for future in beside)]

    def _run(self, step: SoakStep, call: SoakCall) -> _Result:
        group, rank = call.group, call.group.ranks.index(self.rank)
        data, handle = KnownValues(call.case, call.seed), self.groups.handle(group)
        with self._some_stream():
            inputs = data.inputs(rank, self.device)
            args, options = invoke.arguments(data, rank, inputs, handle)
            plan = fusedcomm.explain(call.case.op, *args, **options)
            before = self.groups.workspace(group)
            epoch = before.epoch if before else 0
            result = _Result(step, call, data, rank, invoke.results(data, rank, inputs, handle))
        after = self.groups.workspace(group)
        grown = before is not None and after is not before
        self._count_call(call, plan)
        self._count("workspace", "rounds", group, (after.epoch if after else 0) - (0 if grown else epoch))
        self._count("workspace", "growths", group, int(grown))
        return result

    @contextmanager
    def _some_stream(self) -> Iterator[None]:
        """The current stream, or on a GPU another one, which runs after it and before what follows on it."""
        stream = self.random.choice([None, *self.streams]) if self.streams else None
        if stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def _count_call(self, call: SoakCall, plan: Plan) -> None:
        case, group = call.case, call.group
        for kind, value in (
            ("op", case.op),
            ("dtype", str(case.dtype).removeprefix("torch.")),
            ("use", case.use),
            ("algorithm", plan.algorithm),
            ("chosen by", "force_algorithm" if call.algorithm else "planner"),
            ("group", group.kind),
            ("ranks", str(len(group.ranks))),
        ):
            self._count(kind, value, group)
        self._count("workspace", "calls of several rounds", group, int(plan.num_rounds > 1))

    def _count(self, kind: str, value: str, group: SoakGroup, number: int = 1) -> None:
        """Count once for all ranks of the group."""
        if self.rank == group.ranks[0] and number:
            with self.counting:
                self.outcome.tally[kind][value] += number

    def _compare(self) -> None:
        for result in self.results:
            wants = result.data.expected(result.rank)
            for i, (out, want) in enumerate(zip(result.outs, wants, strict=True)):
                if found := difference(out.cpu(), want):
                    self._fail(result.step, f"{result.call}: result {i}: {found}")
        self.results.clear()

    def _fail(self, step: SoakStep | None, what: str) -> None:
        number = -1 if step is None else step.number
        self.outcome.failures.append(Failure(self.rank, number, f"step {number}: {what}"))


@dataclass(frozen=True)
class _Result:
    step: SoakStep
    call: SoakCall
    data: KnownValues
    rank: int  # in the group
    outs: list[Tensor]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the warnings of fallbacks, which are part of the programs."""
    log = logging.getLogger("fusedcomm")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class SoakGroups:
    """The groups of a program. All ranks of WORLD make and destroy them in the same order; only members hold them."""

    def __init__(self, rank: int, groups: Sequence[SoakGroup], device: torch.device, timeout: timedelta) -> None:
        self.rank, self.device, self.timeout = rank, device, timeout
        self.before = set(c10d._world.pg_map)
        self.made: dict[int, ProcessGroup] = {}
        self.meshes: dict[int, Any] = {}  # 1-D, or (mesh, dim)
        self._mesh: Any = None
        for group in groups:
            if group.kind == "new_group":
                self._make(group)
            else:
                self._find(group)

    def _make(self, group: SoakGroup) -> None:
        made = dist.new_group(list(group.ranks), timeout=self.timeout)
        if self.rank not in group.ranks:
            return
        self.made[group.number] = made
        if group.workspace_bytes and len(group.ranks) > 1:
            with settings(WORKSPACE_BYTES=str(group.workspace_bytes)):  # the vote keeps it
                members.member(made.group_name, self.device)

    def _find(self, group: SoakGroup) -> None:
        """WORLD, or a group that a mesh has made."""
        from torch.distributed.device_mesh import init_device_mesh

        assert dist.group.WORLD is not None
        size = dist.get_world_size()
        if group.kind == "world":
            self.made[group.number] = dist.group.WORLD
            if group.form == "mesh":
                self.meshes[group.number] = init_device_mesh(self.device.type, (size,))
            return
        if self._mesh is None:
            self._mesh = init_device_mesh(self.device.type, (2, size // 2), mesh_dim_names=MESH_DIMS)
        if self.rank in group.ranks:
            self.made[group.number] = self._mesh.get_group(group.kind)
            self.meshes[group.number] = (self._mesh, group.kind)

    def handle(self, group: SoakGroup) -> Any:
        made = self.made[group.number]
        forms = {"group": made, "name": made.group_name, "mesh": self.meshes.get(group.number), "none": None}
        return forms[group.form]

    def workspace(self, group: SoakGroup) -> Workspace | None:
        every = members.members(self.made[group.number])
        return next((each.workspace for each in every if each.device == self.device), None)

    def remake(self, group: SoakGroup) -> None:
        if self.rank in group.ranks:
            made = self.made.pop(group.number)
            dist.barrier(made)  # a peer may still be sending
            dist.destroy_process_group(made)
        self._make(group)

    def destroy(self) -> None:
        for made in [each for each in c10d._world.pg_map if each not in self.before]:
            dist.destroy_process_group(made)
