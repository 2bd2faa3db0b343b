"""Kernels with a table in Triton's interpreter: who is signalled, descriptors, a peer that is missing; virtual ranks.

What whole calls compute: tests/algorithms/test_uneven_orders.py.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusedcomm.algorithms import kernel_launch, tiles
from fusedcomm.algorithms.tiles import TileConfig
from tests.helpers.tiers import thorough_but
from tests.helpers.uneven import Uneven
from tests.helpers.virtual_ranks import FINGERPRINT, VirtualRank, flag, record, virtual_ranks

CASES = {
    "push": Uneven("matmul_all_to_all", (5, 70), gather_dim=0, scatter_dim=1, scatter=(69, 0, 1)),
    "push rows": Uneven("matmul_all_to_all", (70, 5), gather_dim=1, scatter_dim=0, scatter=(69, 0, 1)),
    "reduce": Uneven("matmul_reduce_scatter", (70, 5), scatter_dim=0, scatter=(69, 0, 1)),
    "gather": Uneven("all_gather_matmul", (140, 5), gather_dim=0, gather=(69, 1, 70)),
    "gather K": Uneven("all_gather_matmul", (5, 70), gather_dim=1, gather=(1, 0, 69)),
}


def ranks_of(case: Uneven, timeout_s: float) -> list[VirtualRank]:
    x, w, _ = case.inputs(3)[0]
    ranks = virtual_ranks(3, 3 * case.exchange(x, w, 0, 3).chunk_numel * 4)
    for rank in ranks:
        rank.word(rank.layout.timeout)[0] = int(timeout_s * 1e9)
    return ranks


def send(case: Uneven, rank: VirtualRank) -> None:
    x, w, _ = case.inputs(3)[rank.rank]
    (spans,) = case.exchange(x, w, rank.rank, 3).rounds(1 << 40)
    if case.pushes:
        kernel_launch.push(x, w, None, spans, rank, FINGERPRINT)
    else:
        kernel_launch.pack(x, spans, rank, FINGERPRINT)


def receive(case: Uneven, rank: VirtualRank) -> Tensor:
    x, w, _ = case.inputs(3)[rank.rank]
    exchange = case.exchange(x, w, rank.rank, 3)
    (spans,) = exchange.rounds(1 << 40)
    out = torch.zeros(exchange.out_shape)
    if case.op == "matmul_all_to_all":
        kernel_launch.unpack(out, spans, rank, FINGERPRINT)
    elif case.op == "matmul_reduce_scatter":
        kernel_launch.reduce(out, spans, None, 1.0, rank, FINGERPRINT)
    else:
        kernel_launch.gather_matmul(out, w, None, spans, rank, FINGERPRINT, end_round=True)
    return out


@pytest.mark.parametrize("name", CASES)
def test_a_peer_that_does_not_come_leaves_nan(name: str) -> None:
    """Everywhere, in a bounded time, with the peer on record; and the round ends."""
    case = CASES[name]
    ranks = ranks_of(case, timeout_s=0.2)
    send(case, ranks[0])
    send(case, ranks[1])
    start = time.monotonic()
    assert receive(case, ranks[0]).isnan().all()
    assert 0.2 <= time.monotonic() - start < 20
    assert ranks[0].record.tolist() == record(1, 1, 0, [flag(1), flag(1), 0], [0, 0, 1])
    assert [rank.broken for rank in ranks] == [[1 | 1 << 8, 0, 0]] * 3
    ranks[0].assert_idle(1, failed=True)


def check_rounds(case: Uneven, num_rounds: int) -> None:
    ranks = ranks_of(case, timeout_s=60)
    for epoch in range(1, num_rounds + 1):
        for rank in ranks:
            send(case, rank)
        for rank in ranks:
            assert rank.word(rank.layout.flag(epoch, 0), 3).tolist() == [flag(epoch)] * 3
        wanted = case.expected(case.inputs(3))
        for rank in ranks:
            assert torch.equal(receive(case, rank), wanted[rank.rank])
    for rank in ranks:
        rank.assert_idle(num_rounds)


DESCRIBED = {
    "push": Uneven("matmul_all_to_all", (37, 96), gather_dim=0, scatter_dim=1, scatter=(48, 32, 16), other=24),
    "push rows": Uneven("matmul_all_to_all", (70, 40), gather_dim=1, scatter_dim=0, scatter=(35, 0, 35), other=24),
    "gather": Uneven("all_gather_matmul", (70, 32), gather_dim=0, gather=(37, 1, 32), other=24),
    "gather K": Uneven("all_to_all_matmul", (70, 96), gather_dim=1, scatter_dim=0, scatter=(34, 1, 35), other=24),
}


@pytest.mark.parametrize("name", thorough_but(["push rows", "gather K"], DESCRIBED))
def test_tensor_descriptors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of sm_90 and later, for gathers alone: columns of a push would begin anywhere."""
    made = []

    def counted(*args: Any, describe: Any = kernel_launch.describe_w) -> Any:
        made.append(args)
        return describe(*args)

    monkeypatch.setattr(tiles, "architecture", lambda device: 90)
    monkeypatch.setattr(tiles, "BLOCK_K", 16)
    monkeypatch.setattr(tiles, "matmul_config", lambda *args: TileConfig(32, 32, 16, 2, 4, 1, True))
    monkeypatch.setattr(kernel_launch, "describe_w", counted)
    check_rounds(DESCRIBED[name], 2)
    assert bool(made) == name.startswith("gather")
