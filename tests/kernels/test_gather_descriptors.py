"""Gathers whose chunks and w come by tensor descriptors, in Triton's interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from fusedcomm.plan import launches
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.tiles import TileConfig
from fusedcomm.testing import launch_now
from tests.helpers.kernel_calls import by_name, by_tma, check_calls
from tests.helpers.problems import Problem
from tests.helpers.tiers import thorough_but
from tests.helpers.virtual_ranks import FINGERPRINT, virtual_ranks

_gather = partial(Problem, op="all_gather_matmul")
_exchange = partial(Problem, op="all_to_all_matmul")
BOXES = by_name(  # ragged rows and columns, and K in whole blocks or with an end that is none
    [
        _gather("rows", (37, 32), 40, 0, bias=True),
        _gather("rows transposed", (2, 7, 48), 33, 1, transposed=True),
        _gather("batched", (3, 37, 32), 48, 1, batched=True),
        _gather("batched, transposed", (2, 37, 32), 48, 0, batched=True, transposed=True),
        _gather("K", (37, 48), 40, 1, bias=True),
        _exchange("heads", (2, 19, 3, 16), 40, 2, 1, k_dims=2, transposed=True),
        _exchange("packed qkv", (5, 3, 2, 16), 40, 2, 0, k_dims=3, bias=True),
        _gather("batched K", (3, 21, 32), 40, 2, batched=True),
        _gather("batched K, transposed", (3, 21, 32), 40, 2, batched=True, transposed=True),
        _gather("ragged", (37, 40), 48, 0, bias=True),
        _gather("ragged, batched", (3, 37, 24), 48, 1, batched=True),
        _gather("ragged, batched, transposed", (2, 37, 24), 48, 0, batched=True, transposed=True),
        _gather("ragged K", (37, 24), 40, 1, bias=True),
        _gather("ragged K, batched", (3, 21, 24), 40, 2, batched=True),
    ]
)


@pytest.fixture(name="by_tma")
def slots_by_tma(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return by_tma(monkeypatch, "describe_slots", TileConfig(32, 32, 16, 2, 4, 1, True))


@pytest.mark.parametrize("name", thorough_but(["rows", "K", "ragged, batched", "heads"], BOXES))
def test_chunks_and_w_by_tensor_descriptor(name: str, by_tma: list[Any]) -> None:
    group_size = 3 if name in ("heads", "batched, transposed") else 2
    check_calls(BOXES[name], group_size, dtype=torch.bfloat16)
    assert len(by_tma) == group_size


@pytest.mark.thorough
def test_rounds_and_calls_by_tensor_descriptor(by_tma: list[Any]) -> None:
    """Rounds of a call and calls behind one another take the slots by turns, for two weights and the by-product."""
    problem = dataclasses.replace(BOXES["rows transposed"], n=(40, 24))
    check_calls(problem, 2, num_rounds=3, num_calls=2, by_product=True)
    assert len(by_tma) >= 2 * 3 * 2  # by ranks, rounds and weights; both calls take the same


@pytest.mark.parametrize("gather_dim", [0, 1], ids=["rows", "K"])
@pytest.mark.parametrize("always", [None, 0, 1])
def test_a_descriptor_has_the_slot_of_each_epoch(
    always: int | None, gather_dim: int, by_tma: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor of one slot alone gives wrong numbers within two epochs (negative control)."""

    def of_one_slot(*args: Any, describe: Any = launches.describe_slots) -> Any:
        found = describe(*args)
        if always is None:
            return found
        start = found.place.offset + always * found.strides[0] * found.place.dtype.itemsize
        place = found.place._replace(offset=start, sizes=found.strides[:1])
        return found._replace(place=place, strides=(0, *found.strides[1:]))

    monkeypatch.setattr(launches, "describe_slots", of_one_slot)
    with pytest.raises(AssertionError) if always is not None else contextlib.nullcontext():
        check_calls(_gather("small", (5, 16), 16, gather_dim), 2, num_calls=2)


def test_chunks_that_are_no_boxes_are_loaded_by_pointer(by_tma: list[Any]) -> None:
    """Rows begin elsewhere than at 16 bytes, runs of K end within a block, or w has parts in batches or in rows."""
    problems = [
        _gather("K", (5, 22), 12, 0),
        _gather("N", (5, 24), 11, 1),
        _exchange("runs", (5, 2, 3, 8), 12, 3, 1, k_dims=2),
        _gather("parts", (3, 21, 24), 40, 2, batched=True, transposed=True),
        _exchange("parts in rows", (2, 18, 3, 8), 40, 2, 1, k_dims=2, transposed=True),
    ]
    for problem in problems:
        check_calls(problem, 2)
    assert not by_tma


@pytest.mark.parametrize("transposed", [False, True])
def test_a_part_of_k_does_not_reach_the_next(transposed: bool, by_tma: list[Any]) -> None:
    """Each source's K ends within a block, and what w has behind it is infinite: 0 * inf would be NaN."""
    exchange = shapes.all_gather_matmul((16, 24), [(48, 16)], 1, 2)
    ranks = virtual_ranks(2, 2 * exchange.chunk_numel * 4)
    (spans,) = exchange.rounds(1 << 40)
    for rank in ranks:
        launch_now.pack(torch.ones(16, 24), spans, rank, FINGERPRINT)
    w = torch.ones(16, 48).T if transposed else torch.ones(48, 16)
    w[24:] = torch.inf
    out = torch.full(exchange.out_shapes[0], float("nan"))
    launch_now.gather_matmul(out, w, None, spans, ranks[0], FINGERPRINT, end_round=True)
    assert torch.isposinf(out).all() and bool(by_tma) is not transposed
