"""Regions of tensors against the sets of their bytes, and what the recorder says that a call does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.helpers.problems import Problem
from tests.helpers.schedule import torch_ops
from tests.helpers.schedule.happens_before import HappensBefore, races
from tests.helpers.schedule.operations import Kind, Recording
from tests.helpers.schedule.programs import World, calls
from tests.helpers.schedule.recorder import Recorder
from tests.helpers.schedule.region import Region, region


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


def test_a_copy_is_a_memcpy_if_both_sides_are_dense_alike() -> None:
    x = torch.empty(4, 6)
    assert torch_ops.is_memcpy(x, x) and torch_ops.is_memcpy(x.mT, x.mT) and torch_ops.is_memcpy(x[1:3], x[:2])
    assert not torch_ops.is_memcpy(x.mT, torch.empty(6, 4))
    assert not torch_ops.is_memcpy(x[:, 1:], x[:, 1:])
    assert not torch_ops.is_memcpy(x, x.half())


@pytest.mark.parametrize("algorithm", ["chunked", "fused"])
def test_a_call_does_the_work_that_its_shapes_say(algorithm: str) -> None:
    """Every rank multiplies all of x by all of w, and sends every peer its part, in more rounds than one."""
    rows, k, n, num_ranks = 512, 256, 1024, 4
    world = World(num_ranks, 1 << 18, algorithm)
    for problem in (
        Problem("push", (rows, k), n // num_ranks, 0, 1),
        Problem("gather", (rows, k), n, 0, op="all_gather_matmul"),
    ):
        for recording in world.record(calls([problem], backward=False)):
            work = [step.work for operation in recording.operations for step in operation.steps]
            gathers = problem.op == "all_gather_matmul"
            assert sum(each.flops for each in work) == 2 * rows * k * n * (num_ranks if gathers else 1)
            sent = [sum(each.sent.get(rank, 0) for each in work) for rank in range(num_ranks)]
            to_each = 2 * rows * (k if gathers else n // num_ranks)
            assert sent == [0 if rank == recording.rank else to_each for rank in range(num_ranks)]
            assert len(rounds(recording)) > 1


def rounds(recording: Recording) -> set[int]:
    return {flag.epoch for operation in recording.operations for step in operation.steps for flag in step.signals}


@pytest.mark.parametrize("synchronizes", ["item", "stream", "event", "device", None])
def test_what_the_host_waits_for_comes_before_what_it_enqueues(synchronizes: str | None) -> None:
    def program(recorder: Recorder) -> None:
        side, x = torch.cuda.Stream(), recorder.tensor(64)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.zero_()
            event = side.record_event()
            if synchronizes == "item":
                assert not x[0].item()
        if synchronizes == "stream":
            side.synchronize()
        elif synchronizes == "event":
            event.synchronize()
        elif synchronizes == "device":
            torch.cuda.synchronize()
        x.add_(1)

    recordings = World(2, 1 << 16, "chunked").record(program)
    assert bool(races(HappensBefore(recordings))) == (synchronizes is None)
    assert any(each.host_waits for each in recordings[0].operations) == (synchronizes is not None)
    kinds = [each.kind for each in recordings[0].operations if each.stream >= 0][1:]
    assert kinds == [Kind.ELEMENTS, *[Kind.MEMCPY] * (synchronizes == "item"), Kind.ELEMENTS]


def test_what_the_host_reads_must_be_there() -> None:
    def program(recorder: Recorder) -> None:
        side, x = torch.cuda.Stream(), recorder.tensor(64)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.zero_()
        x[0].item()

    assert any("to the host" in text for text in races(HappensBefore(World(2, 1 << 16, "chunked").record(program))))
