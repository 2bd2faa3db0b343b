"""The vote on a store, with threads as ranks: agreement, missing ranks, stale and foreign posts, a store that fails."""

import itertools
import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed import DistError, HashStore, Store, TCPStore

from fusedcomm.memory import group_member
from fusedcomm.memory import vote as vote_module
from fusedcomm.memory.errors import PeerError, PeerTimeoutError
from fusedcomm.memory.group_member import Member
from fusedcomm.memory.topology import Topology
from fusedcomm.memory.vote import STORE_GRACE_S, agree
from tests.helpers.groups import fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.symmetric_memory import CutStore, timeout
from tests.helpers.waiting import wait_until


def in_threads(fns: list[Callable[[], Any]]) -> list[Any]:
    answers: list[Any] = [None] * len(fns)

    def run(i: int) -> None:
        try:
            answers[i] = fns[i]()
        except PeerError as error:
            answers[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(fns))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return answers


def voter(store: Store, rank: int, size: int, fact: int) -> Callable[[], Any]:
    def vote() -> Any:
        return agree(store, rank, size, {"fact": fact}, what="test vote")

    return vote


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "1")


def test_everybody_learns_every_fact_again_and_again() -> None:
    store, size = HashStore(), 5

    def votes(rank: int) -> list[Any]:
        return [agree(store, rank, size, {"fact": 10 * i + rank}, what="test vote") for i in range(10)]

    answers = in_threads([lambda r=r: votes(r) for r in range(size)])
    assert answers == [[[{"fact": 10 * i + r} for r in range(size)] for i in range(10)]] * size


def test_calls_of_the_store_and_bytes_of_a_post_do_not_grow_with_the_ranks() -> None:
    sizes = set()
    for size in (2, 16):
        store = CutStore(1_000_000)
        with timeout(60):
            in_threads([voter(store, rank, size, 0) for rank in range(size)])
        sizes.add(len(store.get("post/0")))
        before = store.calls_left
        assert all(vote_module._Vote(store, 0, range(size), "test vote").read(looks=False))
        assert before - store.calls_left == 2
    assert len(sizes) == 1


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

    def vote_later() -> Any:
        wait_until(lambda: b'"fact": 3' in store.get("post/0"))
        return voter(store, 1, 2, 4)()

    answers = in_threads([voter(store, 0, 2, 3), vote_later])
    assert answers == [[{"fact": 3}, {"fact": 4}]] * 2


# Posts of others
MIB = 1 << 20
VALID = {"attempt": "a", "seen": "?", "facts": {}}
NEVER_AGREES = "huge, and never agrees"
HOSTILE: dict[str, str | bytes] = {
    "bytes": bytes(range(256)),
    "a huge string": '"' + "a" * (8 * MIB) + '"',
    "deep": "[" * MIB,
    "no attempt": json.dumps({"seen": "", "facts": {}}),
    "seen of another type": json.dumps(VALID | {"seen": 7}),
    "one thing more": json.dumps(VALID | {"more": 1}),
    NEVER_AGREES: json.dumps(VALID | {"facts": {"fact": "a" * (8 * MIB)}}),
}
VOTE_S = 0.2


def vote(store: HashStore) -> Exception:
    """The error that rank 0 of two raises, in bounded time."""
    start = time.monotonic()
    with timeout(VOTE_S), pytest.raises(Exception) as raised:
        agree(store, 0, 2, {"fact": 1}, what="test vote")
    assert time.monotonic() - start < VOTE_S + 10
    return raised.value


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_post_is_an_error_in_bounded_time(name: str) -> None:
    store = HashStore()
    store.set("post/1", HOSTILE[name])
    error = vote(store)
    assert isinstance(error, PeerError) and error.peers == [1]
    assert isinstance(error, PeerTimeoutError) == (name == NEVER_AGREES)
    assert name == NEVER_AGREES or "test vote: rank 1 posted no vote of this version of fusedcomm, but" in str(error)
    assert len(str(error)) < 500


def test_a_post_that_never_rests_is_an_error_in_bounded_time() -> None:
    store, done = HashStore(), threading.Event()

    def rewrite() -> None:
        for i in itertools.takewhile(lambda i: not done.wait(0.0005), itertools.count()):
            store.set("post/1", json.dumps(VALID | {"attempt": str(i)}))

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        assert isinstance(vote(store), PeerTimeoutError)
    finally:
        done.set()
        thread.join()


def test_facts_of_another_version_are_an_error_on_every_rank() -> None:
    store = HashStore()
    answers = in_threads(
        [voter(store, 0, 2, 1), lambda: agree(store, 1, 2, {"fact": 1, "of a later version": 2}, what="test vote")]
    )
    for rank, error in enumerate(answers):
        assert type(error) is PeerError
        assert error.peers == [1 - rank]
        assert f"rank {1 - rank} posted no vote of this version of fusedcomm, but" in str(error)
    assert in_threads([voter(store, rank, 2, 7) for rank in range(2)]) == [[{"fact": 7}] * 2] * 2


# Ranks that leave in the end of a vote
class Ended:
    """Departures where rank 1 has ended, after ``before`` has run."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.before = before

    def last_words(self, ranks: list[int]) -> dict[int, str]:
        self.before()
        return dict.fromkeys(set(ranks) & {1}, "it was killed")


def leaves(store: Store, departures: Any) -> Any:
    def leave() -> None:
        vote_module._Vote(store, 0, range(2), "test vote").leave_together("token", departures)

    return in_threads([leave])[0]


def test_a_rank_that_is_gone_before_all_have_left_a_vote_is_named() -> None:
    with timeout(60):
        error = leaves(HashStore(), Ended())
    assert isinstance(error, PeerTimeoutError) and error.peers == [1]
    assert "rank 1 has left: it was killed" in str(error)


def test_a_rank_that_ends_behind_a_vote_spoils_it_for_nobody() -> None:
    """It is done after this rank has looked for it, and has ended when this rank asks who has."""
    store = HashStore()
    assert leaves(store, Ended(before=lambda: store.set("done/1", json.dumps("token")))) is None


# A store that fails
def test_a_store_that_is_cut_off_ends_the_vote_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "0.2")
    store = CutStore(1)
    start = time.monotonic()
    (error,) = in_threads([voter(store, 0, 2, 1)])
    assert 0.2 <= time.monotonic() - start < 0.2 + STORE_GRACE_S + 20
    assert isinstance(error, PeerTimeoutError)
    assert "the store of the process group does not answer rank 0" in str(error)
    assert error.peers == []
    store.calls_left = 1000
    store.back.set()
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "10")
    assert in_threads([voter(store, rank, 2, 3) for rank in range(2)]) == [[{"fact": 3}] * 2] * 2


def test_a_store_that_answers_in_time_is_not_taken_for_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the store's calls block as above, but not for long."""
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "20")
    store = CutStore(3)

    def come_back() -> None:
        store.blocked.wait()
        store.back.set()

    threading.Thread(target=come_back).start()
    assert in_threads([voter(store, rank, 2, 3) for rank in range(2)]) == [[{"fact": 3}] * 2] * 2


def test_a_store_that_is_gone_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "60")
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    assert agree(client, 0, 1, {"fact": 1}, what="test vote") == [{"fact": 1}]
    del server
    start = time.monotonic()
    (error,) = in_threads([voter(client, 0, 1, 1)])
    assert time.monotonic() - start < 30
    assert type(error) is PeerError and isinstance(error.__cause__, DistError)
    assert "rank 0 has lost the store of the process group" in str(error)


# torch's rendezvous on GPUs has no bound of its own. Here threads are the ranks, and stubs the rendezvous.
ABLE = Topology(no_workspace=None, no_fused=None, workspace_bytes=1 << 30, algorithm=None)
OP = "matmul_all_reduce"


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``maps(stub, departures, *ranks)``: what the vote after the rendezvous says to each of the ranks."""
    release = threading.Event()

    def run(stub: Callable[[int], str | None], departures: Any, *ranks: int) -> list[Any]:
        store = HashStore()

        def rendezvous(segment: Any, group_name: str) -> None:
            if stub(segment) == "blocks":
                release.wait(60)

        def member(rank: int) -> Any:
            ours = Member(rank, 2, "group", torch.device("cuda", 0), store, ABLE, departures=departures)
            _, error = ours._rendezvous(rank, OP)  # type: ignore[arg-type]
            return ours._agree(OP, 1, error, "mapped")

        monkeypatch.setattr(torch.ops.symm_mem, "_rendezvous", rendezvous)
        found = SimpleNamespace(_SymmetricMemory=SimpleNamespace(rendezvous=lambda segment, group_name: "handle"))
        monkeypatch.setattr(group_member, "symm_mem", found)
        return in_threads([lambda rank=rank: member(rank) for rank in ranks])

    yield run
    release.set()


def test_a_rendezvous_that_blocks_ends_in_the_vote(maps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it blocks on all ranks, or one has failed in it and the others wait for that one."""
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "1")
    late = "cannot map its peers' memory: torch's rendezvous has not ended within 0.5 s"
    assert maps(lambda rank: "blocks", None, 0, 1) == [f"rank 0 {late}"] * 2

    def fails(rank: int) -> str:
        if rank == 0:
            raise RuntimeError("there is no address space")
        return "blocks"

    assert maps(fails, None, 0, 1) == ["rank 0 cannot map its peers' memory: there is no address space"] * 2


def test_a_rank_that_dies_in_it_is_named_at_once(maps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "30")
    began = time.monotonic()
    gone = SimpleNamespace(is_gone=lambda rank: rank == 1, last_words=lambda ranks: {1: "it was killed"})
    (error,) = maps(lambda rank: "blocks", gone, 0)
    assert isinstance(error, PeerTimeoutError) and error.peers == [1]
    assert time.monotonic() - began < 10


def test_memory_is_allocated_when_all_have_freed_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: Any = SimpleNamespace(is_gone=lambda rank: rank == 1, last_words=lambda ranks: {1: "it was killed"})
    allocated: list[int] = []
    monkeypatch.setattr(Member, "_segment", lambda ours, size: allocated.append(size))
    with pytest.raises(PeerTimeoutError, match="rank 1"):
        Member(0, 2, "group", torch.device("cuda", 0), HashStore(), ABLE, departures=gone)._share(4096, OP, 1)
    assert not allocated


def test_memory_is_looked_for_again_without_torch_s_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    has_memory: list[bool] = []

    def segment(ours: Member, size: int) -> Any:
        if not has_memory:
            raise RuntimeError("out of memory")
        return "a segment"

    ours: Any = Member(0, 2, "group", torch.device("cuda", 0), HashStore(), ABLE)
    monkeypatch.setattr(Member, "_segment", segment)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert ours._allocate(4096) == (None, "cannot allocate a workspace of 4096 bytes: out of memory")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: has_memory.append(True))
    assert ours._allocate(4096) == ("a segment", "")


@on_ranks(2)
def test_what_the_op_has_made_is_found_again(rank: int) -> None:
    """This is torch's own op, and CPU memory stands in for a GPU's."""
    with fresh_group() as group:
        segment = symm_mem._SymmetricMemory.empty_strided_p2p(
            (4096,), (1,), torch.uint8, torch.device("cpu"), group.group_name
        )
        torch.ops.symm_mem._rendezvous(segment, group.group_name)
        if rank == 0:  # alone: a second rendezvous would wait for rank 1
            assert symm_mem._SymmetricMemory.rendezvous(segment, group.group_name).rank == 0
        dist.barrier(group)
