"""RankPool: results, error texts, time-outs, deaths; no path leaves a process behind."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fusedcomm.launch import ranks
from fusedcomm.testing import KILLED, RankError, RankPool
from tests.helpers import fork_server
from tests.helpers.waiting import is_alive, wait_until


def total(rank: int, offset: int) -> torch.Tensor:
    t = torch.full((3,), rank + offset)
    dist.all_reduce(t)
    return t


def environment(rank: int) -> tuple[str, ...]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "FUSEDCOMM_TEST_VALUE")
    return (*(os.environ[name] for name in names), str(torch.get_num_threads()))


def raise_in_rank_1(rank: int) -> int:
    if rank == 1:
        raise ValueError("K must be a multiple of 8, got K=29")
    return rank


def return_no_pickle(rank: int) -> object:
    return lambda: rank


def hang_in_rank_0(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.wait(["hangs"]) if rank else store.set("hangs", "1")
    while rank == 0:
        time.sleep(0.01)


def die_in_rank_0(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def use_the_store_in_rank_1(rank: int) -> int:
    """The store is in the parent, so it needs no peer."""
    while rank == 0:
        time.sleep(0.01)
    dist.distributed_c10d._get_default_store().set("alive", "1")
    return rank


def wait_until_dead(pids: list[int], timeout_s: float = 60) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s)


@pytest.fixture(scope="module")
def spawned() -> Iterator[None]:
    """The ranks are started as those of users are; other tests fork theirs."""
    with mock.patch.object(ranks, "_start", fork_server.spawn):
        yield


@pytest.fixture(scope="module")
def pool(spawned: None) -> Iterator[RankPool]:
    with RankPool(2, env={"FUSEDCOMM_TEST_VALUE": "set"}, timeout_s=60) as pool:
        yield pool
    wait_until_dead([rank.process.pid for rank in pool._ranks if rank.process.pid])


def test_results_come_in_rank_order_and_ranks_can_communicate(pool: RankPool) -> None:
    for offset in range(3):
        for result in pool.run(total, offset=offset):
            torch.testing.assert_close(result, torch.full((3,), 1 + 2 * offset))


def test_ranks_see_their_environment(pool: RankPool) -> None:
    assert pool.run(environment) == [("0", "0", "2", "set", "1"), ("1", "1", "2", "set", "1")]
    assert "FUSEDCOMM_TEST_VALUE" not in os.environ


def test_an_exception_names_rank_type_and_line_and_the_pool_lives_on(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 raised: ValueError: K must be .* K=29") as info:
        pool.run(raise_in_rank_1)
    assert (info.value.rank, info.value.exception_type) == (1, "ValueError")
    assert "in raise_in_rank_1" in str(info.value)
    assert not pool.dead
    assert len(pool.run(total, 0)) == 2


def test_what_cannot_be_pickled_is_an_error_not_a_hang(pool: RankPool) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pool.run(lambda rank: rank)
    with pytest.raises(RankError, match="pickle"):
        pool.run(return_no_pickle)
    assert len(pool.run(total, 0)) == 2


@pytest.mark.thorough
def test_a_rank_that_does_not_answer_is_dumped_and_killed() -> None:
    pool = RankPool(2)
    pids = [pool.pid(0), pool.pid(1)]
    pool.start(hang_in_rank_0)
    wait_until(pool._ranks[1].tasks.poll)
    with pytest.raises(RankError, match=r"rank 0 did not answer: no result within 0\.5 s") as info:
        pool.join(timeout_s=0.5)
    assert "in hang_in_rank_0" in str(info.value)
    assert [failure.rank for failure in info.value.failures] == [0]
    wait_until_dead(pids, timeout_s=0)
    with pytest.raises(RuntimeError, match="dead"):
        pool.run(total, 0)


def test_a_rank_that_dies_is_named_with_its_signal() -> None:
    pool = RankPool(2)
    pids = [pool.pid(0), pool.pid(1)]
    with pytest.raises(RankError, match="rank 0 died: SIGSEGV") as info:
        pool.run(die_in_rank_0)
    assert info.value.rank == 0
    assert "in die_in_rank_0" in str(info.value)
    wait_until_dead(pids, timeout_s=0)


def test_killing_rank_0_on_purpose_leaves_the_others_and_the_store() -> None:
    with RankPool(2) as pool:
        pool.start(use_the_store_in_rank_1)
        pool.kill(0)
        assert pool.join() == [KILLED, 1]
        assert pool.run(use_the_store_in_rank_1) == [KILLED, 1]


@pytest.mark.thorough
def test_ranks_outlive_the_thread_that_asked_for_them() -> None:
    made: list[RankPool] = []
    thread = threading.Thread(target=lambda: made.append(RankPool(1)))
    thread.start()
    thread.join()
    with made[0] as pool:
        assert [int(result[0]) for result in pool.run(total, 1)] == [1]


def test_an_interrupt_while_a_rank_is_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    spawning, interrupted = threading.Event(), threading.Event()
    spawned: list[mock.Mock] = []

    def interrupt(future: object) -> None:
        assert spawning.wait(10)
        raise KeyboardInterrupt

    def spawn(*args: object) -> mock.Mock:
        spawning.set()
        assert interrupted.wait(10)
        spawned.append(mock.Mock())
        return spawned[-1]

    monkeypatch.setattr(ranks, "_spawn", spawn)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Future, "result", interrupt)
        RankPool(2)
    interrupted.set()
    ranks._starter.submit(int).result()  # the thread has done what it was given before
    assert len(spawned) == 1
    spawned[0].process.kill.assert_called_with()
    spawned[0].process.join.assert_called_with()


def test_a_forked_child_gets_a_starter_of_its_own_and_no_ranks_to_end() -> None:
    ranks._starter.submit(int).result()
    pool = object.__new__(RankPool)
    ranks._pools.add(pool)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        ranks._starter.submit(int).result()
        os._exit(len(ranks._pools))
    ranks._pools.discard(pool)
    assert os.waitpid(child, 0)[1] == 0
