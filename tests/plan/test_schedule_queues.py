"""No call hangs however a GPU deals streams to hardware queues; tests/helpers/schedule/hardware_queues.py says why."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import fused, launches
from fusedcomm.plan.moves import Moves
from fusedcomm.plan.schedule import Stream
from tests.helpers.problems import Problem
from tests.helpers.schedule.happens_before import HappensBefore
from tests.helpers.schedule.hardware_queues import dealings, hangs
from tests.helpers.schedule.operations import Recording
from tests.helpers.schedule.programs import Mesh, Program, World, call, calls, on_two_streams, uneven_calls
from tests.helpers.schedule.recorder import Recorder
from tests.plan.test_schedule import BATCHED, FEW_ROWS, LARGE, PROBLEMS, SLOT_BYTES, STRIDED
from tests.plan.test_uneven_schedule import CASES as UNEVEN


@dataclass(frozen=True)
class Way:
    """How calls run. ``least_copied``: bytes of a run of a gather that copy engines send."""

    algorithm: str
    writes_words: bool = True
    least_copied: int = Workspace.least_copied

    def world(self, group_size: int, slot_bytes: int, num_groups: int = 1) -> World:
        return World(group_size, slot_bytes * group_size, self.algorithm, num_groups, self.writes_words)


WAYS = {
    "chunked": Way("chunked"),
    "chunked, signals by kernels": Way("chunked", writes_words=False),
    "fused": Way("fused"),
    "fused, by copy engines": Way("fused", least_copied=0),
    "fused, by kernels": Way("fused", least_copied=1 << 62),
    "pipelined": Way("pipelined"),
    "unfused": Way("unfused"),
}
LARGE_SLOT = 1 << 25
SIZES = [2, pytest.param(4, marks=pytest.mark.thorough), pytest.param(8, marks=pytest.mark.nightly)]
ROWS = Problem("rows", (2048, 256), 2048, 0, op="all_gather_matmul")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    found = WAYS[request.param]
    monkeypatch.setattr(Workspace, "least_copied", found.least_copied)
    return found


@pytest.mark.parametrize("group_size", SIZES)
def test_no_call_hangs(way: Way, group_size: int) -> None:
    """Every op, forward and backward, in several rounds, with few rows and none; then with tiles for all SMs."""
    assert not hangs(way.world(group_size, SLOT_BYTES).record(calls([*PROBLEMS, *FEW_ROWS, BATCHED])))
    assert not hangs(way.world(group_size, LARGE_SLOT, 2).record(on_two_streams([*LARGE, *STRIDED])))


@pytest.mark.parametrize("way", [name for name in WAYS if WAYS[name].algorithm != "fused"], indirect=True)
def test_no_call_of_uneven_parts_hangs(way: Way) -> None:
    assert not hangs(way.world(2, SLOT_BYTES).record(uneven_calls(UNEVEN)))


def beside_nccl(problem: Problem) -> Program:
    """A call, and collectives of NCCL that began before it and need not have ended."""

    def program(recorder: Recorder) -> None:
        group = next(iter(recorder.groups.values()))
        sums = [torch.ops._c10d_functional.all_reduce(recorder.tensor(1024), "sum", group.name) for _ in range(2)]
        call(problem, recorder, group, torch.bfloat16, backward=True)
        for each in sums:
            torch.ops._c10d_functional.wait_tensor(each)

    return program


@pytest.mark.parametrize("group_size", SIZES)
def test_no_call_hangs_beside_nccl(way: Way, group_size: int) -> None:
    for problem in (*LARGE, ROWS, PROBLEMS[-1]):
        assert not hangs(way.world(group_size, LARGE_SLOT).record(beside_nccl(problem)))


@pytest.mark.parametrize("problem", [LARGE[0], LARGE[2]], ids=str)
def test_a_copy_out_on_all_sms_does_not_wait(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or kernels of NCCL that sends stand behind in a queue may find no room."""
    monkeypatch.setattr(launches, "_LEAST_ALONE", 0)
    for way in ("fused", "chunked"):
        assert not hangs(WAYS[way].world(2, LARGE_SLOT).record(beside_nccl(problem)))
    monkeypatch.setattr(launches, "wait_all", lambda *args: None)
    texts = hangs(WAYS["chunked"].world(2, LARGE_SLOT).record(beside_nccl(problem)))
    assert any("all_reduce may find no room" in text for text in texts)


def sequence(seed: int) -> Program:
    """Calls and backwards in a random order, on the groups of a rank and two streams, the same on all ranks."""

    def program(recorder: Recorder) -> None:
        choose, streams = random.Random(seed), [torch.cuda.Stream() for _ in range(2)]
        for _ in range(8):
            problem, group = choose.choice(PROBLEMS), choose.choice(list(recorder.groups.values()))
            with torch.cuda.stream(choose.choice(streams)):
                call(problem, recorder, group, torch.bfloat16, backward=choose.random() < 0.5)

    return program


@pytest.mark.parametrize("group_size", SIZES[1:])
def test_no_sequence_of_calls_on_a_mesh_hangs(way: Way, group_size: int) -> None:
    world = way.world(group_size, SLOT_BYTES)
    for seed in range(3):
        assert not hangs(Mesh(**vars(world)).record(sequence(seed)))


def hang_in_one_queue(recordings: list[Recording]) -> bool:
    """Whether that is a hang, and with a queue for each stream there is none."""
    order = HappensBefore(recordings)
    return any("in one queue" in text for text in hangs(recordings)) and not (order.cyclic or order.unmatched)


REVERSALS: dict[str, tuple[Any, str, Problem]] = {
    "chunked": (Moves, "_push_staged", PROBLEMS[0]),
    "fused": (launches, "push", PROBLEMS[0]),
    "fused, by copy engines": (fused, "_send", PROBLEMS[3]),
    "fused, by kernels": (launches, "pack", PROBLEMS[3]),
}


@pytest.mark.parametrize("name", REVERSALS)
def test_a_wait_that_is_launched_before_a_send_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on a stream of its own, so it holds up no send there."""
    holder, function, problem = REVERSALS[name]
    send = getattr(holder, function)

    def behind_a_wait(first: Any, *args: Any, **options: Any) -> Any:
        s = first.s if isinstance(first, Moves) else first
        with s.on(Stream.READS):
            launches.wait_source(s, 1 - s.rank)
        return send(first, *args, **options)

    monkeypatch.setattr(holder, function, behind_a_wait)
    monkeypatch.setattr(Workspace, "least_copied", WAYS[name].least_copied)
    recordings = WAYS[name].world(2, SLOT_BYTES).record(calls([problem], backward=False))
    assert hang_in_one_queue(recordings)


def test_ranks_that_call_in_different_orders_are_found() -> None:
    def program(recorder: Recorder) -> None:
        groups = list(recorder.groups.values())
        for group in groups if recorder.rank == 0 else reversed(groups):
            call(PROBLEMS[0], recorder, group, torch.bfloat16, backward=False)

    assert any("in one queue" in text for text in hangs(WAYS["fused"].world(2, SLOT_BYTES, 2).record(program)))


@pytest.mark.parametrize("beside", ["another call", "NCCL"])
def test_a_gather_on_all_sms_before_its_copies_have_begun_is_found(
    beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be behind a kernel that finds no room, in two queues and not in one."""
    send = fused._send

    def unheard(*args: Any) -> None:
        send(*args)

    monkeypatch.setattr(fused, "_send", unheard)
    program = beside_nccl(LARGE[1]) if beside == "NCCL" else on_two_streams(LARGE)
    texts = hangs(WAYS["fused"].world(2, LARGE_SLOT, 1 if beside == "NCCL" else 2).record(program))
    assert texts and all("may find no room" in text for text in texts)


def test_dealings_are_all_partitions() -> None:
    found = {tuple(each.values()) for each in dealings(range(5))}
    assert len(found) == 52 == len(list(dealings(range(5))))
