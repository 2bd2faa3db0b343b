"""Faults between ranks: a peer that is absent, late, killed, in another call or has left half way; and the reset."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.memory import members, workspace
from fusedcomm.memory.segment import ABANDONED, BROKEN_BY_PEER, ErrorRecord
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.planner import Plan
from fusedcomm.plan.schedule import Launch, Wait
from fusedcomm.run.python_executor import Execution
from tests.helpers.groups import call, check, fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.problems import HEADS, Problem, integers
from tests.helpers.spies import drop_plans
from tests.helpers.tiers import thorough_but


@contextmanager
def at_once(group: Any) -> Iterator[None]:
    """The block may wait for minutes, and must not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDCOMM_TIMEOUT_S", "300")
        for member in members.members(group):
            if member.workspace is not None:
                patch.setattr(member.workspace, "timeout_s", 300.0)
        start = time.monotonic()
        yield
        assert time.monotonic() - start < 30


class Left(Exception):
    """Stands for something that happens in the middle of a round: Ctrl-C, no memory, a compiler error."""


@on_ranks(3)
@pytest.mark.parametrize("algorithm", thorough_but(["chunked"], ["chunked", "fused"]))
def test_a_round_left_half_way_is_never_taken_for_the_next(rank: int, algorithm: str) -> None:
    """Rank 1 leaves the round after it has signalled."""
    step = Execution.step

    def leave(self: Execution, work: Any, *rest: Any) -> None:
        if isinstance(work, Wait) or (isinstance(work, Launch) and "unpack" in work.kernel):
            raise Left
        step(self, work, *rest)

    with fresh_group(TIMEOUT_S="5") as group, fusedcomm.force_algorithm(algorithm, strict=True):
        check(group, HEADS, call(group, HEADS, 0))
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(Execution, "step", leave)
                with pytest.raises(Left):
                    call(group, HEADS, 1)
            else:
                with suppress(fusedcomm.PeerError):  # or this rank has had its data already
                    check(group, HEADS, call(group, HEADS, 1), 1)
        dist.barrier(group)
        with pytest.raises(fusedcomm.PeerError, match=r"fusedcomm\.reset") as caught:
            call(group, HEADS, 2)
        assert caught.value.peers == [1]
        cause = "left by Left" if rank == 1 else "[1] left their call"
        assert cause in str(caught.value)
        dist.barrier(group)
        fusedcomm.reset(group)
        check(group, HEADS, call(group, HEADS, 3), 3)


@on_ranks(3)
def test_whoever_comes_later_blames_the_rank_that_left_its_call(rank: int) -> None:
    """Rank 2 has told rank 0 alone when rank 1 hears that rank 0 has given up."""
    with fresh_group(TIMEOUT_S="60") as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, HEADS, call(group, HEADS))
        space = members.members(group)[0].workspace
        assert space is not None
        tell = space._break
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2:
                patch.setattr(space, "_break", lambda to, *word: tell(to, *word) if to is space.buffers[0] else None)
                space.abandon("op", Left())
        for late in range(3):
            dist.barrier(group)
            if rank == late:
                with pytest.raises(fusedcomm.PeerError) as caught:
                    call(group, HEADS)
                assert caught.value.peers == [2]
        dist.barrier(group)


def test_a_kernel_s_record_names_the_cause_that_it_had_not_seen() -> None:
    record = ErrorRecord(3, torch.device("cpu"))
    record.fill(BROKEN_BY_PEER, 4, 1, 7, [0, 0, 0], [0])
    assert record.error("op", "group", 1.0, {0: BROKEN_BY_PEER}, {}).peers == [0]
    assert record.error("op", "group", 1.0, {0: BROKEN_BY_PEER, 2: ABANDONED}, {}).peers == [2]


@on_ranks(2)
def test_reset_against_close_is_a_mismatch(rank: int) -> None:
    with fresh_group() as group:
        check(group, HEADS, call(group, HEADS))
        with pytest.raises(fusedcomm.PeerMismatchError, match=r"0: fusedcomm\.reset, 1: fusedcomm\.close"):
            (fusedcomm.close if rank else fusedcomm.reset)(group)
        check(group, HEADS, call(group, HEADS, 1), 1)


@on_ranks(2)
def test_a_rank_without_memory_makes_all_run_unfused(rank: int) -> None:
    problem = NAMED["rows-gathered"]

    def refuse(*args: Any) -> None:
        raise RuntimeError("no memory left")

    def plan() -> Plan:
        args = (*integers(problem, rank, dist.get_world_size())[:2], 0, 1, group)
        return fusedcomm.explain("matmul_all_to_all", *args)

    with fresh_group() as group:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(workspace.Workspace, "initialise", staticmethod(refuse))
            check(group, problem, call(group, problem))
        assert plan().algorithm == "unfused"
        assert plan().reason.startswith("rank 1 cannot allocate a workspace of")
        check(group, problem, call(group, problem, 1), 1)
        fusedcomm.reset(group)
        assert plan().algorithm == "chunked"
        check(group, problem, call(group, problem, 2), 2)


@on_ranks(3)
@pytest.mark.parametrize(
    ("algorithm", "warm"),
    [("chunked", False), ("chunked", True), pytest.param("fused", True, marks=pytest.mark.thorough)],
    ids=["chunked-first-call", "chunked-later-call", "fused-later-call"],
)
def test_a_peer_that_never_calls(rank: int, algorithm: str, warm: bool) -> None:
    """One rank never calls. The others say so in time, name it, and are right again after a reset."""
    absent = 1
    with fresh_group(TIMEOUT_S="1") as group, fusedcomm.force_algorithm(algorithm, strict=True):
        if warm:
            check(group, HEADS, call(group, HEADS))
        else:
            members.member(group.group_name, torch.device("cpu"))  # the vote alone
        dist.barrier(group)
        if rank != absent:
            start = time.monotonic()
            with pytest.raises(fusedcomm.PeerTimeoutError, match=rf"\[{absent}\].* did not") as caught:
                call(group, HEADS)
            assert time.monotonic() - start < 10
            assert caught.value.peers == [absent]
            assert caught.value.op == "matmul_all_to_all"
            assert caught.value.epoch == (2 if warm else 0)
        dist.barrier(group)
        if warm or rank != absent:
            with at_once(group), pytest.raises(fusedcomm.PeerError, match=r"fusedcomm\.reset") as again:
                call(group, HEADS)  # what is known already; a rank that comes too late returns no result either
            assert rank != absent or (again.value.peers == [0, 2] and "gave up" in str(again.value))
        dist.barrier(group)
        with at_once(group):
            fusedcomm.reset(group)
            for seed in range(3):
                check(group, HEADS, call(group, HEADS, seed), seed)


@on_ranks(2)
def test_a_rank_that_is_late_for_the_first_call_does_not_meet_the_second(rank: int) -> None:
    with fresh_group(TIMEOUT_S="1") as group:
        if rank == 0:
            with pytest.raises(fusedcomm.PeerTimeoutError) as caught:
                call(group, HEADS, 0)
            assert (caught.value.peers, caught.value.epoch) == ([1], 0)
        dist.barrier(group)
        with (
            at_once(group) if rank == 0 else nullcontext(),
            pytest.raises(fusedcomm.PeerTimeoutError, match=r"fusedcomm\.reset"),
        ):
            call(group, HEADS, 1 - rank)
        dist.barrier(group)
        fusedcomm.reset(group)
        check(group, HEADS, call(group, HEADS, 2), 2)


OTHER_ROWS = Problem("other-rows", (2, 7, 5), 12, 1, -2, out_shape=(4, 3))
NEEDS_GROWTH = Problem("needs-growth", (2, 6, 5), 1 << 16, 1, -2, out_shape=(1 << 14, 4))


@on_ranks(3)
@pytest.mark.parametrize(
    ("other", "algorithm", "warm"),
    [
        (NEEDS_GROWTH, "chunked", False),
        (NEEDS_GROWTH, "chunked", True),
        pytest.param(OTHER_ROWS, "fused", True, marks=pytest.mark.thorough),
    ],
    ids=["needs-growth-chunked-first-call", "needs-growth-chunked-later-call", "other-rows-fused-later-call"],
)
def test_a_peer_in_another_call(rank: int, other: Problem, algorithm: str, warm: bool) -> None:
    with fresh_group() as group, fusedcomm.force_algorithm(algorithm, strict=True):
        if warm:
            check(group, HEADS, call(group, HEADS))
        with pytest.raises(fusedcomm.PeerMismatchError, match="other shapes, dtype or dims") as caught:
            call(group, other if rank == 1 else HEADS)
        assert set(caught.value.peers) <= ({0, 2} if rank == 1 else {1})
        assert caught.value.peers
        dist.barrier(group)
        fusedcomm.reset(group)
        for seed in range(3):
            check(group, HEADS, call(group, HEADS, seed), seed)


@on_ranks(2)
def test_a_reset_that_a_rank_missed_can_be_repeated(rank: int) -> None:
    with fresh_group(TIMEOUT_S="1") as group:
        check(group, HEADS, call(group, HEADS))
        dist.barrier(group)
        if rank == 0:
            with pytest.raises(fusedcomm.PeerTimeoutError, match=r"fusedcomm\.reset") as caught:
                fusedcomm.reset(group)
            assert caught.value.peers == [1]
        dist.barrier(group)
        fusedcomm.reset(group)
        check(group, HEADS, call(group, HEADS))


# Ranks in different calls, for every op.
@on_ranks(2)
def test_ranks_that_cut_a_call_into_other_rounds_do_not_believe_each_other(rank: int) -> None:
    """As where one runs `chunked` on a GPU, which may cut a gather of K into pieces, and one runs `fused`."""
    problem = NAMED["bias"]
    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, problem, call(group, problem))
        rounds = Exchange.rounds_of
        cut = mock.patch.object(Exchange, "rounds_of", lambda *args: rounds(*args) * (1 + rank))
        with cut, pytest.raises(fusedcomm.PeerMismatchError):
            drop_plans()
            call(group, problem)
        dist.barrier(group)


def check_mismatch(rank: int, problem: Problem, other: Problem) -> None:
    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, problem, call(group, problem))
        check(group, other, call(group, other))
        with pytest.raises(fusedcomm.PeerMismatchError, match="another op, or this one with other shapes") as caught:
            call(group, other if rank == 1 else problem)
        assert caught.value.op == (other if rank == 1 else problem).op
        assert caught.value.peers == [1 - rank]
        dist.barrier(group)
        fusedcomm.reset(group)
        for seed in range(3):
            check(group, problem, call(group, problem, seed), seed)


OTHERS = [
    (NAMED["bias"], NAMED["matmul_all_reduce-nothing-divides"]),
    (NAMED["all_to_all_matmul-heads-gathered"], NAMED["all_to_all_matmul-head-dim-gathered"]),
    (NAMED["all_gather_matmul-batch-gathered"], NAMED["all_gather_matmul-batch-rows-gathered"]),
    (NAMED["matmul_reduce_scatter-batch-scattered"], NAMED["matmul_reduce_scatter-batched-w"]),
    (
        NAMED["matmul_reduce_scatter-rows-scattered"],
        Problem("avg", (3, 5), 7, scatter_dim=0, reduce_op="avg", op="matmul_reduce_scatter"),
    ),
    (NAMED["matmul_all_reduce-ragged"], NAMED["matmul_all_reduce-one-row"]),
]


@pytest.mark.parametrize("problem, other", OTHERS, ids=str)
def test_a_peer_with_other_shapes_or_dims(ranks: Any, problem: Problem, other: Problem) -> None:
    ranks(2).run(check_mismatch, problem, other)
