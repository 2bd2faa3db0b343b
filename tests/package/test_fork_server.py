"""Ranks that are forked are as those that are spawned."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusedcomm.launch.ranks import RankPool
from tests.helpers import fork_server

Ranks = Callable[[int], RankPool]


def parent_and_hash(rank: int) -> tuple[int, int]:
    return os.getppid(), hash("a name whose place in a set depends on the seed")


def test_neighbours_have_other_hash_seeds_and_no_rank_is_a_child_of_the_tests(ranks: Ranks) -> None:
    (parent_0, hash_0), (parent_1, hash_1) = ranks(2).run(parent_and_hash)
    assert parent_0 != parent_1 and hash_0 != hash_1
    assert {parent_0, parent_1} == {server.process.pid for server in fork_server._servers}


def write_at_exit(rank: int, file: Path) -> None:
    atexit.register(file.write_text, "exit handlers have run")


def test_exit_handlers_run(tmp_path: Path) -> None:
    with RankPool(1) as pool:
        pool.run(write_at_exit, tmp_path / "written")
    assert (tmp_path / "written").read_text() == "exit handlers have run"
    assert [rank.process.exitcode for rank in pool._ranks] == [0]


def environment(rank: int) -> dict[str, str]:
    return dict(os.environ)


def test_a_rank_has_the_environment_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_ALGORITHM", "chunked")
    with RankPool(1, env={"FUSEDCOMM_TIMEOUT_S": "7"}) as pool:
        (environ,) = pool.run(environment)
    assert (environ["FUSEDCOMM_ALGORITHM"], environ["FUSEDCOMM_TIMEOUT_S"]) == ("chunked", "7")
    assert (environ["RANK"], environ["OMP_NUM_THREADS"]) == ("0", "1")


def test_what_is_read_at_the_start_of_a_program_makes_ranks_that_are_spawned(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(ranks(2).run(environment)) == 2  # forked
    spawned: Any = object()
    monkeypatch.setattr(fork_server, "spawn", lambda *each: spawned)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    setup: Any = SimpleNamespace(rank=0)
    assert fork_server.start(setup, spawned, spawned) is spawned


def test_a_process_with_threads_does_not_fork() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="who forks must have one thread, got"):
            fork_server.fork_alone()
    finally:
        end.set()
        thread.join()


@pytest.mark.nightly
def test_ranks_end_with_their_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_servers", [])
    with RankPool(1) as pool:
        for server in fork_server._servers:
            server.process.kill()
            server.process.join()
        assert wait([pool._ranks[0].process.sentinel], 5)
        pool._ranks.clear()  # nobody is left who could tell how it ended
