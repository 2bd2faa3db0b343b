"""Results of `fused` in place: by rank processes in Triton's interpreter, and which results peers may write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fusedcomm
from fusedcomm.algorithms import in_place
from fusedcomm.algorithms.in_place import FusedResult
from fusedcomm.geometry import shapes
from fusedcomm.geometry.cut import Splits
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.runtime import signals
from tests.helpers.groups import fresh_group
from tests.helpers.in_place import WARM_UP, after_peers, arrived, assert_exact, results_of, wanted
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import Problem


@on_ranks(2)
def test_kernels_of_processes_write_each_other_s_results(rank: int) -> None:
    """Whoever is late finds the posts. A rank finds its own post always, once its results have memory in the heap."""
    problem, seen = Problem("in-place", (24, 16), 32, 0, 1), set[int]()
    with fresh_group() as group, fusedcomm.force_algorithm("fused", strict=True):
        for seed in range(WARM_UP + 4):
            after_peers(group, seed % 2)
            results = results_of(group, problem, seed)
            assert_exact(results, wanted(group, problem, seed))
            seen.update(arrived(group))
            del results
    assert seen == {0, 1}


class OneHeap:
    """A heap with room for every result."""

    addresses = torch.zeros(2, dtype=torch.int64)

    def empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, 7, dtype=dtype)

    def place(self, t: Tensor) -> int:
        return 256


def result_of(exchange: Exchange, given: Tensor | None = None, heap: OneHeap | None = None) -> FusedResult:
    workspace = SimpleNamespace(device=torch.device("cpu"), results=heap, rank=0)
    call: Any = SimpleNamespace(exchange=exchange, workspace=workspace, fingerprint=1, posted=None)
    return FusedResult(call, torch.empty(0), given)


EVEN = shapes.matmul_all_to_all((4, 8), (8, 6), None, 0, 1, 2)


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found = list[int]()
    monkeypatch.setattr(signals, "post", lambda place, num_bytes, workspace, fingerprint: found.append(num_bytes))
    return found


def test_a_result_of_the_heap_is_posted_in_each_round(posts: list[int]) -> None:
    result = result_of(EVEN, heap=OneHeap())
    rounds = EVEN.rounds(4)
    assert len(rounds) > 1 and all(result.post(spans) for spans in rounds)
    assert posts == [result.tensor.nbytes] * len(rounds)
    assert (result.tensor == 7).all()
    at_peers = result.at_peers(rounds[0])
    assert at_peers is not None and at_peers.num_bytes == result.tensor.nbytes


def test_what_the_caller_gives_is_not_posted_but_peers_results_are_written(posts: list[int]) -> None:
    given = torch.zeros(8, 3)
    result = result_of(EVEN, given, OneHeap())
    (spans,) = EVEN.rounds(1 << 40)
    assert result.tensor is given and not result.post(spans) and not posts
    assert result.at_peers(spans) is not None


@pytest.mark.parametrize("why", ["no heap", "capture", "parts of different sizes"])
def test_other_calls_go_through_the_slots(why: str, posts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, heap = EVEN, None if why == "no heap" else OneHeap()
    if why == "capture":
        monkeypatch.setattr(in_place, "is_for_capture", lambda device: True)
    if why.startswith("parts"):
        splits = Splits(gather_splits=(4, 3), rank=0)
        exchange = shapes.matmul_all_to_all((4, 8), (8, 6), None, 0, 1, 2, splits)
    result = result_of(exchange, heap=heap)
    (spans,) = exchange.rounds(1 << 40)
    assert result.at_peers(spans) is None and not result.post(spans) and not posts
