"""Regions of tensors against the sets of their bytes, and the work of a call."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusedcomm.plan.schedule import Base, Place
from tests.helpers.problems import Problem
from tests.helpers.schedule.programs import World, calls
from tests.helpers.schedule.region import Region, region
from tests.helpers.schedule.walk import is_memcpy


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
