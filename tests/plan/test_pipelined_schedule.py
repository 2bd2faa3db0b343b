"""No schedule of `pipelined` has a race beside NCCL, and planted ones are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from fusedcomm.plan.schedule import Finish
from tests.helpers.group_collectives import one_buffer
from tests.helpers.problems import Problem
from tests.helpers.schedule.happens_before import HappensBefore, races
from tests.helpers.schedule.hardware_queues import hangs
from tests.helpers.schedule.programs import Program, World, calls, on_two_streams
from tests.helpers.tiers import thorough_but
from tests.ops.test_uneven import MANY_ROUNDS
from tests.plan.test_schedule import BATCHED, FEW_ROWS, LARGE, PROBLEMS, is_a, without
from tests.plan.test_schedule_queues import beside_nccl

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
