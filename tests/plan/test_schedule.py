"""No schedule of `chunked` or `fused` has a race or a wait that others block, and planted ones are found.

Nothing here runs on a GPU: tests/helpers/schedule has the checker, which reads the steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fusedcomm.memory import segment
from fusedcomm.plan import fused, launches
from fusedcomm.plan.builder import Device
from fusedcomm.plan.schedule import Await, Copy, Launch, Record, Schedule, Signal, Step, Stream, Wait
from tests.helpers.plain_cases import IN_ROUNDS, ONE_SHOT, OTHERS, SCATTERED, TWO_SHOT, UNEVEN_IN_ROUNDS, Case, NormCase
from tests.helpers.problems import Problem
from tests.helpers.schedule.blocked_waits import blocked_waits
from tests.helpers.schedule.happens_before import HappensBefore, races
from tests.helpers.schedule.kernel_effects import EFFECTS
from tests.helpers.schedule.multiprocessors import KERNELS, Footprint
from tests.helpers.schedule.programs import (
    BF16,
    CPU,
    GPU,
    Calls,
    Program,
    World,
    calls,
    memory_of,
    of_tokens,
    on_two_streams,
    schedule,
)
from tests.helpers.tiers import thorough_but
from tests.helpers.uneven import Uneven

ALGORITHMS = ("chunked", "fused")
PROBLEMS = [  # each of them takes two rounds or more in slots of SLOT_BYTES for each rank
    Problem("tokens-to-heads", (2, 128, 256), 256, 1, 2, out_shape=(4, 64), bias=True),
    Problem("heads-to-tokens", (2, 128, 2, 64), 256, 2, 1, op="all_to_all_matmul", k_dims=2),
    Problem("rows-to-columns", (128, 256), 256, 1, 0, op="all_to_all_matmul", bias=True),
    Problem("rows", (256, 128), (256, 128), 0, op="all_gather_matmul", bias=(True, False)),
    Problem("columns", (256, 128), 256, 1, op="all_gather_matmul"),
    Problem("rows", (256, 128), 256, scatter_dim=0, op="matmul_reduce_scatter", bias=True),
    Problem("sum", (768, 128), 256, op="matmul_all_reduce"),
]
SLOT_BYTES = 1 << 15  # for each rank
LARGE = [  # one round each, but with tiles for all SMs
    Problem("tokens-to-heads", (2048, 256), 2048, 0, 1),
    Problem("heads-to-tokens", (2048, 256), 8192, 1, 0, op="all_to_all_matmul"),
    Problem("rows", (2048, 256), 2048, scatter_dim=0, op="matmul_reduce_scatter"),
]
FEW_ROWS = [
    Problem("few-rows", (16, 128), 256, 0, 1),
    Problem("few-rows", (16, 128), 256, 0, op="all_gather_matmul"),
    Problem("few-rows", (16, 128), 256, scatter_dim=0, op="matmul_reduce_scatter"),
    Problem("no-rows", (0, 8), 8, 1, 0),
    Problem("no-rows", (0, 8), 8, 0, op="all_gather_matmul"),
]
PLAIN: list[Case] = [*IN_ROUNDS, ONE_SHOT]
BATCHED = Problem("batched-w", (4, 64, 128), 256, 1, 2, batched=True)
WAYS: dict[str, tuple[str, Device]] = {
    "chunked": ("chunked", GPU),
    "chunked, signals by kernels": ("chunked", GPU._replace(writes_by_stream=False)),
    "chunked, on CPUs": ("chunked", CPU),
    "fused": ("fused", GPU),
    "fused, by copy engines": ("fused", GPU._replace(least_copied=0)),
    "fused, by kernels": ("fused", GPU._replace(least_copied=1 << 62)),
}


def world_of(way: str, group_size: int = 2, slot_bytes: int = SLOT_BYTES, num_groups: int = 1) -> World:
    algorithm, device = WAYS[way]
    return World(group_size, slot_bytes * group_size, algorithm, num_groups, device)


def large_world(way: str, group_size: int = 2, num_groups: int = 1) -> World:
    return world_of(way, group_size, 1 << 25, num_groups)


def found(world: World, program: Program) -> list[str]:
    return races(HappensBefore(world.enqueue(program)))


def blocked(world: World, program: Program) -> list[str]:
    return blocked_waits(HappensBefore(world.enqueue(program)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("group_size", thorough_but([2], [2, 3]))
def test_nothing_races(group_size: int, way: str) -> None:
    """Every op in several rounds, in one with few rows, and in one with none, where only signals are sent."""
    assert not found(world_of(way, group_size), calls([*PROBLEMS, *FEW_ROWS, BATCHED, *PLAIN, *OTHERS]))


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_many_rounds_take_no_more_temporaries_than_few(device: Device) -> None:
    """Columns in short runs are packed once, and a product of two receivers lies in one place."""
    packed = Problem("packed-qkv", (256, 64), 96, 0, 2, out_shape=(3, 8, 4), bias=True)
    shared = Uneven("matmul_all_to_all", (256, 4, 64), 2, gather_dim=0, scatter_dim=1, scatter=((0, 2), (0, 2)))
    for problem in (packed, shared):
        made = [schedule(problem, memory_of(0, 2, size), device, "chunked") for size in (1 << 12, 1 << 14)]
        assert made[0].num_rounds > made[1].num_rounds > 1
        assert 0 < made[0].temporary_bytes <= made[1].temporary_bytes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_groups_do_not_race(algorithm: str) -> None:
    assert not found(world_of(algorithm, num_groups=2), on_two_streams(PROBLEMS[::3]))


@pytest.mark.parametrize("way", WAYS)
def test_sums_in_float32_do_not_race(way: str) -> None:
    """There a gather of K adds up sources as they come."""
    gather = Problem("k", (256, 64), 128, 1, op="all_gather_matmul")
    assert not found(world_of(way, 3), calls([gather], torch.float32))


def test_rows_in_slots_of_other_ranks_do_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is written again only when all have read it. With a single slot there is a race."""
    world = world_of("fused", 3)
    order = HappensBefore(world.enqueue(of_tokens))
    assert not races(order) and not blocked_waits(order)
    monkeypatch.setattr(segment, "NUM_SLOTS", 1)
    texts = found(world, of_tokens)
    assert any("race" in text and "segment" in text and "add_rows" in text for text in texts)


def test_pieces_of_experts_wait_for_their_rows() -> None:
    """Without either stream's wait for the other rows race with products."""

    def waits(schedule: Schedule) -> list[int]:
        return [i for i, step in enumerate(schedule.steps) if isinstance(step.work, Await)]

    def texts_without(nth: int) -> list[str]:
        def changed(rank: int, schedule: Schedule) -> Schedule:
            kept = [step for i, step in enumerate(schedule.steps) if i not in waits(schedule)[nth : nth + 1]]
            return replace(schedule, steps=tuple(kept))

        return found(replace(world_of("fused", 3), changed=changed), of_tokens)

    assert not texts_without(2)
    for nth in range(2):
        assert any("race" in text and "rows" in text for text in texts_without(nth))


# controls: a step less, or at another place, in every rank's schedule or in that of rank 0
def without(dropped: Callable[[Step], bool], ranks: tuple[int, ...] = (0, 1, 2)) -> Callable[[int, Schedule], Schedule]:
    def changed(rank: int, schedule: Schedule) -> Schedule:
        kept = (step for step in schedule.steps if rank not in ranks or not dropped(step))
        return replace(schedule, steps=tuple(kept))

    return changed


def is_a(kind: type, **facts: Any) -> Callable[[Step], bool]:
    return lambda step: isinstance(step.work, kind) and all(getattr(step.work, k) == v for k, v in facts.items())


def clocks(order: HappensBefore) -> list[tuple[int, ...]]:
    return [node.clock for nodes in order.by_operation.values() for node in nodes]


def is_needed_elsewhere(schedule: Schedule, place: int, rank: int) -> bool:
    """The own signal, which says what READS knows by an event, comes last; a gather on all SMs comes after the begin of
    its copies for test_schedule_queues.py.
    """
    stream = schedule.steps[place].stream
    follows = (each.work for each in schedule.steps[place:] if each.stream == stream)
    work = next(each for each in follows if not isinstance(each, (Await, Record)))
    own_signal = isinstance(work, Signal) and work.dst_rank == rank
    own_signal |= isinstance(work, Launch) and "signal_kernel" in work.kernel and work.arguments[1] == rank
    return own_signal or (isinstance(work, Launch) and "gather_matmul" in work.kernel)


@pytest.mark.parametrize("way", [name for name in WAYS if WAYS[name][1].is_gpu])
@pytest.mark.parametrize("problem", [*PROBLEMS, *PLAIN], ids=str)
def test_every_event_is_needed(problem: Problem | Case, way: str) -> None:
    """Without a stream's wait for it there is a race, unless other waits say the same. Calls follow one of `fused`."""

    def program(call: Calls) -> None:
        call(PROBLEMS[0], algorithm="fused")
        call(problem)
        call(problem)

    made: list[Schedule] = []

    def order_without(place: int | None) -> HappensBefore:
        def changed(rank: int, schedule: Schedule) -> Schedule:
            made.append(schedule)
            kept = (step for i, step in enumerate(schedule.steps) if i != place or not isinstance(step.work, Await))
            return replace(schedule, steps=tuple(kept))

        return HappensBefore(replace(world_of(way), changed=changed).enqueue(program))

    whole, schedule = clocks(order_without(None)), made[1]  # of rank 0
    for place in (i for i, step in enumerate(schedule.steps) if isinstance(step.work, Await)):
        order = order_without(place)
        needed = races(order) or clocks(order) == whole or is_needed_elsewhere(schedule, place, 0)
        assert needed, f"step {place}: {schedule.steps[place]}"


@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_streams_wait_twice_in_one_round_of_two_ranks(problem: Problem) -> None:
    """SENDS for the first chunk, and MAIN for all sends. With two rounds READS is a third stream."""
    counts = schedule(problem, memory_of(0, 2, 1 << 26), GPU, "chunked").counts()
    assert counts["EndRound"] == 1 and counts["Await"] == counts["Record"] == 2
    two = schedule(problem, memory_of(0, 2, 1 << 19), GPU, "chunked")
    assert two.counts()["EndRound"] > 1 and Stream.READS in {step.stream for step in two.steps}


@pytest.mark.parametrize("algorithm", ["chunked", "fused"])
@pytest.mark.parametrize(
    "call", [Case("all_reduce", (4096, 4096)), Problem("sums", (4096, 256), 4096, op="matmul_all_reduce")]
)
def test_an_all_reduce_has_the_same_pieces_by_every_algorithm(algorithm: str, call: Case | Problem) -> None:
    """16 MiB to each peer."""
    assert schedule(call, memory_of(0, 2, 1 << 26), GPU, algorithm).counts()["EndRound"] == 2 * 2


@pytest.mark.parametrize("way", ["chunked", "chunked, on CPUs"])
def test_a_missing_signal_is_found(way: str) -> None:
    world = replace(world_of(way), changed=without(is_a(Signal), ranks=(0,)))
    texts = found(world, calls(PROBLEMS[:1], twice=False))
    assert any("nobody signals" in text and "src_rank=0" in text for text in texts)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_wait_that_is_left_out_is_found(problem: Problem) -> None:
    world = replace(world_of("chunked, on CPUs"), changed=without(is_a(Wait, src_rank=1), ranks=(0,)))
    assert found(world, calls([problem], twice=False))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_norm_that_does_not_wait_is_found(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = EFFECTS["unpack_norm_kernel"]
    monkeypatch.setitem(EFFECTS, "unpack_norm_kernel", lambda call: (replace(each, waits=[]) for each in steps(call)))
    texts = found(world_of(algorithm), calls([TWO_SHOT], twice=False))
    assert any("race" in text and "segment" in text and "unpack_norm_kernel" in text for text in texts)


def test_a_signal_that_overtakes_its_copy_is_found() -> None:
    """It is on a stream that does not wait for the copy."""

    def changed(rank: int, schedule: Schedule) -> Schedule:
        overtakes = (
            step._replace(stream=Stream.READS) if isinstance(step.work, Signal) else step for step in schedule.steps
        )
        return replace(schedule, steps=tuple(overtakes))

    world = replace(world_of("chunked"), changed=changed)
    assert any("race" in text for text in found(world, calls(PROBLEMS[:1], twice=False)))


def test_a_round_that_ends_before_its_signals_is_found() -> None:
    """Kernels that signal read the epoch on the device. The own one, sent first, no longer says that all are."""

    def changed(rank: int, schedule: Schedule) -> Schedule:
        steps, begun = list[Step](), 0
        for step in schedule.steps:
            if isinstance(step.work, Launch) and step.work.kernel == "handshake.begin_push_kernel":
                begun = len(steps)
            is_own = isinstance(step.work, Launch) and "signal" in step.work.kernel and step.work.arguments[1] == rank
            steps.insert(first_signal(steps, begun) if is_own else len(steps), step)
        return replace(schedule, steps=tuple(steps))

    def first_signal(steps: list[Step], begun: int) -> int:
        launched = (i for i in range(begun, len(steps)) if is_a(Launch, kernel="handshake.signal_kernel")(steps[i]))
        return next(launched, len(steps))

    world = replace(world_of("chunked, signals by kernels", 3), changed=changed)
    texts = found(world, calls(PROBLEMS[:1], twice=False))
    assert any("race" in text and "signal_kernel" in text for text in texts)


def test_memory_that_nobody_holds_is_found() -> None:
    """A call whose end does not come after its copies."""

    def changed(rank: int, schedule: Schedule) -> Schedule:
        return replace(schedule, steps=schedule.steps[:-2])

    texts = found(replace(world_of("chunked"), changed=changed), calls(PROBLEMS[:1], twice=False))
    assert texts and all("memory is used again too early" in text for text in texts)


@pytest.mark.parametrize("way", WAYS)
def test_a_single_slot_is_a_race(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "NUM_SLOTS", 1)
    texts = found(world_of(way), calls(PROBLEMS[:1], twice=False))
    assert any("race" in text and "segment" in text for text in texts)


def test_operands_that_overlap_are_found() -> None:
    """A copy that sends a little more than its chunk, into the chunk of the next rank."""

    def changed(rank: int, schedule: Schedule) -> Schedule:
        steps = [
            step._replace(work=replace(step.work, to=step.work.to._replace(offset=step.work.to.offset + 2)))
            if rank == 0 and isinstance(step.work, Copy)
            else step
            for step in schedule.steps
        ]
        return replace(schedule, steps=tuple(steps))

    texts = found(replace(world_of("chunked", 3), changed=changed), calls(PROBLEMS[:1], twice=False))
    assert any("race" in text and "segment" in text for text in texts)


# waits that hold the SMs that others need
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("group_size", thorough_but([2], [2, 4]))
def test_no_wait_is_blocked(group_size: int, algorithm: str) -> None:
    assert not blocked(large_world(algorithm, group_size, num_groups=2), on_two_streams(LARGE))


STRIDED = [  # the part for a peer is in runs that copy engines do not take
    Problem("rows", (2048, 4096), 8192, 0, 1, op="all_to_all_matmul"),
    Problem("heads", (2048, 16, 256), 8192, 1, 2, op="all_to_all_matmul", k_dims=2),
]


@pytest.mark.parametrize("problem", STRIDED, ids=str)
def test_strided_copies_beside_a_gather_that_leaves_no_registers(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such copies are kernels of torch: beside a gather on all SMs they may find no room, but its pack has its own."""
    monkeypatch.setitem(KERNELS, "gather_matmul_kernel", Footprint(8, 255, 229_408))
    program = calls([problem], twice=False)
    assert not blocked(large_world("fused"), program)
    monkeypatch.setattr(fused, "copy_engines_send", lambda *args: True)
    assert any("copy_" in text and "may find no room" in text for text in blocked(large_world("fused"), program))


def test_waits_in_opposite_orders_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the order of `launch_order`, one group's copy-out holds the SMs that the other group's push needs."""
    monkeypatch.setattr(Device, "num_programs", lambda self, kind: self.num_sms)
    monkeypatch.setattr(launches, "_LEAST_ALONE", 1 << 62)

    def program(call: Calls) -> None:
        for caller, group in enumerate(call.groups):
            call.walk.last_call = []
            call(LARGE[0], group, caller)

    texts = blocked(large_world("fused", num_groups=2), program)
    assert any("push_matmul_kernel may find no room" in text for text in texts)


def beside_nccl(call: Calls) -> None:
    ended = call.walk.begin_collective(call.groups[0], 2048)
    call(LARGE[1])
    call.walk.stream(0).wait(ended)


@pytest.mark.parametrize("way", WAYS)
def test_a_gather_beside_nccl_is_not_blocked(way: str) -> None:
    assert not found(large_world(way), beside_nccl) and not blocked(large_world(way), beside_nccl)


def test_a_copy_engine_that_starts_before_the_last_round_ends_is_found() -> None:
    is_fork = is_a(Await)
    changed = without(lambda step: step.stream == Stream.SENDS and is_fork(step))
    world = replace(world_of("fused, by copy engines"), changed=changed)
    assert any("race" in text for text in found(world, calls(PROBLEMS[1:4], twice=False)))


# parts of different sizes
A2A, BACK = "matmul_all_to_all", "all_to_all_matmul"
GATHER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter"
UNEVEN = [  # each of them takes several rounds in slots of SLOT_BYTES for each rank
    Uneven(A2A, (2, 259, 7, 64), 2, gather_dim=1, scatter_dim=2, bias=True, other=128),
    Uneven(A2A, (2, 259, 3, 64), 2, gather_dim=1, scatter_dim=2, scatter=((0, 2), (1, 2)), other=128),
    Uneven(BACK, (2, 259, 7, 64), 2, gather_dim=2, scatter_dim=1, other=128),
    Uneven(BACK, (259, 258), 1, gather_dim=0, scatter_dim=1, gather=(0, 259), other=128),
    Uneven(GATHER, (259, 128), 1, gather_dim=0, gather=(259, 0), bias=True, other=128),
    Uneven(GATHER, (259, 129), 1, gather_dim=1, other=128),
    Uneven(REDUCE, (259, 128), 1, scatter_dim=0, scatter=(0, 259), other=128),
    Uneven(REDUCE, (259, 129), 1, scatter_dim=1, bias=True, other=128),
]


def order_of(cases: Sequence[Uneven | Case], device: Device = GPU, dtype: torch.dtype = BF16) -> HappensBefore:
    return HappensBefore(World(2, SLOT_BYTES * 2, "chunked", device=device).enqueue(calls(cases, dtype)))


@pytest.mark.parametrize("device", [GPU, CPU], ids=["GPU", "CPU"])
def test_nothing_races_and_no_wait_is_blocked(device: Device) -> None:
    order = order_of([*UNEVEN, *UNEVEN_IN_ROUNDS, NormCase(SCATTERED.op, (1537, 192))], device)
    assert not races(order) and not blocked_waits(order)


def test_float32_and_batches_do_not_race() -> None:
    batched = Uneven(A2A, (3, 130, 67), gather_dim=1, scatter_dim=2, batched=True, other=64)
    assert not races(order_of([UNEVEN[2], UNEVEN[5]], dtype=torch.float32)) and not races(order_of([batched]))
