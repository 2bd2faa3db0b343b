"""gather_matmul_kernel where this rank's own chunk is multiplied in x and only signalled: tests in the interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.helpers.tiers import thorough_but

pytest.importorskip("triton")

from tests.helpers.virtual_ranks import flag, record
from tests.kernels.test_gather_matmul import Case, cases, gather, pack, run, simple_ranks


def rows_of_cases(r: int) -> dict[str, Case]:
    """Those in which every source has rows of its own."""
    return {name: case for name, case in cases(r).items() if not case.exchange(r).splits_columns}


@pytest.mark.parametrize("group_size", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", thorough_but(["rows", "rows, K scattered", "interleaved rows"], rows_of_cases(1)))
def test_the_own_chunk_stays_in_x(group_size: int, name: str) -> None:
    run(rows_of_cases(group_size)[name], group_size, own=False)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["interleaved rows, long runs", "batched, batches"])
def test_weights_and_rounds(name: str) -> None:
    case = dataclasses.replace(cases(2)[name], ns=(50, 0))
    part = case.exchange(2).chunk_numel // 3
    run(dataclasses.replace(case, max_chunk_numel=part), 2, own=False)


def test_the_kernel_leaves_the_own_rows_as_they_are() -> None:
    ranks = simple_ranks(2)
    for rank in ranks:
        pack(rank, 1)
    assert (gather(ranks[1], 0, own=False) == torch.tensor([8.0, 0.0]).repeat_interleave(5)[:, None]).all()
    ranks[1].assert_idle(1)


def test_the_own_rows_are_poisoned_too() -> None:
    ranks = simple_ranks(2, timeout_s=0.2)
    pack(ranks[0], 1)
    assert torch.isnan(gather(ranks[0], 0, own=False)).all()
    assert ranks[0].record.tolist() == record(1, 1, 0, [flag(1), 0], [0, 1])
    ranks[0].assert_idle(1, failed=True)


def test_the_own_signal_is_waited_for() -> None:
    """A pack beside the kernel reads the epoch: it may not be counted before."""
    ranks = simple_ranks(2, timeout_s=0.2)
    pack(ranks[1], 1)
    assert torch.isnan(gather(ranks[0], 0, own=False)).all()
    ranks[0].assert_idle(1, failed=True)
