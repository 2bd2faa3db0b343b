"""Which results lie in the heap, those that peers can write and no others, and how much memory it keeps."""

from __future__ import annotations

import random

import pytest

from tests.helpers.groups import member_of
from tests.helpers.in_place import EACH_SOURCE, EXCHANGED, LIST, TO_ALL, assert_exact, chunked_group, results_of, wanted
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import Problem
from tests.helpers.tiers import nightly_but

ROWS = (64, 128, 192, 256, 512, 1024)
SCATTER = Problem("scatter", (6, 5), 7, scatter_dim=0, op="matmul_reduce_scatter")
POSTED = {
    TO_ALL: [True],
    SCATTER: [False],
    EACH_SOURCE: [False, True],
    LIST: [False, False, True],
    EXCHANGED: [False, True],
}


@on_ranks(2)
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "python"])
@pytest.mark.parametrize("problem", nightly_but([TO_ALL, SCATTER, LIST], POSTED), ids=str)
def test_only_results_that_are_posted_take_blocks(rank: int, problem: Problem, prepared: bool) -> None:
    with chunked_group(prepared) as group:
        for seed in range(8):
            results = results_of(group, problem, seed)
            assert_exact(results, wanted(group, problem, seed))
            made = member_of(group).workspace.results
            placed = [made.heap.place(each) is not None for each in results]
            del results
        assert placed == POSTED[problem]


@on_ranks(2)
def test_changing_shapes_leave_no_more_than_the_most_that_lived_at_once(rank: int) -> None:
    """Blocks of any size are made of what larger and smaller ones have left."""
    shapes = random.Random(0)
    with chunked_group() as group:
        most = 0
        for step in range(60):
            problem = Problem("changing", (shapes.choice(ROWS), 5), 64, 0, 1)
            kept = [results_of(group, problem, step) for _ in range(4)]
            heap = member_of(group).workspace.results.heap
            most = max(most, heap.live_bytes)
            del kept
        assert 0 < most == heap.warm_bytes and heap.live_bytes == 0
