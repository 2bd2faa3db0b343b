"""Groups whose ranks know different things: `fusedcomm.reset` brings them together; what failed holds nothing alive."""

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fusedcomm
from fusedcomm.memory import vote
from fusedcomm.ops import dispatch
from fusedcomm.plan.planner import Plan
from tests.helpers.groups import call, check, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import HEADS, Problem

SMALL, LARGE = Problem("small", (6, 8), 4, 0, 1), Problem("large", (6000, 8), 512, 0, 1)


@contextmanager
def cut_off_from_vote(number: int) -> Iterator[None]:
    """This rank's time is over at the very end of a vote, which its peers complete."""
    leave, votes = vote._Vote.leave_together, 0

    def too_late(self: Any, *args: Any) -> None:
        nonlocal votes
        leave(self, *args)
        votes += 1
        if votes == number:
            raise fusedcomm.PeerTimeoutError("late", peers=[0], op=self.what, epoch=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vote._Vote, "leave_together", too_late)
        yield


def fails(group: Any, problem: Problem, rank: int, number: int) -> None:
    """A call fails because rank 1 does not complete its vote of that number."""
    with pytest.raises(fusedcomm.PeerError) if rank == 1 else pytest.raises(fusedcomm.PeerTimeoutError):
        if rank == 1:
            with cut_off_from_vote(number):
                call(group, problem)
        else:
            call(group, problem)
    dist.barrier(group)


@on_ranks(2)
def test_a_reset_repairs_half_a_vote(rank: int) -> None:
    """Only rank 0 knows the topology."""
    with fresh_group(TIMEOUT_S="2") as group, fusedcomm.force_algorithm("chunked", strict=True):
        fails(group, HEADS, rank, number=1)
        fusedcomm.reset(group)
        check(group, HEADS, call(group, HEADS, 1), 1)


@on_ranks(2)
def test_a_reset_repairs_half_a_growth(rank: int) -> None:
    """Rank 0 waits for its peer in the rendezvous; both have given up their smaller workspace."""
    with fresh_group(TIMEOUT_S="2") as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, SMALL, call(group, SMALL))
        dist.barrier(group)
        fails(group, LARGE, rank, number=1)
        fusedcomm.reset(group)
        assert member_of(group).unavailable is None and member_of(group).workspace is not None
        check(group, LARGE, call(group, LARGE, 1), 1)


@on_ranks(2)
def test_a_reset_makes_slots_of_one_size(rank: int) -> None:
    """One rank has lost its workspace: the largest slot of any rank counts."""
    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, LARGE, call(group, LARGE))
        dist.barrier(group)
        if rank == 1:
            member_of(group)._free()
        fusedcomm.reset(group)
        assert member_of(group).unavailable is None
        check(group, LARGE, call(group, LARGE, 1), 1)


@on_ranks(2)
def test_a_failed_call_keeps_neither_its_group_nor_its_tensors(rank: int) -> None:
    def failed() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        with fresh_group(TIMEOUT_S="1") as group:
            x, w = torch.ones(4, 3), torch.ones(3, 6)
            if rank == 0:
                with pytest.raises(fusedcomm.PeerTimeoutError):
                    fusedcomm.matmul_all_to_all(x, w, 0, 1, group)
            dist.barrier(group)
            return weakref.ref(group), weakref.ref(x)

    refs = failed()
    gc.collect()
    assert [ref() is None for ref in refs] == [True, True]


@on_ranks(2)
def test_an_unfused_call_holds_up_no_other_thread(rank: int) -> None:
    """Two threads make a chunked and an unfused call of one group, and begin in another order on each rank."""
    prepare, answers, begun = dispatch.prepare, dict[int, torch.Tensor](), threading.Event()

    def small_is_unfused(op: str, exchange: Any, *args: Any) -> Any:
        plan, ours = prepare(op, exchange, *args)
        begun.set()
        return plan if exchange.k == 8 else Plan(op, "unfused", "small", exchange=exchange), ours

    def work(k: int) -> None:
        answers[k] = fusedcomm.matmul_all_reduce(torch.ones(4, k), torch.ones(k, 2), group)

    with fresh_group(TIMEOUT_S="5") as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "prepare", small_is_unfused)
        with fusedcomm.force_algorithm("chunked"):
            for k in (8, 2):
                work(k)
            dist.barrier(group)
            answers.clear()
            begun.clear()
            threads = [threading.Thread(target=work, args=(k,)) for k in ((8, 2) if rank == 0 else (2, 8))]
            for thread in threads:
                thread.start()
                begun.wait(20)  # the first one is in its call
            for thread in threads:
                thread.join()
        assert {k: out.unique().tolist() for k, out in answers.items()} == {8: [16.0], 2: [4.0]}
        dist.barrier(group)


@on_ranks(2)
def test_a_child_of_before_the_first_call_is_no_rank_either(rank: int, tmp_path: Path) -> None:
    """The child takes no part over its parent's connections, and replaces none of its dumps."""
    folder = str(tmp_path)
    os.environ["FUSEDCOMM_DUMP_DIR"] = folder
    try:
        with fresh_group() as group:
            child = os.fork()
            if child == 0:
                refused = 0
                for attempt in (lambda: call(group, HEADS), lambda: fusedcomm.reset(group)):
                    try:
                        attempt()
                    except RuntimeError as error:
                        refused += "was forked from rank" in str(error)
                os._exit(refused)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
            assert not list(Path(folder).iterdir())
            check(group, HEADS, call(group, HEADS))
            dist.barrier(group)
    finally:
        del os.environ["FUSEDCOMM_DUMP_DIR"]


def test_a_fake_group_has_nothing_to_reset() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        fusedcomm.reset()
        fusedcomm.close()
    finally:
        dist.destroy_process_group()
