"""What `pipelined` enqueues on GPUs beside NCCL, recorded without one, has no race, and planted ones are found."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from fusedcomm.plan.pipelined import Piece
from tests.helpers.group_collectives import one_buffer
from tests.helpers.schedule.blocked_waits import blocked_waits
from tests.helpers.schedule.happens_before import HappensBefore, races
from tests.helpers.schedule.operations import Kind
from tests.helpers.schedule.programs import Program, World, calls, on_two_streams, uneven_calls
from tests.helpers.tiers import thorough_but
from tests.ops.test_uneven import MANY_ROUNDS
from tests.plan.test_schedule import FEW_ROWS, LARGE, PROBLEMS


def world(group_size: int, num_groups: int = 1) -> World:
    return World(group_size, 1 << 15, "pipelined", num_groups)


def found(program: Program, group_size: int = 2) -> list[str]:
    return races(HappensBefore(world(group_size).record(program)))


@pytest.mark.parametrize("group_size", thorough_but([2], [2, 3]))
def test_nothing_races(group_size: int) -> None:
    """Every op, forward and backward, in several pieces, with few rows and with none."""
    assert not found(calls([*PROBLEMS, *FEW_ROWS]), group_size)


@pytest.mark.thorough
def test_parts_of_different_sizes_do_not_race() -> None:
    assert not found(uneven_calls(list(MANY_ROUNDS.values())), 3)


@pytest.mark.parametrize("program", [calls, on_two_streams])
def test_two_groups_neither_race_nor_block_each_other(program: Any) -> None:
    order = HappensBefore(world(2, num_groups=2).record(program(LARGE)))
    assert not races(order) and not blocked_waits(order)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_matmuls_run_beside_collectives(problem: Any) -> None:
    """Nothing orders a piece's collective and a matmul of the piece after it, or for a gather before it."""
    order = HappensBefore(world(2).record(calls([problem], backward=False)))
    nodes = [node for node in order.nodes if node.operation.rank == 0]
    matmuls = [node for node in nodes if node.operation.kind is Kind.MATMUL]
    collectives = [node for node in nodes if node.operation.kind is Kind.COLLECTIVE and node.step.writes]
    assert len(collectives) >= 4
    for collective in collectives[1:3]:
        assert any(
            not order.ordered(matmul, collective) and not order.ordered(collective, matmul) for matmul in matmuls
        )


@pytest.mark.parametrize("problem", PROBLEMS[::3], ids=str)
def test_pieces_that_share_their_buffers_race(problem: Any) -> None:
    with one_buffer():
        assert any("race" in text for text in found(calls([problem], backward=False)))


@pytest.mark.parametrize("problem", PROBLEMS[::3], ids=str)
def test_a_collective_that_nobody_waits_for_is_found(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Piece, "wait", lambda self: None)
    texts = found(calls([problem], backward=False))
    assert any("race" in text for text in texts) and any("used again too early" in text for text in texts)
