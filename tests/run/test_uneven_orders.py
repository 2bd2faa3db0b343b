"""Parts of different sizes by `chunked`, as on GPUs, without one, in random orders.

tests/helpers/schedule/random_orders.py runs them. Integers are exact, and all begins as NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fusedcomm.errors import PeerError
from fusedcomm.plan import launches, moves
from fusedcomm.plan.geometry import exchange
from tests.helpers.schedule.random_orders import NoProgressError
from tests.helpers.tiers import thorough_but
from tests.helpers.uneven import Uneven
from tests.run.test_chunked_orders import Run, cut_in

A2A, BACK = "matmul_all_to_all", "all_to_all_matmul"
GATHER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter"
CASES = {
    "heads": Uneven(A2A, (2, 5, 3, 3), 2, gather_dim=1, scatter_dim=2, bias=True),
    "rows": Uneven(A2A, (7, 5), gather_dim=1, scatter_dim=0),
    "shared-heads": Uneven(A2A, (2, 5, 3, 2), 2, gather_dim=1, scatter_dim=2, scatter=((0, 2), (1, 2))),
    "batches": Uneven(A2A, (3, 4, 5), gather_dim=2, scatter_dim=0, batched=True),
    "heads-back": Uneven(BACK, (2, 5, 3, 3), 2, gather_dim=2, scatter_dim=1, bias=True),
    "rows-back": Uneven(BACK, (5, 7), 1, gather_dim=0, scatter_dim=1),
    "gathered": Uneven(GATHER, (7, 4), gather_dim=0, bias=True),
    "gathered-from-one": Uneven(GATHER, (3, 4), gather_dim=0, gather=(0, 3)),
    "gathered-k": Uneven(GATHER, (4, 7), gather_dim=1),
    "summed": Uneven(REDUCE, (7, 4), scatter_dim=0, bias=True),
    "summed-for-one": Uneven(REDUCE, (4, 5), scatter_dim=1, scatter=(5, 0)),
    "summed-for-both": Uneven(REDUCE, (7, 4), scatter_dim=0, scatter=((0, 5), (2, 5))),
}
QUICK = ["heads", "heads-back", "summed-for-one"]


@pytest.fixture(autouse=True)
def pieces_of_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "FEW_ROWS", 0)
    monkeypatch.setattr(exchange, "MIN_RUN", 1)
    cut_in(2, monkeypatch)


def check(name: str, seed: int = 0, group_size: int = 2, num_calls: int = 1, **options: Any) -> None:
    Run(CASES[name], group_size, torch.float32, num_calls=num_calls, **options).finish(seed)


@pytest.mark.parametrize("name", thorough_but(QUICK, CASES))
def test_parts_of_different_sizes_are_right_in_a_random_order(name: str) -> None:
    check(name, by_product=name.startswith("gathered") or name in QUICK)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["heads", "gathered", "summed"])
def test_three_ranks_are_right(name: str) -> None:
    check(name, 1, 3, num_calls=2)


def goes_wrong(name: str) -> bool:
    try:
        check(name)
    except (AssertionError, NoProgressError, PeerError):
        return True
    return False


def test_chunks_that_lie_as_far_apart_as_they_are_long_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction of the smaller part, whose sources' chunks lie as far apart as the largest are long."""
    monkeypatch.setattr(launches, "Reduced", lambda size, start, apart: (size, start, size))
    assert goes_wrong("summed")


def test_a_call_that_a_peer_leaves_gives_nan() -> None:
    run = Run(CASES["heads"], dtype=torch.float32, num_calls=1, leaves_in=2)
    run.gpus.run_all(0)
    with pytest.raises(PeerError) as found:
        run.workspaces[1].check(A2A)
    assert found.value.peers == [0] and run.results[1][0][0].isnan().all()


def test_a_chunk_that_is_copied_before_it_comes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves.Moves, "wait", lambda *args: None)
    assert goes_wrong("heads")
