"""Waits that fail, of each kernel that receives, in Triton's interpreter: who is on record, and what is left behind."""

import time
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from fusedcomm.bench import launch_now
from fusedcomm.kernels.triton import primitives
from fusedcomm.plan import routed_rounds
from fusedcomm.plan.geometry import norm, payloads, shapes
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.scaling import VALUES
from tests.helpers.token_rows import routings, run_kernel
from tests.helpers.virtual_ranks import FINGERPRINT, VirtualRank, flag, record, unpack_and_norm, virtual_ranks

OTHER = FINGERPRINT ^ 1
# Each element, where 2 ranks send ones
OF_ONES = {"unpack": 8, "reduce": 16, "reduce and norm": 2, "gather rows": 8, "gather K": 16}
OF_ONES |= {"take_rows": 1, "add_rows": 2, "unpack and norm": 1}
SENDERS = {"take_rows": "send_rows", "add_rows": "return_rows"}
by_kernel = pytest.mark.parametrize("kernel", OF_ONES)
gathers = pytest.mark.parametrize("kernel", ["gather rows", "gather K"])


def exchange_of(kernel: str, group_size: int) -> Exchange:
    """Every x is [6, 8], and w has ones and 24 columns. Each token has an expert on every rank."""
    if kernel in SENDERS:
        return payloads.all_gather((6, 8), 0, group_size)
    if kernel == "unpack":
        return shapes.matmul_all_to_all((6, 8), (8, 24), None, 0, 1, group_size)
    if kernel == "reduce":
        return shapes.matmul_reduce_scatter((6, 8), (8, 24), "sum", 0, group_size)
    if kernel == "reduce and norm":
        return norm.one_shot((6, 8), 0, 0.0, group_size)
    if kernel == "unpack and norm":
        return norm.two_shot((6, 8), None, 0.0, group_size)
    dim = int(kernel == "gather K")
    return shapes.all_gather_matmul((6, 8), [(8 * group_size**dim, 24)], dim, group_size)


def ranks_of(kernel: str, group_size: int, **options: Any) -> list[VirtualRank]:
    return virtual_ranks(group_size, 2 * group_size * exchange_of(kernel, group_size).chunk_numel * 4, **options)


def of_rows(name: str, rank: VirtualRank, value: float, fingerprint: int) -> Tensor:
    """The result of a dispatch of x, or of a combine of 6 * R rows, of which one kernel runs."""
    k, combines = rank.group_size, name not in ("send_rows", "take_rows")
    packed = routings([torch.arange(k).repeat(6)] * k, k, k, 6 * k)[rank.rank]
    rows = torch.full((6 * k if combines else 6, 8), float(value))
    if not combines:
        return run_kernel(name, routed_rounds.send, rank, fingerprint, rows, None, packed, k=k, capacity=6 * k)[0]
    facts = {"num_tokens": 6, "return_received": False}
    return run_kernel(
        f"return {name}", routed_rounds.combine, rank, fingerprint, rows, None, None, packed, k=k, **facts
    )[0]


def send(kernel: str, rank: VirtualRank, value: float = 1, fingerprint: int = FINGERPRINT) -> None:
    (spans,) = exchange_of(kernel, rank.group_size).rounds(1 << 40)
    x = torch.full((6, 8), float(value))
    if kernel in SENDERS:
        of_rows(SENDERS[kernel], rank, value, fingerprint)
    elif kernel in ("unpack", "reduce"):
        launch_now.push(x, torch.ones(8, 24), None, spans, rank, fingerprint)
    else:
        launch_now.pack(x, spans, rank, fingerprint)


def receive(kernel: str, rank: VirtualRank, fingerprint: int = FINGERPRINT, end_round: bool = True) -> Tensor:
    exchange = exchange_of(kernel, rank.group_size)
    (spans,) = exchange.rounds(1 << 40)
    out = torch.zeros(exchange.out_shape)
    if kernel in SENDERS:
        return of_rows(kernel, rank, 0, fingerprint)
    if kernel == "unpack":
        launch_now.unpack(out, spans, rank, fingerprint)
    elif kernel.endswith("and norm"):
        normed, zeros = torch.zeros(6, 8), torch.zeros(6, 8)
        if kernel == "reduce and norm":
            launch_now.reduce_norm(normed, out, zeros, None, None, spans, 0.0, rank, fingerprint)
        else:
            unpack_and_norm(normed, out, torch.ones(8), spans, rank, fingerprint, True)
        assert torch.equal(normed.isnan(), out.isnan())
    elif kernel == "reduce":
        launch_now.reduce(out, spans, None, 1.0, rank, fingerprint)
    else:
        w = torch.ones(exchange.k, 24)
        launch_now.gather_matmul(out, w, None, spans, rank, fingerprint, end_round=end_round)
    return out


def is_poisoned(kernel: str, out: Tensor) -> bool:
    """Whether the result of rank 0 is NaN, but for its own chunk, which an unpack copies before it waits."""
    return bool(out[6 if kernel == "unpack" else 0 :].isnan().all())


@by_kernel
@pytest.mark.parametrize("num_slots", [2, 1])
def test_a_peer_may_be_one_round_ahead(num_slots: int, kernel: str) -> None:
    """Two slots are enough; one is not (negative control)."""
    ranks = ranks_of(kernel, 2, timeout_s=0.2, num_slots=num_slots)
    for rank in ranks:
        send(kernel, rank)
    assert (receive(kernel, ranks[1]) == OF_ONES[kernel]).all()
    send(kernel, ranks[1], 2)
    assert bool((receive(kernel, ranks[0]) == OF_ONES[kernel]).all()) == (num_slots == 2)


@by_kernel
@pytest.mark.parametrize("polls", [1, 16])
def test_time_out_names_who_is_missing(kernel: str, polls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``polls``: of a flag between two looks at the clock. GPUs have 16."""
    monkeypatch.setattr(primitives, "POLLS", tl.constexpr(polls))
    ranks = ranks_of(kernel, 3, timeout_s=0.2)
    send(kernel, ranks[0])
    send(kernel, ranks[1])
    start = time.monotonic()
    assert is_poisoned(kernel, receive(kernel, ranks[0]))
    assert 0.2 <= time.monotonic() - start < 10
    assert ranks[0].record.tolist() == record(1, 1, 0, [flag(1), flag(1), 0], [0, 0, 1])
    assert [rank.broken for rank in ranks] == [[1 | 1 << 8, 0, 0]] * 3
    ranks[0].assert_idle(1, failed=True)


@by_kernel
def test_mismatch_is_found_on_both_sides(kernel: str) -> None:
    """The first rank breaks the second, which must still say that it is a mismatch."""
    ranks, flags = ranks_of(kernel, 2), [flag(1), flag(1, OTHER)]
    send(kernel, ranks[0])
    send(kernel, ranks[1], fingerprint=OTHER)
    assert is_poisoned(kernel, receive(kernel, ranks[0]))
    assert ranks[0].record.tolist() == record(2, 1, 0, flags, [0, 1])
    assert ranks[1].broken == [2 | 1 << 8, 0]
    assert receive(kernel, ranks[1], OTHER).isnan().any()
    expected = record(2, 1, 1, flags, [1, 0])
    expected[4] = OTHER
    assert ranks[1].record.tolist() == expected
    assert ranks[1].broken == [2 | 1 << 8, 2 | 1 << 8]


@by_kernel
@pytest.mark.parametrize("arrived", [True, False])
def test_broken_by_a_peer(arrived: bool, kernel: str) -> None:
    """Data that are there may have been overwritten by the peer that gave up; else the record has who did not send."""
    ranks = ranks_of(kernel, 3)
    for rank in ranks[: 3 if arrived else 2]:
        send(kernel, rank)
    ranks[0].word(ranks[0].layout.broken, 3)[1] = 1 | 1 << 8
    out = receive(kernel, ranks[0])
    assert out.isnan().all() if arrived else is_poisoned(kernel, out)
    flags, bad = ([flag(1)] * 3, [0, 1, 0]) if arrived else ([flag(1), flag(1), 0], [0, 0, 1])
    assert ranks[0].record.tolist() == record(3 if arrived else 1, 1, 0, flags, bad)


@by_kernel
def test_a_peer_that_failed_later_has_completed_this_round(kernel: str) -> None:
    ranks = ranks_of(kernel, 2)
    for rank in ranks:
        send(kernel, rank)
    ranks[0].word(ranks[0].layout.broken, 2)[1] = 1 | 2 << 8
    assert (receive(kernel, ranks[0]) == OF_ONES[kernel]).all()
    ranks[0].assert_idle(1)


@gathers
def test_a_kernel_that_does_not_end_the_round_counts_nothing(kernel: str) -> None:
    """It counts nothing even if it fails. The kernel that ends the round finds the failure, and does not wait again."""
    ranks = ranks_of(kernel, 2, timeout_s=0.2)
    send(kernel, ranks[0])
    assert receive(kernel, ranks[0], end_round=False).isnan().all()
    ranks[0].assert_idle(0, failed=True)
    ranks[0].word(ranks[0].layout.timeout)[0] = int(60e9)
    start, first = time.monotonic(), ranks[0].record.tolist()
    assert receive(kernel, ranks[0]).isnan().all()
    assert time.monotonic() - start < 10 and ranks[0].record.tolist() == first
    ranks[0].assert_idle(1, failed=True)


def test_a_peer_that_left_is_the_cause_of_what_is_missing() -> None:
    ranks = ranks_of("unpack", 3)
    send("unpack", ranks[0])
    ranks[0].word(ranks[0].layout.broken, 3)[1] = 4 | 1 << 8
    assert is_poisoned("unpack", receive("unpack", ranks[0]))
    assert ranks[0].record.tolist() == record(3, 1, 0, [flag(1), 0, 0], [0, 1, 0])


def test_nobody_is_to_blame_for_a_flag_that_comes_with_the_deadline() -> None:
    """The wait is over, and the flag arrives before the judgement: the rank must not name itself."""
    ranks = ranks_of("unpack", 2)
    for rank in ranks:
        send("unpack", rank)
    ranks[0].word(ranks[0].layout.broken, 2)[0] = 1  # as poll_broken leaves it
    assert receive("unpack", ranks[0]).isnan().all()
    assert ranks[0].record.tolist() == record(3, 1, 0, [flag(1), flag(1)], [0, 0])


@pytest.mark.parametrize("kernel", ["unpack", "finish"])
def test_bytes_become_what_is_no_number(kernel: str) -> None:
    """Rows of float8 and their scales are gathered as bytes."""
    exchange = payloads.all_gather((1, 16), 0, 2)
    (spans,), rank = exchange.rounds(16), virtual_ranks(2, 64, timeout_s=0.1)[0]
    out = torch.zeros(2, 16, dtype=torch.uint8)
    if kernel == "unpack":
        launch_now.unpack(out, spans, rank, FINGERPRINT)
    else:
        launch_now.finish(out, rank, FINGERPRINT, end_round=True)
    assert all(out.view(dtype).float().isnan().all() for dtype in (*VALUES, torch.float32))
