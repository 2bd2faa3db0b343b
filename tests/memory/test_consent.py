"""Ballots of ranks that come to the same program, to others, alone or late: all take one answer, and soon."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from fusedcomm.memory import consent
from fusedcomm.memory.consent import ABSENT, OTHER, YES, Consent

Programs = list[str]  # of one rank: digests, some with "@" and a program, and "" where it changes nothing


def answers(ranks: list[Consent], programs: list[Programs]) -> list[list[str]]:
    def run(rank: Consent, programs: Programs) -> list[str]:
        return [come(rank, each) for each in programs]

    def come(rank: Consent, digest: str) -> str:
        if digest:
            text, _, program = digest.partition("@")
            return rank.ask(text, program=program or None).kind
        rank.pass_by()
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks, programs))


def group(group_size: int) -> list[Consent]:
    store = HashStore()
    return [Consent(store, rank, group_size) for rank in range(group_size)]


SCENES: dict[str, list[tuple[list[Programs], list[list[str]]]]] = {  # one event behind another
    "equal": [([["a"], ["a"]], [[YES], [YES]])] * 3,
    "others": [([["a"], ["b"]], [[OTHER], [OTHER]]), ([["a"], ["a"]], [[YES], [YES]])],
    "nothing": [([["a"], [""]], [[OTHER], [""]]), ([["a"], ["a"]], [[YES], [YES]])],
    "agreed before": [
        ([["a"], ["a"]], [[YES], [YES]]),
        ([["a"], [""]], [[OTHER], [""]]),
        ([["a"], ["b"]], [[OTHER], [OTHER]]),
        ([["b"], ["b"]], [[YES], [YES]]),
    ],
    "one of three": [([["a"], ["a"], ["b"]], [[OTHER], [OTHER], [OTHER]]), ([["a"]] * 3, [[YES]] * 3)],
}
LATE: dict[str, list[tuple[list[Programs], list[list[str]]]]] = {
    "alone, and never before": [([["a"], []], [[ABSENT], []])],
    "alone, as all before": [
        ([["a"], ["a"]], [[YES], [YES]]),
        ([["a"], []], [[YES], []]),
        ([["a", "b"], ["a", "b"]], [[YES, YES]] * 2),
    ],
    "alone, and a peer has come to more": [
        ([["a@1", "a@2"], ["a@1", "b@2"]], [[YES, OTHER]] * 2),
        ([[], ["c@3"]], [[], [ABSENT]]),
        ([["a@1"], []], [[YES], []]),
        ([["a@2"], []], [[OTHER], []]),
        ([["a@1"], ["d@1"]], [[OTHER], [OTHER]]),
    ],
    "alone, while a peer comes to a new one": [
        ([["a@1"], ["a@1"]], [[YES]] * 2),
        ([["a@1"], ["d@2"]], [[OTHER], [OTHER]]),
    ],
    "alone, one of three again": [
        ([["a@1"]] * 3, [[YES]] * 3),
        ([["a@1"], [], []], [[YES], [], []]),
        ([["a@1"], ["a@1"], ["b@1"]], [[OTHER]] * 3),
    ],
}


@pytest.mark.parametrize("name", SCENES)
def test_nobody_waits_for_a_rank_that_is_elsewhere(name: str) -> None:
    began = time.monotonic()
    ranks = group(len(SCENES[name][0][0]))
    for programs, want in SCENES[name]:
        assert answers(ranks, programs) == want
    assert time.monotonic() - began < consent.env.timeout_s() * consent._PATIENCE


@pytest.mark.parametrize("name", LATE)
def test_a_rank_that_is_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "2")
    ranks = group(len(LATE[name][0][0]))
    for programs, want in LATE[name]:
        assert answers(ranks, programs) == want


def test_a_rank_that_comes_late_takes_the_answer_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "1")
    ranks = group(2)
    assert [rank.ask("a").kind == YES for rank in ranks] == [False, False]
    assert answers(ranks, [["b"], ["b"]]) == [[YES], [YES]]


class Named:
    """A process group, for `consent.of`."""

    def __init__(self, name: str) -> None:
        self.group_name = name

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def test_a_later_group_of_a_name_has_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have the store of an earlier one."""
    purposes: list[str] = []

    def store(pg: Named, purpose: str) -> HashStore:
        purposes.append(purpose)
        return HashStore()

    monkeypatch.setattr(consent, "_num_lives", Counter())
    monkeypatch.setattr(consent.groups, "store", store)
    monkeypatch.setattr(dist, "get_backend", lambda pg: "gloo")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda pg: [0, 1])
    first, *_ = pgs = [Named(name) for name in "001"]
    for pg in (*pgs, first):
        consent.of(pg)  # type: ignore[arg-type]
    assert purposes == ["consent/1", "consent/2", "consent/1"]
