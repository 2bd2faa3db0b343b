"""Values of `fused` gathers as on GPUs, without one, in random orders that streams, events and flags allow.

tests/helpers/schedule/random_orders.py runs them, by copy engines and by a kernel that sends.
"""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("triton")

from fusedcomm.plan.geometry import exchange
from tests.helpers.problems import Problem, integers
from tests.helpers.schedule.random_orders import NoProgressError
from tests.run.test_chunked_orders import BF16, COLUMNS, EXCHANGE, FP32, ROWS, SCATTER, SUM, Run, cut_in

INTERLEAVED = Problem("interleaved", (2, 3, 4), 5, 1, op="all_gather_matmul", bias=True)
COLUMNS_TO_ROWS = Problem("columns-to-rows", (3, 2, 4), 5, 0, 1, op="all_to_all_matmul", k_dims=2)
PARTS_OF_K = Problem("head-dims-to-rows", (3, 2, 4), 5, 0, 2, op="all_to_all_matmul", k_dims=2, bias=True)
WITH_OWN_ROWS = [ROWS, INTERLEAVED, COLUMNS_TO_ROWS, PARTS_OF_K]
PROBLEMS = [*WITH_OWN_ROWS, EXCHANGE, COLUMNS]

by_whom = pytest.mark.parametrize("by_copy", [True, False], ids=["copies", "pack"])


def run(problem: Problem, by_copy: bool, num_rounds: int = 3, few_rows: int = 0, **options: Any) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "FEW_ROWS", few_rows)
        cut_in(num_rounds, patch)
        return Run(problem, algorithm="fused", least_copied=0 if by_copy else 1 << 62, **options)


@by_whom
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_gathers_are_right_in_a_random_order(problem: Problem, by_copy: bool) -> None:
    run(problem, by_copy, by_product=problem is ROWS, dtype=FP32 if by_copy else BF16, num_calls=1).finish(0)


ROWS_TO_COLUMNS = Problem("rows-to-columns", (3, 6, 4), 5, 2, 1)


@by_whom
@pytest.mark.parametrize("problem", [ROWS, COLUMNS_TO_ROWS, ROWS_TO_COLUMNS, SCATTER, SUM], ids=str)
def test_few_rows_are_multiplied_at_once_by_cublas(problem: Problem, by_copy: bool) -> None:
    """Sums too, and either way of an exchange."""
    ran = run(problem, by_copy, few_rows=128, by_product=by_copy, num_calls=1)
    assert {each.name for each in ran.gpus.queued}.isdisjoint({"push_matmul_kernel", "gather_matmul_kernel"})
    ran.finish(0)


def own_parts_written(finished: Run) -> list[bool]:
    """Whether anything was written to each rank's own part of the slot of its only round. Slots begin as ones."""
    problem, size, found = finished.problem, finished.group_size, []
    assert isinstance(problem, Problem)
    for workspace in finished.workspaces:
        assert workspace.epoch == 1
        x, w, _ = integers(problem, workspace.rank, size, finished.dtype)
        num_bytes = x.itemsize * problem.exchange(x, w, size).chunk_numel
        start = workspace.layout.slot(1, workspace.slot_bytes)
        parts = workspace.segment[start:][: size * num_bytes].view(size, num_bytes)
        assert not (parts[1 - workspace.rank] == 0xFF).all()
        found.append(not bool((parts[workspace.rank] == 0xFF).all()))
    return found


@by_whom
@pytest.mark.parametrize("problem", WITH_OWN_ROWS, ids=str)
def test_the_own_chunk_does_not_go_through_the_slot(problem: Problem, by_copy: bool) -> None:
    finished = run(problem, by_copy, num_rounds=1, by_product=True, num_calls=1)
    finished.gpus.run_all(0)
    assert own_parts_written(finished) == [False, False]


def runs_before_the_first_signal_of_a_peer(finished: Run) -> list[str]:
    """What one rank runs when the others have not begun."""
    ran: list[str] = []

    def runs(name: str, run: Any) -> None:
        ran.append(name)
        run()

    finished.gpus.queued = [each for each in finished.gpus.queued if each.workspace is finished.workspaces[0]]
    for each in finished.gpus.queued:
        each.run = partial(runs, each.name, each.run)
    with pytest.raises(NoProgressError):
        finished.gpus.run_all(0)
    return ran


@by_whom
def test_the_own_chunk_is_multiplied_before_anything_has_arrived(by_copy: bool) -> None:
    """It is also copied to the gathered x by then; where K is gathered, a kernel waits for all sources."""
    ran = runs_before_the_first_signal_of_a_peer(run(ROWS, by_copy, num_rounds=1, by_product=True, num_calls=1))
    assert [name for name in ran if name == "multiply"] == ["multiply"] * 2
    assert ran.index("multiply") > ran.index("begin_push_kernel" if by_copy else "pack_kernel")
    ran = runs_before_the_first_signal_of_a_peer(run(COLUMNS, by_copy, num_rounds=1, num_calls=1))
    assert not [name for name in ran if name == "multiply"]
