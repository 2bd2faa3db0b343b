"""pack_kernel, gather_matmul_kernel and the kernels of host-driven gathers in the Triton interpreter.

Indices, masks, layouts, ragged sizes, epochs and what a failed wait leaves behind. Order of memory
operations on a GPU is for test_compile_only.py.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.helpers.tiers import thorough_but

pytest.importorskip("triton")

from fusedcomm.algorithms import kernel_launch, tiles
from fusedcomm.algorithms.chunk_matmul import GatheredMatmul
from fusedcomm.algorithms.tiles import TileConfig
from fusedcomm.geometry import shapes
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.runtime import signals
from tests.helpers.virtual_ranks import (
    FINGERPRINT,
    VirtualRank,
    assert_results,
    flag,
    guarded,
    record,
    sizes_and_names,
    virtual_ranks,
)

Inputs = tuple[Tensor, list[Tensor], list[Tensor | None]]


@dataclass(frozen=True)
class Case:
    """Each rank's x is exchanged (without scatter_dim: gathered), its last k_dims flattened to K, times each w.

    ``batched``: w has all leading dims but the last.
    """

    shape: tuple[int, ...]
    gather_dim: int
    scatter_dim: int | None = None
    ns: tuple[int, ...] = (11,)
    k_dims: int = 1
    batched: bool = False
    transposed: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.float32
    max_chunk_numel: int = 1 << 40

    def exchanged_shape(self, group_size: int) -> list[int]:
        shape = list(self.shape)
        shape[self.gather_dim] *= group_size
        if self.scatter_dim is not None:
            shape[self.scatter_dim] //= group_size
        return shape

    def w_shapes(self, group_size: int) -> list[tuple[int, ...]]:
        shape = self.exchanged_shape(group_size)
        batches = shape[: -self.k_dims - 1] if self.batched else []
        return [(*batches, math.prod(shape[-self.k_dims :]), n) for n in self.ns]

    def inputs(self, seed: int, group_size: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape, generator=generator).to(self.dtype)

        ws = [integers(*shape) for shape in self.w_shapes(group_size)]
        if self.transposed:
            ws = [w.mT.contiguous().mT for w in ws]
        return integers(*self.shape), ws, [integers(n) if self.bias else None for n in self.ns]

    def exchange(self, group_size: int) -> Exchange:
        ws = self.w_shapes(group_size)
        if self.scatter_dim is None:
            return shapes.all_gather_matmul(self.shape, ws, self.gather_dim, group_size)
        return shapes.all_to_all_matmul(self.shape, ws[0], self.gather_dim, self.scatter_dim, group_size)


def oracle(case: Case, inputs: list[Inputs]) -> list[tuple[list[Tensor], Tensor]]:
    """Every rank's results and exchanged x, from integers small enough that only the one rounding is left."""
    results = []
    for rank, (_, ws, biases) in enumerate(inputs):
        xs = [x for x, _, _ in inputs]
        if case.scatter_dim is not None:
            xs = [x.chunk(len(inputs), case.scatter_dim)[rank] for x in xs]
        exchanged = torch.cat(xs, case.gather_dim)
        x = exchanged.flatten(-case.k_dims).double()
        ys = [x @ w.double() + (0 if b is None else b.double()) for w, b in zip(ws, biases, strict=True)]
        results.append(([y.to(case.dtype) for y in ys], exchanged))
    return results


def gather_ranks(exchange: Exchange, itemsize: int, max_chunk_numel: int = 1 << 40) -> list[VirtualRank]:
    chunk_numel = min(exchange.chunk_numel, max_chunk_numel)
    return virtual_ranks(exchange.group_size, exchange.group_size * chunk_numel * itemsize)


def run(case: Case, group_size: int, calls: int = 1, by_product: bool = False, own: bool = True) -> None:
    """Without ``own``, which rows alone can do, each rank multiplies its own chunk where it lies in x."""
    exchange = case.exchange(group_size)
    ranks = gather_ranks(exchange, case.dtype.itemsize, case.max_chunk_numel)
    num_rounds = 0
    for call in range(calls):
        inputs = [case.inputs(100 * call + rank, group_size) for rank in range(group_size)]
        outs = [[guarded(shape, case.dtype) for shape in exchange.out_shapes] for _ in ranks]
        exchanged = [guarded(exchange.shape, case.dtype) for _ in ranks]
        for spans in exchange.rounds(case.max_chunk_numel):
            for rank, (x, _, _) in zip(ranks, inputs, strict=True):
                kernel_launch.pack(x, spans, rank, FINGERPRINT, own=own)
            for rank, (x, ws, biases), results, (copy, _) in zip(ranks, inputs, outs, exchanged, strict=True):
                chunk = spans.pack.view(x.view(-1), 0, rank.rank)
                for i, ((out, _), w, bias) in enumerate(zip(results, ws, biases, strict=True)):
                    last = i == len(ws) - 1 and not by_product
                    if not own:
                        GatheredMatmul(out, w, bias, exchange).chunk(spans, rank.rank, chunk)
                    kernel_launch.gather_matmul(out, w, bias, spans, rank, FINGERPRINT, end_round=last, own=own)
                    assert rank.epoch == num_rounds + last
                if by_product:
                    kernel_launch.unpack(copy, spans, rank, FINGERPRINT)
            num_rounds += 1
        expected = oracle(case, inputs)
        for results, (ys, _) in zip(outs, expected, strict=True):
            assert_results(results, ys)
        if by_product:
            assert_results(exchanged, [copy for _, copy in expected])
    for rank in ranks:
        rank.assert_idle(num_rounds)


def cases(r: int) -> dict[str, Case]:
    """Every Span shape, at sizes that no tile divides; dims to scatter are multiples of r."""
    return {
        "rows": Case((37, 29), 0, ns=(50,)),
        "one row each": Case((1, 5), 0),
        "wide rows": Case((9, 13), 0, ns=(135,), bias=True),
        "rows, K scattered": Case((11, 13 * r), 0, 1, bias=True),
        "interleaved rows": Case((3, 7, 13), 1),
        "interleaved rows, long runs": Case((2, 67, 13), 1, bias=True),
        "outer rows": Case((3, 7, 13), 0),
        "tokens of heads": Case((2, 5, 3 * r, 4), 1, 2, k_dims=2),
        "tokens, 5-D": Case((2, 3, 4, 2 * r, 5), 1, 3, k_dims=2, bias=True),
        "batched, rows": Case((3, 5, 17), 1, batched=True),
        "batched, batches": Case((2, 9, 17), 0, batched=True, bias=True),
        "batched, inner batches": Case((3, 2, 9, 17), 1, batched=True, transposed=True),
        "batched, outer batches": Case((2, 3, 9 * r, 17), 0, 2, batched=True),
        "batched, last K dim": Case((3, 21, 17), 2, batched=True),
        "last K dim": Case((37, 29), 1, ns=(50,), bias=True),
        "deep": Case((5, 130), 1, ns=(70,)),
        "heads": Case((2, 19 * r, 7, 5), 2, 1, k_dims=2, bias=True),
        "head dim": Case((9 * r, 6, 4), 2, 0, k_dims=2, transposed=True),
        "heads of packed qkv": Case((5 * r, 3, 2, 9), 2, 0, k_dims=3),
        "packed qkv, long runs": Case((5 * r, 2, 60), 2, 0, k_dims=2, ns=(70,), bias=True),
        "packed qkv, even runs": Case((5 * r, 2, 64), 2, 0, k_dims=2, transposed=True),
        "no rows": Case((0, 8), 0),
        "no rows, K gathered": Case((0, 8), 1, bias=True),
        "no depth": Case((3, 0), 0, bias=True),
        "no depth, K gathered": Case((3, 0), 1),
        "no columns": Case((4, 8), 0, ns=(0,)),
    }


ON_ALL_SIZES = ["rows", "rows, K scattered", "interleaved rows", "batched, batches", "last K dim", "heads", "no rows"]


@pytest.mark.parametrize(("group_size", "name"), sizes_and_names(cases(1), ON_ALL_SIZES))
def test_every_span_shape(group_size: int, name: str) -> None:
    run(cases(group_size)[name], group_size)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["wide rows", "batched, batches", "heads", "packed qkv, long runs", "last K dim"])
def test_half_precision_rounds_once(dtype: torch.dtype, name: str) -> None:
    """There is one rounding over all of K, whichever sources it comes from.

    This is also the test that fails with the interpreter's own bf16 dot.
    """
    run(dataclasses.replace(cases(3)[name], dtype=dtype), 3)


@pytest.mark.parametrize(
    "name",
    thorough_but(
        ["rows", "last K dim"],
        ["rows", "interleaved rows", "tokens of heads", "batched, batches", "heads", "head dim", "last K dim"],
    ),
)
def test_rounds_cut_a_call(name: str) -> None:
    case = cases(2)[name]
    part = case.exchange(2).chunk_numel // 3
    assert len(case.exchange(2).rounds(part)) >= 3
    run(dataclasses.replace(case, max_chunk_numel=part), 2, by_product=True)


@pytest.mark.thorough
@pytest.mark.parametrize(("group_size", "name"), [(2, "heads"), (3, "tokens, 5-D")])
def test_calls_back_to_back_with_fresh_data(group_size: int, name: str) -> None:
    run(cases(group_size)[name], group_size, calls=7)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "by_product"),
    [
        ("interleaved rows", False),
        ("interleaved rows", True),
        ("last K dim", False),
        ("last K dim", True),
        pytest.param("batched, rows", False, marks=pytest.mark.nightly),
        ("batched, rows", True),
        ("no rows", False),
        ("no rows", True),
    ],
)
def test_weights_share_one_gather(name: str, by_product: bool) -> None:
    """Only the last kernel of a round ends it, be that a matmul or the copy of what was gathered."""
    run(dataclasses.replace(cases(3)[name], ns=(50, 11, 0)), 3, calls=2, by_product=by_product)


@pytest.mark.parametrize("name", ["rows", "heads of packed qkv", "batched, outer batches", "no depth"])
def test_what_was_exchanged_is_a_by_product(name: str) -> None:
    run(cases(2)[name], 2, by_product=True)


@pytest.mark.parametrize("gather_dim", [0, 1], ids=["rows", "K"])
def test_bfloat16_rounds_to_nearest_even(gather_dim: int) -> None:
    """All of K comes before the rounding: 256 + 1 + 1 + 1 is 259, which lies half way between 258 and 260."""
    exchange = shapes.all_gather_matmul((4, 4 // (1 + gather_dim)), [(4, 3)], gather_dim, 2)
    (spans,) = exchange.rounds(1 << 40)
    ranks = gather_ranks(exchange, 2)
    w = torch.tensor([256, 1, 1, 1], dtype=torch.bfloat16)[:, None].expand(4, 3)
    for rank in ranks:
        kernel_launch.pack(torch.ones(4, 4 // (1 + gather_dim), dtype=torch.bfloat16), spans, rank, FINGERPRINT)
    for rank in ranks:
        for bias, expected in ((None, 260), (2, 260), (4, 264)):
            vector = None if bias is None else torch.full((3,), bias, dtype=torch.bfloat16)
            out = torch.full(exchange.out_shape, math.nan, dtype=torch.bfloat16)
            kernel_launch.gather_matmul(out, w, vector, spans, rank, FINGERPRINT, end_round=False)
            assert (out == expected).all()


def test_a_batch_of_w_does_not_reach_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """K is no multiple of BLOCK_K: behind K of one batch lies the next batch, which is infinite here."""
    monkeypatch.setattr(tiles, "matmul_config", lambda *args: TileConfig(16, 16, 16, 2, 4, 1))
    monkeypatch.setattr(tiles, "architecture", lambda device: 90)
    x, w = torch.ones(2, 16, 24), torch.ones(2, 24, 16)
    w[1] = math.inf
    exchange = shapes.all_gather_matmul(x.shape, [w.shape], 1, 1)
    (rank,) = gather_ranks(exchange, 4)
    (spans,) = exchange.rounds(1 << 40)
    out = torch.full(exchange.out_shape, math.nan)
    kernel_launch.pack(x, spans, rank, FINGERPRINT)
    kernel_launch.gather_matmul(out, w, None, spans, rank, FINGERPRINT, end_round=True)
    assert (out[0] == 24).all() and torch.isinf(out[1]).all()


def test_parts_of_k_add_up_in_one_order() -> None:
    """Own data come first, then those of rank - 1, in every tile: in the first one of a program, which waits, and in
    later ones.
    """
    exchange = shapes.all_gather_matmul((70, 1), [(3, 150)], 1, 3)
    (spans,) = exchange.rounds(1 << 40)
    ranks = gather_ranks(exchange, 4)
    for _ in range(2):
        for rank, value in zip(ranks, (1e8, 1.0, -1e8), strict=True):
            kernel_launch.pack(torch.full((70, 1), value), spans, rank, FINGERPRINT)
        for rank, expected in zip(ranks, (1, 0, 0), strict=True):  # 0: 1e8 - 1e8 + 1;  1: 1 + 1e8 - 1e8;  2: -1e8 + ..
            out = torch.full(exchange.out_shape, math.nan)
            kernel_launch.gather_matmul(out, torch.ones(3, 150), None, spans, rank, FINGERPRINT, end_round=True)
            assert (out == expected).all()


def simple(rank: VirtualRank, gather_dim: int) -> Exchange:
    """x (5, 8) gathered along gather_dim, times ones."""
    k = 8 * rank.group_size if gather_dim == 1 else 8
    return shapes.all_gather_matmul((5, 8), [(k, 24)], gather_dim, rank.group_size)


def pack(rank: VirtualRank, value: float, fingerprint: int = FINGERPRINT, own: bool = True) -> None:
    (spans,) = simple(rank, 0).rounds(1 << 40)
    kernel_launch.pack(torch.full((5, 8), float(value)), spans, rank, fingerprint, own=own)


def gather(
    rank: VirtualRank, gather_dim: int, fingerprint: int = FINGERPRINT, end_round: bool = True, own: bool = True
) -> Tensor:
    exchange = simple(rank, gather_dim)
    (spans,) = exchange.rounds(1 << 40)
    out = torch.zeros(exchange.out_shape)
    w = torch.ones(exchange.k, 24)
    kernel_launch.gather_matmul(out, w, None, spans, rank, fingerprint, end_round=end_round, own=own)
    return out


def simple_ranks(group_size: int, timeout_s: float = 60.0, num_slots: int = 2) -> list[VirtualRank]:
    ranks = virtual_ranks(group_size, group_size * 40 * 4, num_slots)
    for rank in ranks:
        rank.word(rank.layout.timeout)[0] = int(timeout_s * 1e9)
    return ranks


both_ways = pytest.mark.parametrize("gather_dim", [0, 1], ids=["rows", "K"])


@both_ways
@pytest.mark.parametrize("num_slots", [2, 1])
def test_a_peer_may_be_one_round_ahead(num_slots: int, gather_dim: int) -> None:
    """Two slots are enough; one is not (negative control)."""
    ranks = simple_ranks(2, timeout_s=0.2, num_slots=num_slots)
    for rank in ranks:
        pack(rank, 1)
    value = 8 if gather_dim == 0 else 16
    assert (gather(ranks[1], gather_dim) == value).all()
    pack(ranks[1], 2)
    assert bool((gather(ranks[0], gather_dim) == value).all()) == (num_slots == 2)


@both_ways
def test_time_out_names_who_is_missing(gather_dim: int) -> None:
    ranks = simple_ranks(3, timeout_s=0.2)
    pack(ranks[0], 1)
    pack(ranks[1], 1)
    start = time.monotonic()
    assert torch.isnan(gather(ranks[0], gather_dim)).all()
    assert 0.2 <= time.monotonic() - start < 10
    assert ranks[0].record.tolist() == record(1, 1, 0, [flag(1), flag(1), 0], [0, 0, 1])
    assert [rank.broken for rank in ranks] == [[1 | 1 << 8, 0, 0]] * 3
    ranks[0].assert_idle(1, failed=True)


@both_ways
def test_a_kernel_that_does_not_end_the_round_counts_nothing(gather_dim: int) -> None:
    """It counts nothing even if it fails. The kernel that ends the round finds the failure, and does not wait again."""
    ranks = simple_ranks(2, timeout_s=0.2)
    pack(ranks[0], 1)
    assert torch.isnan(gather(ranks[0], gather_dim, end_round=False)).all()
    ranks[0].assert_idle(0, failed=True)
    ranks[0].word(ranks[0].layout.timeout)[0] = int(60e9)
    start = time.monotonic()
    assert torch.isnan(gather(ranks[0], gather_dim)).all()
    assert time.monotonic() - start < 10
    ranks[0].assert_idle(1, failed=True)


@both_ways
def test_mismatch_is_found_on_both_sides(gather_dim: int) -> None:
    other = FINGERPRINT ^ 1
    ranks = simple_ranks(2)
    pack(ranks[0], 1)
    pack(ranks[1], 1, other)
    assert torch.isnan(gather(ranks[0], gather_dim)).all()
    assert ranks[0].record.tolist() == record(2, 1, 0, [flag(1), flag(1, other)], [0, 1])
    assert torch.isnan(gather(ranks[1], gather_dim, other)).all()
    assert ranks[1].record.tolist()[:4] == [2, 2, 1, 1]
    assert ranks[1].broken == [2 | 1 << 8, 2 | 1 << 8]


@both_ways
@pytest.mark.parametrize("arrived", [True, False])
def test_broken_by_a_peer(arrived: bool, gather_dim: int) -> None:
    """If all data are there, the peer that gave up may have overwritten them.

    If data are missing, the error names who did not send.
    """
    ranks = simple_ranks(3)
    for rank in ranks[: 3 if arrived else 2]:
        pack(rank, 1)
    ranks[0].word(ranks[0].layout.broken, 3)[1] = 1 | 1 << 8
    assert torch.isnan(gather(ranks[0], gather_dim)).all()
    flags, bad = ([flag(1)] * 3, [0, 1, 0]) if arrived else ([flag(1), flag(1), 0], [0, 0, 1])
    assert ranks[0].record.tolist() == record(3 if arrived else 1, 1, 0, flags, bad)


@both_ways
def test_a_peer_that_failed_later_has_completed_this_round(gather_dim: int) -> None:
    ranks = simple_ranks(2)
    for rank in ranks:
        pack(rank, 1)
    ranks[0].word(ranks[0].layout.broken, 2)[1] = 1 | 2 << 8
    assert not torch.isnan(gather(ranks[0], gather_dim)).any()
    ranks[0].assert_idle(1)


@pytest.mark.parametrize("end_round", [True, False])
def test_host_driven_reads(end_round: bool) -> None:
    """There is a wait_source before each read and a finish after the last: nothing is poisoned, and the round ends if
    asked.
    """
    ranks = simple_ranks(3)
    for epoch in (1, 2, 3):
        for rank in ranks:
            pack(rank, epoch)
        for rank in ranks:
            for src_rank in range(3):
                signals.wait_source(src_rank, rank, FINGERPRINT)
                start = rank.layout.slot(epoch, rank.slot_bytes) + src_rank * 160
                assert (rank.segment[start : start + 160].view(torch.float32) == epoch).all()
            assert rank.epoch == epoch - 1
            out = torch.full((5, 7), 3.0)
            signals.finish(out, rank, FINGERPRINT, end_round=end_round)
            assert (out == 3).all()
            if not end_round:
                signals.wait(rank, FINGERPRINT)
            rank.assert_idle(epoch)


@pytest.mark.parametrize("end_round", [True, False])
def test_host_driven_read_that_fails(end_round: bool) -> None:
    """wait_source gives up and returns; what was computed from the slot is poisoned."""
    ranks = simple_ranks(2, timeout_s=0.2)
    pack(ranks[0], 1)
    signals.wait_source(0, ranks[0], FINGERPRINT)
    start = time.monotonic()
    signals.wait_source(1, ranks[0], FINGERPRINT)
    assert 0.2 <= time.monotonic() - start < 10
    assert not ranks[0].record.any()
    ranks[0].word(ranks[0].layout.timeout)[0] = int(60e9)
    out, guards = guarded([3000], torch.bfloat16)
    out.fill_(3)
    guards[0].fill_(1)
    guards[1].fill_(1)
    signals.finish(out, ranks[0], FINGERPRINT, end_round=end_round)
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
