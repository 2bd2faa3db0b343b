"""Results in place: chunks really come so, values are exact whatever ranks post, and no finished result is written."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

import fusedcomm
from fusedcomm.plan import planner
from tests.helpers.groups import empty_is_nan, fresh_group, member_of
from tests.helpers.in_place import (
    ALL_REDUCE,
    EACH_SOURCE,
    EXCHANGED,
    IN_PLACE,
    LIST,
    RUNS,
    SCATTERED,
    TO_ALL,
    WARM_UP,
    after_peers,
    arrived,
    assert_exact,
    chunked_group,
    results_of,
    wanted,
    warm_up,
)
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import Problem, integers
from tests.helpers.tiers import nightly_but

MOST_LATE_S = 0.005


def peers(rank: int, size: int) -> list[int]:
    return [peer for peer in range(size) if peer != rank]


# where chunks go
@on_ranks()
@pytest.mark.parametrize("world_size", nightly_but([2], [2, 3]))
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "python"])
@pytest.mark.parametrize("problem", nightly_but([TO_ALL, EACH_SOURCE, ALL_REDUCE], IN_PLACE), ids=str)
def test_chunks_of_a_late_rank_come_in_place(rank: int, world_size: int, problem: Problem, prepared: bool) -> None:
    """Each rank is late in turn, and finds the posts of all. What it leaves out then is NaN."""
    with empty_is_nan(), chunked_group(prepared) as group:
        warm_up(group, problem)
        seen = set()
        for seed in range(WARM_UP, WARM_UP + 4 * world_size):
            late = seed % world_size
            after_peers(group, late)
            results = results_of(group, problem, seed)
            assert_exact(results, wanted(group, problem, seed))
            seen.update(arrived(group))
            del results
        # In the second round of an all_reduce those that were early in the first find the posts.
        assert seen == set(peers(rank, world_size)) or (seen and problem is ALL_REDUCE)
        assert (member_of(group).prepared is None) == (not prepared)


@on_ranks(2)
def test_several_rounds(rank: int) -> None:
    """The result is posted anew in each round, and its parts come in place or through slots."""
    with empty_is_nan(), chunked_group(WORKSPACE_BYTES="8000") as group:
        for problem in (TO_ALL, RUNS, EACH_SOURCE, ALL_REDUCE):
            seen = before = 0
            for seed in range(2 * WARM_UP):
                after_peers(group, seed % 2)
                before = member_of(group).workspace.epoch if seed else 0
                assert_exact(results_of(group, problem, seed), wanted(group, problem, seed))
                seen += len(arrived(group))
            rounds = member_of(group).workspace.epoch - before
            assert seen > 0 and (rounds > 1 or problem is TO_ALL)


@on_ranks(2)
def test_a_result_that_is_given_is_not_posted(rank: int) -> None:
    """It may be anyone's, also where it lies in the heap."""
    with chunked_group() as group:
        warm_up(group, TO_ALL)
        (out,) = results_of(group, TO_ALL)
        workspace = member_of(group).workspace
        assert workspace.results.heap.place(out) is not None
        for seed in range(WARM_UP):
            *args, _ = TO_ALL.dispatched(integers(TO_ALL, rank, 2, seed=seed))
            after_peers(group, seed % 2)
            torch.ops.fusedcomm.matmul_all_to_all.out(*args, group.group_name, out=out)
            assert_exact([out], wanted(group, TO_ALL, seed))
            assert arrived(group) == []


@on_ranks(2)
def test_a_rank_that_keeps_its_results_posts_nothing(rank: int) -> None:
    kept = []
    with chunked_group() as group:
        seen = 0
        for seed in range(4 * WARM_UP):
            after_peers(group, 1)
            results = results_of(group, TO_ALL, seed)
            assert_exact(results, wanted(group, TO_ALL, seed))
            seen += len(arrived(group))
            if rank == 1:
                kept.append((seed, results))
            del results
        assert (seen > 0) == (rank == 0)
        for seed, results in kept:
            assert_exact(results, wanted(group, TO_ALL, seed))


# values
def random_calls(group: Any, num_calls: int, seed: int, sleeps: bool = True) -> int:
    """Calls in an order that ranks share; what is held, and who is late, differs. Returns the chunks come in place."""
    rank = dist.get_rank(group)
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    held: list[tuple[Problem, int, list[Tensor]]] = []
    seen = 0
    for number in range(num_calls):
        problem = shared.choice([*IN_PLACE, SCATTERED])
        if sleeps and own.random() < 0.1:
            time.sleep(own.random() * MOST_LATE_S)
        results = results_of(group, problem, number)
        seen += len(arrived(group))
        if own.random() < 0.3:
            held.append((problem, number, results))
        else:
            assert_exact(results, wanted(group, problem, number))
        del results
        while len(held) > 12 or (held and own.random() < 0.25):
            old, at, results = held.pop(own.randrange(len(held)))
            assert_exact(results, wanted(group, old, at))
            del results
    for problem, number, results in held:
        assert_exact(results, wanted(group, problem, number))
    return seen


@on_ranks()
@pytest.mark.parametrize("world_size", nightly_but([2], [2, 4]))
@pytest.mark.parametrize("prepared", [True, False])
def test_results_that_are_held_are_never_changed(rank: int, world_size: int, prepared: bool) -> None:
    with empty_is_nan(), chunked_group(prepared) as group:
        assert random_calls(group, 150, seed=world_size) > 0


@on_ranks(2)
def test_groups_on_threads_have_heaps_of_their_own(rank: int) -> None:
    with fresh_group() as a, fresh_group() as b, fusedcomm.force_algorithm("chunked", strict=True):
        for group in (a, b):  # votes of both at once would need more of gloo
            warm_up(group, TO_ALL)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda group, seed: random_calls(group, 60, seed, sleeps=False), (a, b), (0, 1)))
        heaps = [member_of(group).workspace.results.buffers[rank].data_ptr() for group in (a, b)]
        assert heaps[0] != heaps[1]


@on_ranks(2)
def test_growth_keeps_the_heap(rank: int) -> None:
    larger = Problem("larger", (1 << 14, 5), 40, 0, 1)
    with chunked_group() as group:
        warm_up(group, TO_ALL)
        held, before = results_of(group, TO_ALL, 1), member_of(group).workspace
        warm_up(group, larger)
        assert member_of(group).workspace is not before
        assert member_of(group).workspace.results is before.results
        seen = 0
        for seed in range(WARM_UP):
            after_peers(group, seed % 2)
            assert_exact(results_of(group, TO_ALL, seed), wanted(group, TO_ALL, seed))
            seen += len(arrived(group))
        assert seen > 0
        assert_exact(held, wanted(group, TO_ALL, 1))


@on_ranks(2)
@pytest.mark.thorough
@pytest.mark.parametrize("by_op", nightly_but([True], [True, False]), ids=["heap", "no-heap"])
def test_compiled_programs(rank: int, by_op: bool) -> None:
    """Where there is a heap, Inductor leaves the result's memory to the op."""
    settings = {} if by_op else {"RESULTS_BYTES": "0"}
    with chunked_group(**settings) as group:
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, dynamic=False)
        def program(x: Tensor, w: Tensor) -> Tensor:
            return fusedcomm.matmul_all_to_all(x.relu(), w, 0, 1, group=group) + 1

        seen = 0
        for step in range(2 * WARM_UP):
            x, w, _ = integers(TO_ALL, rank, 2, seed=step)
            after_peers(group, step % 2)
            got = program(x, w)
            seen += len(arrived(group))
            want = torch.cat([x.relu() @ w for x, w in (integers(TO_ALL, r, 2, seed=step)[:2] for r in range(2))])
            assert_exact([got], [want[:, 7 * rank : 7 * rank + 7] + 1])
        assert (seen > 0) == by_op


@on_ranks(2)
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "python"])
def test_ranks_of_one_wire_may_want_other_layouts(rank: int, prepared: bool) -> None:
    """Rank 0 puts chunks one after the other, rank 1 in runs: results of one size, and chunks of one order."""
    own = (replace(RUNS, gather_dim=0), RUNS)[rank]
    with pytest.MonkeyPatch.context() as patch, empty_is_nan(), chunked_group(prepared) as group:
        patch.setattr(planner, "fingerprint_of", lambda *facts: 5)
        warm_up(group, RUNS)
        for seed in range(WARM_UP):
            after_peers(group, seed % 2)
            results = results_of(group, own, seed)
            assert_exact(results, wanted(group, own, seed))
            assert arrived(group) == []
            assert member_of(group).workspace.results.heap.place(results[0]) is not None  # and so it was posted
            del results
        after_peers(group, 0)  # which finds the post of rank 1
        assert_exact(results_of(group, RUNS), wanted(group, RUNS))
        assert arrived(group) == [0] * rank


# how much memory there is for them
@on_ranks(2)
def test_settings(rank: int) -> None:
    for sizes, found in [(("0", "0"), 0), (("0", "65536"), 0), (("8192", "65536"), 8192), (("100", "100"), 100)]:
        with chunked_group(RESULTS_BYTES=sizes[rank]) as group:
            warm_up(group, TO_ALL, RUNS)
            results = member_of(group).workspace.results
            assert (results is None) == (found == 0)
            assert results is None or [buffer.numel() for buffer in results.buffers] == [found] * 2
            for seed in range(4):
                after_peers(group, seed % 2)
                assert_exact(results_of(group, TO_ALL, seed), wanted(group, TO_ALL, seed))
                assert found >= 8192 or arrived(group) == []


@on_ranks(2)
def test_a_rank_without_memory_for_them(rank: int) -> None:
    """One rank cannot make its heap: all copy their results out."""
    allocate = symm_mem._SymmetricMemory.empty_strided_p2p

    def refuse(shape: Any, *args: Any) -> Tensor:
        if rank == 1 and shape[0] == 1 << 31:
            raise RuntimeError("no memory left")
        return allocate(shape, *args)

    with chunked_group() as group:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(symm_mem._SymmetricMemory, "empty_strided_p2p", staticmethod(refuse))
            warm_up(group, TO_ALL)
        assert member_of(group).workspace.results is None
        fusedcomm.reset(group)
        warm_up(group, TO_ALL)


# other processes, and other uses
@on_ranks(2)
def test_a_result_is_ordinary_memory_to_torch(rank: int) -> None:
    """Whether one is in the heap differs by rank, so a rendezvous of it could be a collective on some ranks alone."""
    with chunked_group() as group:
        warm_up(group, TO_ALL)
        (result,) = results_of(group, TO_ALL)
        assert member_of(group).workspace.results.heap.place(result) is not None
        assert not symm_mem.is_symm_mem_tensor(result)
        assert symm_mem.rendezvous(result, group) is symm_mem.rendezvous(torch.empty(4), group) is None


# who takes blocks
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
