"""RankPool: results, error texts, time-outs, deaths; no path leaves a process behind."""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fusedcomm import machine
from fusedcomm.launch import ranks, world
from fusedcomm.testing import KILLED, RankError, RankPool
from fusedcomm.tools import explain, main, postmortem
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


def return_what_cannot_be_pickled(rank: int) -> object:
    return lambda: rank


def hang_in_rank_0(rank: int) -> None:
    while rank == 0:
        time.sleep(0.01)


def die_in_rank_0(rank: int, signum: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signum)
    dist.barrier()


def use_the_store_in_rank_1(rank: int) -> int:
    """The store is in the parent, so it needs no peer."""
    while rank == 0:
        time.sleep(0.01)
    store = dist.distributed_c10d._get_default_store()
    store.set("alive", "1")
    store.wait(["alive"])
    return rank


def wait_until_dead(pids: list[int], timeout_s: float = 60) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s)


@pytest.fixture(scope="module")
def spawned() -> Iterator[None]:
    """The ranks are started as those of users are; other tests fork theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_start", fork_server.spawn)
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
        pool.run(return_what_cannot_be_pickled)
    assert len(pool.run(total, 0)) == 2


def test_a_rank_that_does_not_answer_is_dumped_and_killed() -> None:
    pool = RankPool(2)
    pids = [pool.pid(0), pool.pid(1)]
    pool.start(hang_in_rank_0)
    with pytest.raises(RankError, match=r"rank 0 did not answer: no result within 0\.5 s") as info:
        pool.join(timeout_s=0.5)
    assert "in hang_in_rank_0" in str(info.value)
    assert [failure.rank for failure in info.value.failures] == [0]
    wait_until_dead(pids, timeout_s=0)
    with pytest.raises(RuntimeError, match="dead"):
        pool.run(total, 0)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_is_named_with_its_signal(signum: signal.Signals) -> None:
    pool = RankPool(2)
    pids = [pool.pid(0), pool.pid(1)]
    with pytest.raises(RankError, match=f"rank 0 died: {signum.name}") as info:
        pool.run(die_in_rank_0, int(signum))
    assert info.value.rank == 0
    if signum is signal.SIGSEGV:
        assert "in die_in_rank_0" in str(info.value)
    wait_until_dead(pids, timeout_s=0)


def test_killing_rank_0_on_purpose_leaves_the_others_and_the_store() -> None:
    with RankPool(2) as pool:
        pool.start(use_the_store_in_rank_1)
        pool.kill(0)
        assert pool.join() == [KILLED, 1]
        assert pool.run(use_the_store_in_rank_1) == [KILLED, 1]


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


# How many ranks a command starts, and that none outlives it.
ROOT = Path(__file__).parents[2]
COMMANDS = (
    ["bench", "ops", "--world-size"],
    ["demo", "--world-size"],
    ["selftest", "--world-size"],
    ["tune", "--world-size"],
    ["explain", "--nproc"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_worlds_are_bounded_by_the_cpus(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(world, "available_cpus", lambda: 8)
    monkeypatch.setattr(world, "default_device_type", lambda: "cpu")
    monkeypatch.setattr(world, "ranks", None)
    script = [str(ROOT / "examples/tensor_parallel_mlp.py")] * (command[0] == "explain")
    assert main([*command, "9", *script]) == 2
    expected = f"{command[-1]} must be at most 8 here, got 9: this process may use 8 CPUs, and ranks that share a CPU"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["bench", "overhead", "--world-size", "1"], "--world-size must be at least 2, got 1"),
        (["tune", "--device", "cpu", "--world-size", "1"], "--world-size must be at least 2, for one rank exchanges"),
        (["demo", "--device", "cpu", "--world-size", "1", "--trace", "x.json"], "--trace needs at least 2 ranks"),
        (["selftest", "--json", "/nowhere/x.json"], "--json /nowhere/x.json: No such file or directory"),
        (["explain", "/nowhere/x.py"], "/nowhere/x.py: No such file or directory"),
        (["explain", "--json", "/nowhere/x.json", __file__], "fusedcomm explain: /nowhere/x.json: No such file or dir"),
        (["selftest", "--device", "cuda", "--world-size", "2"], "a GPU of its own, got 2 ranks and 1 GPUs"),
    ],
)
def test_wrong_arguments_are_refused_before_any_rank_starts(
    command: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(world, "ranks", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(command) == 2
    assert text in capsys.readouterr().err


def test_the_size_must_be_that_of_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, text)
    assert main(["selftest", "--device", "cpu", "--world-size", "4"]) == 2
    assert "--world-size must be that of torchrun, 2, got 4" in capsys.readouterr().err


def test_two_ranks_are_never_too_many_and_oversubscribe_allows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "available_cpus", lambda: 1)
    assert world.cannot_start("cpu", 2, False) is None
    assert "at most 2 here, got 3" in str(world.cannot_start("cpu", 3, False))
    assert world.cannot_start("cpu", 3, True) is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert world.cannot_start("cpu", 3, False) is None


def test_ranks_of_explain_are_bounded_by_the_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(explain, "_start_ranks", lambda args: 0)
    script = str(ROOT / "examples/tensor_parallel_mlp.py")
    assert main(["explain", "--nproc", "5", script]) == 2
    assert "--nproc must be at most 4 here, got 5: this process may use 4 GPUs" in capsys.readouterr().err
    assert main(["explain", "--nproc", "4", script]) == 0
    assert main(["explain", "--nproc", "5", "--oversubscribe", script]) == 0


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_cpus_are_those_that_the_quota_of_a_container_is_enough_for(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert machine.available_cpus() == expected


def test_a_rank_without_a_world_size_is_not_torchrun_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert world.world_size_of(None, "cpu") == 2 and world.is_rank_0()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert world.world_size_of(None, "cpu") == 4 and not world.is_rank_0()


def test_a_command_runs_in_any_thread_and_after_any_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postmortem, "run", lambda args: 0)

    def command() -> int:
        return main(["postmortem", "folder"])

    with ThreadPoolExecutor() as threads:
        assert threads.submit(command).result() == 0
    handlers: list[object] = []
    # C code has set the handler that is replaced
    monkeypatch.setattr(signal, "signal", lambda signum, handler: handlers.append(handler))
    assert command() == 0 and handlers[1:] == [signal.SIG_DFL]


def death_signal(rank: int) -> int:
    import ctypes

    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0)  # PR_GET_PDEATHSIG
    return found.value


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_ranks_get_a_signal_when_their_parent_ends(ranks: Callable[[int], object]) -> None:
    assert ranks(2).run(death_signal) == [signal.SIGKILL] * 2  # type: ignore[attr-defined]
