"""gather_matmul_kernel where this rank's own chunk is multiplied in x and only signalled: tests in the interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusedcomm.plan.geometry import shapes
from fusedcomm.testing import launch_now
from tests.helpers.kernel_calls import check_calls
from tests.helpers.virtual_ranks import FINGERPRINT, VirtualRank, flag, record
from tests.kernels.test_gather_matmul import CASES, pack, simple_ranks


@pytest.mark.parametrize(
    ("group_size", "name"), [(1, "rows"), (3, "rows, K scattered"), (3, "interleaved rows"), (2, "batched, batches")]
)
def test_the_own_chunk_stays_in_x(group_size: int, name: str) -> None:
    check_calls(CASES[name], group_size, own=False)


@pytest.mark.thorough
def test_weights_and_rounds() -> None:
    problem = dataclasses.replace(CASES["interleaved rows, long runs"], n=(50, 0))
    check_calls(problem, 2, num_rounds=3, own=False)


def gather(rank: VirtualRank) -> Tensor:
    """What `pack` sends, times ones, in a result of zeros."""
    exchange = shapes.all_gather_matmul((5, 8), [(8, 24)], 0, rank.group_size)
    (spans,) = exchange.rounds(1 << 40)
    out = torch.zeros(exchange.out_shape)
    launch_now.gather_matmul(out, torch.ones(8, 24), None, spans, rank, FINGERPRINT, end_round=True, own=False)
    return out


def test_the_kernel_leaves_the_own_rows_as_they_are() -> None:
    ranks = simple_ranks(2)
    for rank in ranks:
        pack(rank, 1)
    assert (gather(ranks[1]) == torch.tensor([8.0, 0.0]).repeat_interleave(5)[:, None]).all()
    ranks[1].assert_idle(1)


@pytest.mark.parametrize("missing", [0, 1])
def test_all_rows_are_poisoned_where_a_signal_is_missing(missing: int) -> None:
    """The own signal is waited for too: a pack beside the kernel reads the epoch, which may not be counted before."""
    ranks = simple_ranks(2, timeout_s=0.2)
    pack(ranks[1 - missing], 1)
    assert torch.isnan(gather(ranks[0])).all()
    assert missing == 0 or ranks[0].record.tolist() == record(1, 1, 0, [flag(1), 0], [0, 1])
    ranks[0].assert_idle(1, failed=True)
