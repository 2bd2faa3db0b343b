"""No call hangs however a GPU deals streams to hardware queues; tests/helpers/schedule/hardware_queues.py says why."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

pytest.importorskip("triton")

from fusedcomm.plan import launches
from fusedcomm.plan.builder import Builder
from fusedcomm.plan.schedule import Await, Copy, Finish, Launch, Schedule, Signal, Step, Stream
from tests.helpers.groups import one_buffer
from tests.helpers.plain_cases import OTHERS, SCATTERED, Case
from tests.helpers.problems import Problem
from tests.helpers.schedule.happens_before import HappensBefore, races
from tests.helpers.schedule.hardware_queues import dealings, hangs
from tests.helpers.schedule.operations import Enqueued
from tests.helpers.schedule.programs import BF16, Calls, Mesh, Program, World, calls, each_way, on_two_streams
from tests.helpers.tiers import thorough_but
from tests.ops.test_uneven import MANY_ROUNDS
from tests.plan.test_schedule import (
    BATCHED,
    FEW_ROWS,
    LARGE,
    PLAIN,
    PROBLEMS,
    STRIDED,
    UNEVEN,
    WAYS,
    is_a,
    large_world,
    without,
    world_of,
)

SIZES = [2, pytest.param(4, marks=pytest.mark.thorough), pytest.param(8, marks=pytest.mark.nightly)]
ROWS = Problem("rows", (2048, 256), 8192, 0, op="all_gather_matmul")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("group_size", SIZES)
def test_no_call_hangs(way: str, group_size: int) -> None:
    """Every op in several rounds, with few rows and none; then with tiles for all SMs."""
    assert not hangs(world_of(way, group_size).enqueue(calls([*PROBLEMS, *FEW_ROWS, BATCHED, *PLAIN, *OTHERS])))
    assert not hangs(large_world(way, group_size, 2).enqueue(on_two_streams([*LARGE, *STRIDED])))


@pytest.mark.parametrize("way", [name for name in WAYS if WAYS[name][0] == "chunked"])
def test_no_call_of_uneven_parts_hangs(way: str) -> None:
    assert not hangs(world_of(way).enqueue(calls(UNEVEN)))


def beside_nccl(problem: Problem | Case) -> Program:
    """A call, and collectives of NCCL that began before it and need not have ended."""

    def program(call: Calls) -> None:
        ended = [call.walk.begin_collective(call.groups[0], 2048) for _ in range(2)]
        for each, by_product in each_way(problem):
            call(each, by_product=by_product)
        for end in ended:
            call.walk.stream(0).wait(end)

    return program


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("group_size", SIZES)
def test_no_call_hangs_beside_nccl(way: str, group_size: int) -> None:
    for problem in (*LARGE, ROWS, PROBLEMS[-1]):
        assert not hangs(large_world(way, group_size).enqueue(beside_nccl(problem)))


@pytest.mark.parametrize("problem", [LARGE[0], LARGE[2], SCATTERED], ids=str)
def test_a_copy_out_on_all_sms_does_not_wait(problem: Problem | Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or kernels of NCCL that sends stand behind in a queue may find no room."""
    monkeypatch.setattr(launches, "_LEAST_ALONE", 0)
    for way in ("fused", "chunked"):
        assert not hangs(large_world(way).enqueue(beside_nccl(problem)))
    monkeypatch.setattr(launches, "wait_all", lambda *args: None)
    texts = hangs(large_world("chunked").enqueue(beside_nccl(problem)))
    assert any("all_reduce may find no room" in text for text in texts)


def sequence(seed: int) -> Program:
    """Calls in a random order, on the groups of a rank and two streams, the same on all ranks."""

    def program(call: Calls) -> None:
        choose = random.Random(seed)
        for _ in range(12):
            problem, group = choose.choice(PROBLEMS), choose.choice(call.groups)
            each, by_product = choose.choice(each_way(problem))
            call(each, group, choose.randrange(2), BF16, by_product)

    return program


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("group_size", SIZES[1:])
def test_no_sequence_of_calls_on_a_mesh_hangs(way: str, group_size: int) -> None:
    world = Mesh(**vars(world_of(way, group_size)))
    for seed in range(3):
        assert not hangs(world.enqueue(sequence(seed)))


def hangs_in_one_queue(ranks: list[Enqueued]) -> bool:
    """Whether that is a hang, and with a queue for each stream there is none."""
    order = HappensBefore(ranks)
    return any("in one queue" in text for text in hangs(ranks)) and not (order.cyclic or order.unmatched)


def sends(step: Step) -> bool:
    if isinstance(step.work, Launch):
        return any(name in step.work.kernel for name in ("push_matmul", "pack", "signal"))
    return isinstance(step.work, Signal) or (isinstance(step.work, Copy) and step.stream == Stream.SENDS)


@pytest.mark.parametrize("way", [name for name in WAYS if WAYS[name][1].is_gpu])
@pytest.mark.parametrize("problem", PROBLEMS[::3], ids=str)
def test_a_wait_that_is_launched_before_a_send_is_found(problem: Problem, way: str) -> None:
    """It is on a stream of its own, so it holds up no send there."""
    world = world_of(way)

    def changed(rank: int, schedule: Schedule) -> Schedule:
        memory = Calls(world, rank).walk.memories["group 0"]
        builder = Builder(memory, world.device, [])
        with builder.on(Stream.READS):
            launches.wait_source(builder, 1 - rank)
        first = next(i for i, step in enumerate(schedule.steps) if sends(step))
        return replace(schedule, steps=(*schedule.steps[:first], *builder.finish().steps, *schedule.steps[first:]))

    assert hangs_in_one_queue(replace(world, changed=changed).enqueue(calls([problem], twice=False)))


def test_ranks_that_call_in_different_orders_are_found() -> None:
    def program(call: Calls) -> None:
        for group in call.groups if call.rank == 0 else reversed(call.groups):
            call(PROBLEMS[0], group)

    assert any("in one queue" in text for text in hangs(world_of("fused", num_groups=2).enqueue(program)))


@pytest.mark.parametrize("beside", ["another call", "NCCL"])
def test_a_gather_on_all_sms_before_its_copies_have_begun_is_found(beside: str) -> None:
    """They may be behind a kernel that finds no room, in two queues and not in one."""

    def changed(rank: int, schedule: Schedule) -> Schedule:
        on_main = [i for i, step in enumerate(schedule.steps) if step.stream == Stream.MAIN]
        is_gather, is_await = is_a(Launch, kernel="gather_matmul.gather_matmul_kernel"), is_a(Await)
        dropped = {i for i, j in pairwise(on_main) if is_await(schedule.steps[i]) and is_gather(schedule.steps[j])}
        return replace(schedule, steps=tuple(step for i, step in enumerate(schedule.steps) if i not in dropped))

    program = beside_nccl(LARGE[1]) if beside == "NCCL" else on_two_streams(LARGE)
    world = large_world("fused", num_groups=1 if beside == "NCCL" else 2)
    texts = hangs(replace(world, changed=changed).enqueue(program))
    assert texts and all("may find no room" in text for text in texts)


def test_dealings_are_all_partitions() -> None:
    found = {tuple(each.values()) for each in dealings(range(5))}
    assert len(found) == 52 == len(list(dealings(range(5))))


# `pipelined`
WORLD = World(2, 1 << 15, "pipelined")


def found(program: Program, world: World = WORLD) -> list[str]:
    return races(HappensBefore(world.enqueue(program)))


@pytest.mark.parametrize("group_size", thorough_but([2], [2, 3]))
def test_nothing_races(group_size: int) -> None:
    """Every op in several pieces, with few rows and with none."""
    assert not found(calls([*PROBLEMS, *FEW_ROWS, BATCHED]), replace(WORLD, group_size=group_size))


def test_parts_of_different_sizes_do_not_race() -> None:
    assert not found(calls(list(MANY_ROUNDS.values())), replace(WORLD, group_size=3))


def test_two_groups_neither_race_nor_hang() -> None:
    enqueued = replace(WORLD, num_groups=2).enqueue(on_two_streams(LARGE))
    assert not races(HappensBefore(enqueued)) and not hangs(enqueued)
    assert not hangs(WORLD.enqueue(beside_nccl(LARGE[1])))


@pytest.mark.parametrize("problem", PROBLEMS[::3], ids=str)
def test_pieces_that_share_their_buffers_race(problem: Problem) -> None:
    with one_buffer():
        assert any("race" in text for text in found(calls([problem], twice=False)))


@pytest.mark.parametrize("problem", PROBLEMS[::3], ids=str)
def test_a_collective_that_nobody_waits_for_is_found(problem: Problem) -> None:
    texts = found(calls([problem], twice=False), replace(WORLD, changed=without(is_a(Finish))))
    assert any("race" in text for text in texts) and any("used again too early" in text for text in texts)
