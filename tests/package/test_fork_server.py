"""Ranks that are forked are as those that are spawned."""

from __future__ import annotations

import os
from collections.abc import Callable

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


def environment(rank: int) -> dict[str, str]:
    return dict(os.environ)


def test_a_rank_has_the_environment_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_ALGORITHM", "chunked")
    with RankPool(1, env={"FUSEDCOMM_TIMEOUT_S": "7"}) as pool:
        (environ,) = pool.run(environment)
    assert (environ["FUSEDCOMM_ALGORITHM"], environ["FUSEDCOMM_TIMEOUT_S"]) == ("chunked", "7")
    assert (environ["RANK"], environ["OMP_NUM_THREADS"]) == ("0", "1")
