"""pack_kernel, gather_matmul_kernel and the kernels of host-driven gathers in the Triton interpreter.

Indices, masks, layouts, ragged sizes, epochs. Waits that fail: test_failed_waits.py. Order of memory
operations on a GPU is for test_compile_only.py.
"""

import contextlib
import dataclasses
import math
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedcomm.bench import launch_now
from fusedcomm.plan import launches, tiles
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.tiles import TileConfig
from tests.helpers.problems import Problem
from tests.helpers.virtual_ranks import (
    FINGERPRINT,
    VirtualRank,
    by_name,
    by_tma,
    check_calls,
    flag,
    guarded,
    record,
    sizes_and_names,
    virtual_ranks,
)

_gather = partial(Problem, op="all_gather_matmul")
_exchange = partial(Problem, op="all_to_all_matmul")
CASES = by_name(  # every Span shape, at sizes that no tile divides
    [
        _gather("rows", (37, 29), 50, 0),
        _gather("one row each", (1, 5), 11, 0),
        _gather("wide rows", (9, 13), 135, 0, bias=True),
        _exchange("rows, K scattered", (11, 13), 11, 0, 1, bias=True),
        _gather("interleaved rows", (3, 7, 13), 11, 1),
        _gather("interleaved rows, long runs", (2, 67, 13), 11, 1, bias=True),
        _gather("outer rows", (3, 7, 13), 11, 0),
        _exchange("tokens of heads", (2, 5, 3, 4), 11, 1, 2, k_dims=2),
        _exchange("tokens, 5-D", (2, 3, 4, 2, 5), 11, 1, 3, k_dims=2, bias=True),
        _gather("batched, rows", (3, 5, 17), 11, 1, batched=True),
        _gather("batched, batches", (2, 9, 17), 11, 0, batched=True, bias=True),
        _gather("batched, inner batches", (3, 2, 9, 17), 11, 1, batched=True, transposed=True),
        _exchange("batched, outer batches", (2, 3, 9, 17), 11, 0, 2, batched=True),
        _gather("batched, last K dim", (3, 21, 17), 11, 2, batched=True),
        _gather("last K dim", (37, 29), 50, 1, bias=True),
        _gather("deep", (5, 130), 70, 1),
        _exchange("heads", (2, 19, 7, 5), 11, 2, 1, k_dims=2, bias=True),
        _exchange("head dim", (9, 6, 4), 11, 2, 0, k_dims=2, transposed=True),
        _exchange("heads of packed qkv", (5, 3, 2, 9), 11, 2, 0, k_dims=3),
        _exchange("packed qkv, long runs", (5, 2, 60), 70, 2, 0, k_dims=2, bias=True),
        _exchange("packed qkv, even runs", (5, 2, 64), 11, 2, 0, k_dims=2, transposed=True),
        _gather("no rows", (0, 8), 11, 0),
        _gather("no rows, K gathered", (0, 8), 11, 1, bias=True),
        _gather("no depth", (3, 0), 11, 0, bias=True),
        _gather("no depth, K gathered", (3, 0), 11, 1),
        _gather("no columns", (4, 8), 0, 0),
    ]
)
ON_THREE = ["rows, K scattered", "interleaved rows", "batched, batches", "last K dim", "heads", "no rows"]


@pytest.mark.parametrize(("group_size", "name"), sizes_and_names(CASES, ON_THREE))
def test_every_span_shape(group_size: int, name: str) -> None:
    check_calls(CASES[name], group_size)


@pytest.mark.parametrize("name", ["rows", "batched, batches", "heads", "last K dim"])
def test_rounds_cut_a_call(name: str) -> None:
    check_calls(CASES[name], 2, num_rounds=3, by_product=True)


@pytest.mark.parametrize(("name", "by_product"), [("interleaved rows", True), ("last K dim", False)])
def test_weights_share_one_gather(name: str, by_product: bool) -> None:
    """Only the last kernel of a round ends it: the last matmul, or the copy of the gathered x. Slots are used again."""
    check_calls(dataclasses.replace(CASES[name], n=(50, 11, 0)), 2, num_calls=3, by_product=by_product)


@pytest.mark.parametrize("gather_dim", [0, 1], ids=["rows", "K"])
def test_bfloat16_rounds_to_nearest_even(gather_dim: int) -> None:
    """All of K comes before the rounding: 256 + 1 + 1 + 1 is 259, which lies half way between 258 and 260."""
    exchange = shapes.all_gather_matmul((4, 4 // (1 + gather_dim)), [(4, 3)], gather_dim, 2)
    (spans,) = exchange.rounds(1 << 40)
    ranks = virtual_ranks(2, 2 * exchange.chunk_numel * 2)
    w = torch.tensor([256, 1, 1, 1], dtype=torch.bfloat16)[:, None].expand(4, 3)
    for rank in ranks:
        launch_now.pack(torch.ones(4, 4 // (1 + gather_dim), dtype=torch.bfloat16), spans, rank, FINGERPRINT)
    for rank in ranks:
        for bias, expected in ((None, 260), (2, 260), (4, 264)):
            vector = None if bias is None else torch.full((3,), bias, dtype=torch.bfloat16)
            out = torch.full(exchange.out_shape, math.nan, dtype=torch.bfloat16)
            launch_now.gather_matmul(out, w, vector, spans, rank, FINGERPRINT, end_round=False)
            assert (out == expected).all()


def test_a_batch_of_w_does_not_reach_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """K is no multiple of BLOCK_K: behind K of one batch lies the next batch, which is infinite here."""
    monkeypatch.setattr(tiles, "matmul_config", lambda *args: TileConfig(16, 16, 16, 2, 4, 1))
    monkeypatch.setattr("tests.helpers.virtual_ranks.ARCHITECTURE", 90)
    x, w = torch.ones(2, 16, 24), torch.ones(2, 24, 16)
    w[1] = math.inf
    exchange = shapes.all_gather_matmul(x.shape, [w.shape], 1, 1)
    (rank,) = virtual_ranks(1, exchange.chunk_numel * 4)
    (spans,) = exchange.rounds(1 << 40)
    out = torch.full(exchange.out_shape, math.nan)
    launch_now.pack(x, spans, rank, FINGERPRINT)
    launch_now.gather_matmul(out, w, None, spans, rank, FINGERPRINT, end_round=True)
    assert (out[0] == 24).all() and torch.isinf(out[1]).all()


def test_parts_of_k_add_up_in_one_order() -> None:
    """Own data come first, then those of rank - 1, in every tile: a program's first, which waits, and later ones."""
    exchange = shapes.all_gather_matmul((70, 1), [(3, 150)], 1, 3)
    (spans,) = exchange.rounds(1 << 40)
    ranks = virtual_ranks(3, 3 * exchange.chunk_numel * 4)
    for _ in range(2):
        for rank, value in zip(ranks, (1e8, 1.0, -1e8), strict=True):
            launch_now.pack(torch.full((70, 1), value), spans, rank, FINGERPRINT)
        for rank, expected in zip(ranks, (1, 0, 0), strict=True):  # 0: 1e8 - 1e8 + 1;  1: 1 + 1e8 - 1e8;  2: -1e8 + ..
            out = torch.full(exchange.out_shape, math.nan)
            launch_now.gather_matmul(out, torch.ones(3, 150), None, spans, rank, FINGERPRINT, end_round=True)
            assert (out == expected).all()


def pack(rank: VirtualRank, value: float, own: bool = True) -> None:
    """An x [5, 8] that is gathered along its rows."""
    (spans,) = shapes.all_gather_matmul((5, 8), [(8, 24)], 0, rank.group_size).rounds(1 << 40)
    launch_now.pack(torch.full((5, 8), float(value)), spans, rank, FINGERPRINT, own=own)


def simple_ranks(group_size: int, **options: Any) -> list[VirtualRank]:
    return virtual_ranks(group_size, group_size * 40 * 4, **options)


@pytest.mark.parametrize("end_round", [True, False])
def test_host_driven_reads(end_round: bool) -> None:
    """With a wait_source before each read and a finish after the last nothing is poisoned; the round ends if asked."""
    ranks = simple_ranks(3)
    for epoch in (1, 2, 3):
        for rank in ranks:
            pack(rank, epoch)
        for rank in ranks:
            for src_rank in range(3):
                launch_now.wait_source(src_rank, rank, FINGERPRINT)
                start = rank.layout.slot(epoch, rank.slot_bytes) + src_rank * 160
                assert (rank.segment[start : start + 160].view(torch.float32) == epoch).all()
            assert rank.epoch == epoch - 1
            out = torch.full((5, 7), 3.0)
            launch_now.finish(out, rank, FINGERPRINT, end_round=end_round)
            assert (out == 3).all()
            if not end_round:
                launch_now.wait(rank, FINGERPRINT)
            rank.assert_idle(epoch)


@pytest.mark.parametrize("end_round", [True, False])
def test_host_driven_read_that_fails(end_round: bool) -> None:
    """wait_source gives up and returns; what was computed from the slot is poisoned."""
    ranks = simple_ranks(2, timeout_s=0.2)
    pack(ranks[0], 1)
    launch_now.wait_source(0, ranks[0], FINGERPRINT)
    start = time.monotonic()
    launch_now.wait_source(1, ranks[0], FINGERPRINT)
    assert 0.2 <= time.monotonic() - start < 10
    assert not ranks[0].record.any()
    ranks[0].word(ranks[0].layout.timeout)[0] = int(60e9)
    out, guards = guarded([3000], torch.bfloat16)
    out.fill_(3)
    guards[0].fill_(1)
    guards[1].fill_(1)
    launch_now.finish(out, ranks[0], FINGERPRINT, end_round=end_round)
    assert torch.isnan(out).all() and all((guard == 1).all() for guard in guards)
    assert ranks[0].record.tolist() == record(1, 1, 0, [flag(1), 0], [0, 1])
    ranks[0].assert_idle(int(end_round), failed=True)


@pytest.mark.parametrize("own", [True, False])
def test_pack_alone_signals_and_leaves_the_header(own: bool) -> None:
    ranks = simple_ranks(3)
    pack(ranks[1], 4, own=own)
    for rank in ranks:
        assert rank.word(rank.layout.flag(1, 0), 3).tolist() == [0, flag(1), 0]
        chunks = rank.segment[rank.layout.slot(1, rank.slot_bytes) :][: 3 * 160].view(torch.float32).view(3, 40)
        there = own or rank is not ranks[1]
        assert bool((chunks[1] == 4).all()) == there and bool(torch.isnan(chunks[1]).all()) != there
        assert torch.isnan(chunks[[0, 2]]).all()
        rank.assert_idle(0)


# this rank's own chunk is multiplied in x and only signalled
@pytest.mark.parametrize(
    ("group_size", "name"), [(1, "rows"), (3, "rows, K scattered"), (3, "interleaved rows"), (2, "batched, batches")]
)
def test_the_own_chunk_stays_in_x(group_size: int, name: str) -> None:
    check_calls(CASES[name], group_size, own=False)


def gather(rank: VirtualRank) -> Tensor:
    """Chunks that `pack` sends, times ones, in a result of zeros."""
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


# chunks and w by tensor descriptors
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


@pytest.mark.parametrize("name", BOXES)
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
