"""Gathers whose chunks and w come by tensor descriptors, in Triton's interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fusedcomm.algorithms import kernel_launch, tiles
from fusedcomm.algorithms.tiles import TileConfig
from tests.helpers.tiers import nightly_but, thorough_but
from tests.kernels.test_gather_matmul import Case, run


def box_cases(r: int) -> dict[str, Case]:
    """Whole blocks of K, as boxes need them, and ragged rows and columns."""
    return {
        "rows": Case((37, 32), 0, ns=(40,), bias=True, dtype=torch.bfloat16),
        "rows transposed": Case((2, 7, 48), 1, ns=(33,), transposed=True, dtype=torch.bfloat16),
        "batched": Case((3, 37, 32), 1, ns=(48,), batched=True),
        "batched, transposed": Case((2, 37, 32), 0, ns=(48,), batched=True, transposed=True),
        "K": Case((37, 48), 1, ns=(40,), bias=True, dtype=torch.float16),
        "heads": Case((2, 19 * r, 3, 16), 2, 1, ns=(40,), k_dims=2, transposed=True),
        "packed qkv": Case((5 * r, 3, 2, 16), 2, 0, ns=(40,), k_dims=3, bias=True),
        "batched K": Case((3, 21, 32), 2, ns=(40,), batched=True),
        "batched K, transposed": Case((3, 21, 32), 2, ns=(40,), batched=True, transposed=True),
    }


@pytest.fixture
def by_tma(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The path of sm_90 and later: chunks and w by boxes. Has the arguments of each descriptor of slots."""
    made = []

    def counted(*args: Any, describe: Any = kernel_launch.describe_slots) -> Any:
        made.append(args)
        return describe(*args)

    monkeypatch.setattr(tiles, "architecture", lambda device: 90)
    monkeypatch.setattr(tiles, "BLOCK_K", 16)
    monkeypatch.setattr(tiles, "matmul_config", lambda *args: TileConfig(32, 32, 16, 2, 4, 1, True))
    monkeypatch.setattr(kernel_launch, "describe_slots", counted)
    return made


@pytest.mark.parametrize("name", thorough_but(["rows", "K"], box_cases(2)))
def test_chunks_and_w_by_tensor_descriptor(name: str, by_tma: list[Any]) -> None:
    run(box_cases(2)[name], 2)
    assert len(by_tma) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("group_size", nightly_but([1, 3], [1, 3, 4]))
@pytest.mark.parametrize("name", ["rows", "batched, transposed", "heads", "batched K"])
def test_tensor_descriptors_of_more_and_fewer_ranks(group_size: int, name: str, by_tma: list[Any]) -> None:
    run(box_cases(group_size)[name], group_size)
    assert len(by_tma) == group_size


@pytest.mark.thorough
@pytest.mark.parametrize("name", nightly_but(["rows transposed", "batched K"], box_cases(2)))
def test_rounds_and_calls_by_tensor_descriptor(name: str, by_tma: list[Any]) -> None:
    """Rounds of a call and calls behind one another take the slots by turns, for two weights and the by-product."""
    case = box_cases(2)[name]
    part = case.exchange(2).chunk_numel // 3
    run(dataclasses.replace(case, ns=(40, 24), max_chunk_numel=part), 2, calls=2, by_product=True)
    assert len(by_tma) >= 2 * 3 * 2  # by ranks, rounds and weights; both calls take the same


@pytest.mark.parametrize("gather_dim", [0, 1], ids=["rows", "K"])
@pytest.mark.parametrize("always", [None, 0, 1])
def test_a_descriptor_has_the_slot_of_each_epoch(
    always: int | None, gather_dim: int, by_tma: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor of one slot alone gives wrong numbers within two epochs (negative control)."""

    def of_one_slot(*args: Any, describe: Any = kernel_launch.describe_slots) -> Any:
        descriptor = describe(*args)
        if always is not None:
            descriptor.base = descriptor.base[always * descriptor.strides[0] :]
            descriptor.strides[0] = 0
        return descriptor

    monkeypatch.setattr(kernel_launch, "describe_slots", of_one_slot)
    with pytest.raises(AssertionError) if always is not None else contextlib.nullcontext():
        run(Case((5, 16), gather_dim, ns=(16,)), 2, calls=2)


def test_chunks_that_are_no_boxes_are_loaded_by_pointer(by_tma: list[Any]) -> None:
    """K, or the part of it in a run, is no multiple of the block."""
    for case in (Case((5, 24), 0), Case((5, 24), 1), Case((5, 4, 3, 8), 2, 1, k_dims=2)):
        run(case, 2)
    assert not by_tma
