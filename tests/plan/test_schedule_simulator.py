"""The simulator of schedules: small ones against times by hand, the start program against a formula and its page."""

import random
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusedcomm.plan import launches
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.schedule import Base, Place, Stream
from tests.helpers.problems import GATHERS, Problem
from tests.helpers.schedule import start_program
from tests.helpers.schedule.blocked_waits import blocked_waits
from tests.helpers.schedule.happens_before import HappensBefore, races
from tests.helpers.schedule.operations import Enqueued, Flag, Kind, Operation, Step, Work
from tests.helpers.schedule.programs import GPU, Calls, World, calls, exchange_of, memory_of
from tests.helpers.schedule.rates import H200, H200_WITH_ROOM, Rates
from tests.helpers.schedule.region import Region, region
from tests.helpers.schedule.simulator import simulate
from tests.helpers.schedule.walk import is_memcpy
from tests.package.test_docs import page

AT_ONCE = replace(H200, same_stream=0, event=0, small_kernel=0, flag=0, host=0)
ROUNDS, CHUNK_BYTES = 8, 2 * 16192 * 2048 * 2  # the start program's, on 4 ranks
SECOND = int(H200.link)  # bytes that take one


def copy(rank: int, number: int, dst_rank: int, num_bytes: int, stream: int = 0) -> Operation:
    step = Step(work=Work(sent={dst_rank: num_bytes}))
    return Operation(number, rank, stream, Kind.MEMCPY, f"copy to {dst_rank}", [], [step])


def kernel(rank: int, number: int, stream: int, steps: list[Step], num_programs: int = 132) -> Operation:
    return Operation(number, rank, stream, Kind.LAUNCH, "push_matmul_kernel", [], steps, num_programs)


def seconds(operations: list[list[Operation]]) -> float:
    return round(simulate([Enqueued(rank, each) for rank, each in enumerate(operations)], AT_ONCE).total, 3)


def test_copies_share_what_a_gpu_sends_and_receives() -> None:
    assert seconds([[copy(0, 0, 1, SECOND)], []]) == 1
    assert seconds([[copy(0, 0, 1, SECOND), copy(0, 1, 2, SECOND)], [], []]) == 2  # in order
    assert seconds([[copy(0, 0, 1, SECOND), copy(0, 1, 2, SECOND, stream=1)], [], []]) == 2  # sent by one
    assert seconds([[copy(0, 0, 2, SECOND)], [copy(1, 0, 2, SECOND)], []]) == 2  # received by one
    assert seconds([[copy(0, 0, 1, SECOND)], [copy(1, 0, 2, SECOND)], [copy(2, 0, 0, SECOND)]]) == 1
    assert seconds([[copy(0, 0, 1, SECOND), copy(0, 1, 2, 2 * SECOND, stream=1)], [], []]) == 3


def test_programs_that_hold_an_sm_each_run_one_kernel_after_the_other() -> None:
    work = Work(flops=AT_ONCE.constants.fused_flops["bfloat16"])
    assert seconds([[kernel(0, 0, 0, [Step(work=work)])]]) == 1
    assert seconds([[kernel(0, 0, 0, [Step(work=work)], num_programs=66)]]) == 2
    assert seconds([[kernel(0, 0, 0, [Step(work=work)]), kernel(0, 1, 1, [Step(work=work)])]]) == 2
    halves = [kernel(0, number, number, [Step(work=work)], num_programs=66) for number in range(2)]
    assert seconds([halves]) == 2


def test_a_wait_ends_with_its_signal() -> None:
    flag = Flag("group", 1, 0, 1)
    sends = replace(copy(0, 0, 1, SECOND), steps=[Step(work=Work(sent={1: SECOND}), signals=[flag])])
    waits = kernel(1, 0, 0, [Step(waits=[flag])], num_programs=1)
    assert seconds([[sends], [waits]]) == 1


def beside(pack: Any, s: Any, *args: Any, **options: Any) -> None:
    s.join(Stream.SENDS, Stream.MAIN)
    with s.on(Stream.SENDS):
        pack(s, *args, **options)


def test_a_wait_for_what_finds_no_room_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matmul of a gather fills all SMs before its pack, on another stream, is placed."""
    gather = calls([Problem("heads-to-tokens", (2048, 256), 8192, 1, 0, op="all_to_all_matmul")], twice=False)

    def program(call: Calls) -> None:
        call.walk.multiply(1, 8192, 8192, 8192)
        gather(call)

    world = World(2, 1 << 26, "fused", device=GPU._replace(least_copied=1 << 62))
    assert simulate(world.enqueue(program), H200).total < 3e-3
    monkeypatch.setattr(launches, "pack", partial(beside, launches.pack))
    enqueued = world.enqueue(program)
    with pytest.raises(AssertionError, match=r"never end: .*pack_kernel"):
        simulate(enqueued, H200)


@pytest.mark.parametrize("rates", [H200, H200_WITH_ROOM])
def test_signals_by_stream_writes_need_no_room(rates: Rates) -> None:
    """By hand, also if cuBLAS fills the SMs: all but the last unpack run beside matmuls, on half of their SMs."""
    chunk = H200.matmul((2, 16192, 4096, 2048), 1)
    unpack = 3 * CHUNK_BYTES / H200.memory  # the own chunk lies where it belongs
    by_hand = ROUNDS * 4 * chunk + (ROUNDS - 1) * unpack / 2 + unpack
    assert simulate(start_program.enqueued("forward", "chunked", 1), rates).total == pytest.approx(by_hand, rel=0.015)


GATHERED = [(4096, 8192, 1400, 1428), (1024, 2048, 103, 111)]  # rows, n, us, us with the own chunk in the slot


def gather_us(rows: int, n: int) -> float:
    problem = Problem("rows", (rows, 4096), n, 0, op="all_gather_matmul")
    enqueued = World(4, 1 << 30, "fused").enqueue(calls([problem] * 4, twice=False))
    return 1e6 * simulate(enqueued, replace(H200, host=0)).total / 4


@pytest.mark.parametrize(("rows", "n", "us", "sent_us"), GATHERED)
def test_an_own_chunk_that_stays_in_x_saves_time(rows: int, n: int, us: int, sent_us: int) -> None:
    assert gather_us(rows, n) == pytest.approx(us, abs=0.5)
    with mock.patch.object(Exchange, "splits_columns", True):  # the own chunk is sent as if K were gathered
        assert gather_us(rows, n) == pytest.approx(sent_us, abs=0.5)


BEHIND = {  # chunks copied behind the last tile, `fused` and `chunked`, as docs/ops.md says; a sum is 2.5 copies
    Problem("push", (512, 256), 256, 0, 1): (4, 3),
    Problem("sum", (2048, 256), 512, scatter_dim=0, op="matmul_reduce_scatter"): (2.5, 2.5),
    Problem("sums", (2048, 256), 512, op="matmul_all_reduce"): (2.5 + 1 + 4, 2.5 + 4),  # the own sum by pack, or copied
    Problem("rows", (2048, 512), 512, 0, op="all_gather_matmul"): (3, 0),
    Problem("k", (2048, 1024), 512, 1, 0, op="all_to_all_matmul"): (4, 0),
}


@pytest.mark.parametrize("problem", BEHIND, ids=str)
@pytest.mark.parametrize("algorithm", ["fused", "chunked"])
def test_bytes_left_behind_the_matmul(problem: Problem, algorithm: str) -> None:
    """A gather has those of its by-product alone."""
    for by_product in (True, False)[: 1 + (problem.op in GATHERS)]:
        (rank, *_) = World(4, 1 << 30, algorithm).enqueue(lambda call, by=by_product: call(problem, by_product=by))
        steps = [step for operation in rank.operations for step in operation.steps]
        last = max(i for i, step in enumerate(steps) if step.work.flops)
        chunk_bytes = 2 * exchange_of(problem, memory_of(0, 4, 1 << 30)).chunk_numel
        behind = sum(step.work.copied for step in steps[last + 1 :]) / chunk_bytes
        assert behind == (BEHIND[problem][algorithm == "chunked"] if by_product else 0)


def test_pieces_of_an_all_reduce_hide_its_second_half() -> None:
    """The last of four pieces of 8 MiB to each peer alone has it behind the matmul."""
    problem, times = Problem("sums", (8192, 7168), 8192, op="matmul_all_reduce"), []
    for in_pieces in (True, False):
        with mock.patch.object(Exchange, "comes_in_pieces", lambda *args, found=in_pieces: found):
            enqueued = World(4, 1 << 30, "chunked").enqueue(lambda call: call(problem))
        order = HappensBefore(enqueued)
        assert not races(order) and not blocked_waits(order)
        times.append(simulate(enqueued, replace(H200, host=0)).total)
    matmul = H200.matmul((1, 8192, 7168, 8192), 1)
    assert [time / matmul for time in times] == pytest.approx([1.19, 1.33], abs=0.01)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", ["chunked", "fused"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_start_program_has_no_race_and_no_blocked_wait(direction: str, algorithm: str) -> None:
    order = HappensBefore(start_program.enqueued(direction, algorithm, 2))
    assert not races(order) and not blocked_waits(order)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_page_has_what_is_predicted() -> None:
    """`python -m tests.helpers.schedule` prints the table."""
    assert "\n".join(start_program.table()) in page("status")


# regions and work of a schedule
def random_view(base: Tensor, generator: random.Random) -> Tensor:
    view = base.view(4, 6, 8)
    for dim in range(3):
        start = generator.randrange(view.shape[dim])
        view = view.narrow(dim, start, generator.randint(1, view.shape[dim] - start))
    view = view.movedim(generator.randrange(3), generator.randrange(3))
    return view[:: generator.choice((1, 2))]


def bytes_of(found: Region) -> set[int]:
    starts = [found.start]
    for count, stride in found.dims:
        starts = [start + i * stride for start in starts for i in range(count)]
    return {start + i for start in starts for i in range(found.run)}


def test_regions_are_the_bytes_of_tensors() -> None:
    generator = random.Random(0)
    base = torch.arange(4 * 6 * 8, dtype=torch.int16)
    for _ in range(300):
        views = [random_view(base, generator) for _ in range(2)]
        regions = [region("a", 2 * int(t.storage_offset()), t.shape, t.stride(), 2) for t in views]
        expected = [{2 * i + byte for i in t.flatten().tolist() for byte in range(2)} for t in views]
        first, second = regions
        assert first is not None and second is not None
        assert [bytes_of(first), bytes_of(second)] == expected
        assert first.num_bytes == len(expected[0])
        assert first.overlaps(second) == second.overlaps(first) == bool(expected[0] & expected[1])
        assert not first.overlaps(second.moved("b", 0))
    assert region("a", 0, (2, 0), (1, 1), 2) is None


def place(t: Tensor) -> Place:
    return Place(Base.INPUT, 0, int(t.storage_offset()) * t.itemsize, tuple(t.shape), t.stride(), t.dtype)


def test_a_copy_is_a_memcpy_if_both_sides_are_dense_alike() -> None:
    def by_memcpy(to: Tensor, source: Tensor) -> bool:
        return is_memcpy(place(to), place(source))

    x = torch.empty(4, 6)
    assert by_memcpy(x, x) and by_memcpy(x.mT, x.mT) and by_memcpy(x[1:3], x[:2])
    assert not by_memcpy(x.mT, torch.empty(6, 4))
    assert not by_memcpy(x[:, 1:], x[:, 1:])
    assert not by_memcpy(x, x.half())


@pytest.mark.parametrize("algorithm", ["chunked", "fused"])
def test_a_call_does_the_work_that_its_shapes_say(algorithm: str) -> None:
    """Every rank multiplies all of x by all of w, and sends every peer its part, in more rounds than one."""
    rows, k, n, num_ranks = 512, 256, 1024, 4
    world = World(num_ranks, 1 << 18, algorithm)
    for problem in (
        Problem("push", (rows, k), n // num_ranks, 0, 1),
        Problem("gather", (rows, k), n, 0, op="all_gather_matmul"),
    ):
        for enqueued in world.enqueue(calls([problem], twice=False)):
            steps = [step for operation in enqueued.operations for step in operation.steps]
            gathers = problem.op == "all_gather_matmul"
            assert sum(step.work.flops for step in steps) == 2 * rows * k * n * (num_ranks if gathers else 1)
            sent = [sum(step.work.sent.get(rank, 0) for step in steps) for rank in range(num_ranks)]
            to_each = 2 * rows * (k if gathers else n // num_ranks)
            assert sent == [0 if rank == enqueued.rank else to_each for rank in range(num_ranks)]
            assert len({flag.epoch for step in steps for flag in step.signals}) > 1
