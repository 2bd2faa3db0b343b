"""The vote on a store, with threads as ranks: agreement, missing ranks, stale posts, attempts that failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from fusedcomm.agreement import agree
from fusedcomm.errors import PeerTimeoutError


def in_threads(fns: list[Callable[[], Any]]) -> list[Any]:
    answers: list[Any] = [None] * len(fns)

    def run(i: int) -> None:
        try:
            answers[i] = fns[i]()
        except PeerTimeoutError as error:
            answers[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(fns))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return answers


def voter(store: HashStore, rank: int, size: int, fact: int, late: float = 0.0) -> Callable[[], Any]:
    def vote() -> Any:
        time.sleep(late)
        return agree(store, rank, size, {"fact": fact}, what="test vote")

    return vote


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "1")


@pytest.mark.parametrize("size", [1, 2, 5])
def test_everybody_learns_every_fact_again_and_again(size: int) -> None:
    store = HashStore()

    def votes(rank: int) -> list[Any]:
        return [agree(store, rank, size, {"fact": 10 * i + rank}, what="test vote") for i in range(10)]

    answers = in_threads([lambda r=r: votes(r) for r in range(size)])
    assert answers == [[[{"fact": 10 * i + r} for r in range(size)] for i in range(10)]] * size


def test_a_missing_rank_is_named_and_the_next_attempt_succeeds() -> None:
    store = HashStore()
    answers = in_threads([voter(store, rank, 3, 0) for rank in (0, 2)])
    for rank, answer in zip((0, 2), answers, strict=True):
        assert isinstance(answer, PeerTimeoutError)
        assert answer.peers == [1]
        assert f"rank {rank} waited 1 s for ranks [1]" in str(answer)
    answers = in_threads([voter(store, rank, 3, rank) for rank in range(3)])
    assert answers == [[{"fact": 0}, {"fact": 1}, {"fact": 2}]] * 3


def test_old_posts_do_not_count() -> None:
    """A rank that comes back alone must not take the others' posts of the last vote for answers."""
    store = HashStore()
    in_threads([voter(store, rank, 2, 1) for rank in range(2)])
    (answer,) = in_threads([voter(store, 0, 2, 2)])
    assert isinstance(answer, PeerTimeoutError)
    assert answer.peers == [1]
    answers = in_threads([voter(store, 0, 2, 3), voter(store, 1, 2, 4, late=0.3)])
    assert answers == [[{"fact": 3}, {"fact": 4}]] * 2
