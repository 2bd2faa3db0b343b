"""reduce_kernel behind push_matmul_kernel in the Triton interpreter: virtual ranks in one process."""

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

from fusedcomm.algorithms import kernel_launch
from fusedcomm.geometry import shapes
from fusedcomm.geometry.exchange import Exchange
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


@dataclass(frozen=True)
class Case:
    """Each rank's x [*lead, k] @ w [k, n] (batched: [*lead[:-1], k, n]), summed over ranks, cut along scatter_dim."""

    lead: tuple[int, ...]
    k: int
    n: int
    scatter_dim: int
    batched: bool = False
    transposed: bool = False
    bias: bool = False
    reduce_op: str = "sum"
    dtype: torch.dtype = torch.float32
    max_chunk_numel: int = 1 << 40

    def operand_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (*self.lead, self.k), (*(self.lead[:-1] if self.batched else ()), self.k, self.n)

    def inputs(self, seed: int, group_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(seed)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape, generator=generator).to(self.dtype)

        x_shape, w_shape = self.operand_shapes()
        w = integers(*w_shape)
        if self.transposed:
            w = w.mT.contiguous().mT
        row = self.exchange(group_size).block[-1]
        return integers(*x_shape), w, integers(row) if self.bias else None

    def exchange(self, group_size: int) -> Exchange:
        return shapes.matmul_reduce_scatter(*self.operand_shapes(), self.reduce_op, self.scatter_dim, group_size)


def oracle(case: Case, inputs: list[tuple[Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
    """Every rank's result: partial sums in the dtype are added exactly, as integers, divided, and rounded once."""
    partials = [(x.double() @ w.double()).to(case.dtype).double() for x, w, _ in inputs]
    total = torch.stack(partials).sum(0)
    if case.reduce_op == "avg":
        total = (total / len(inputs)).float().double()
    blocks = total.chunk(len(inputs), case.scatter_dim)
    biases = [0 if bias is None else bias.double() for _, _, bias in inputs]
    return [(block + bias).float().to(case.dtype) for block, bias in zip(blocks, biases, strict=True)]


def reduce_ranks(exchange: Exchange, itemsize: int, max_chunk_numel: int = 1 << 40) -> list[VirtualRank]:
    chunk_numel = min(exchange.chunk_numel, max_chunk_numel)
    return virtual_ranks(exchange.group_size, exchange.group_size * chunk_numel * itemsize)


def run(case: Case, group_size: int, calls: int = 1) -> None:
    exchange = case.exchange(group_size)
    ranks = reduce_ranks(exchange, case.dtype.itemsize, case.max_chunk_numel)
    scale = 1 / group_size if case.reduce_op == "avg" else 1.0
    num_rounds = 0
    for call in range(calls):
        inputs = [case.inputs(100 * call + rank, group_size) for rank in range(group_size)]
        padded = [guarded(exchange.out_shape, case.dtype) for _ in ranks]
        for spans in exchange.rounds(case.max_chunk_numel):
            for rank, (x, w, _) in zip(ranks, inputs, strict=True):
                kernel_launch.push(x, w, None, spans, rank, FINGERPRINT)
            for rank, (_, _, bias), (out, _) in zip(ranks, inputs, padded, strict=True):
                kernel_launch.reduce(out, spans, bias, scale, rank, FINGERPRINT)
            num_rounds += 1
        assert_results(padded, oracle(case, inputs))
    for rank in ranks:
        rank.assert_idle(num_rounds)


def cases(r: int) -> dict[str, Case]:
    """Cases at sizes that no tile divides. Dims to scatter are multiples of r."""
    return {
        "rows": Case((37 * r,), 29, 50, 0, bias=True),
        "columns": Case((37,), 29, 50 * r, 1, bias=True),
        "one row": Case((1,), 29, 8 * r, 1),
        "one row each": Case((r,), 3, 5, 0, bias=True),
        "interleaved rows": Case((3, 7 * r), 13, 11, 1, bias=True),
        "outer rows": Case((3 * r, 7), 13, 11, 0),
        "columns, 3-D": Case((3, 41), 13, 10 * r, 2, transposed=True, bias=True),
        "batched, columns": Case((3, 21), 17, 10 * r, 2, batched=True, bias=True),
        "batched, rows": Case((3, 5 * r), 17, 10, 1, batched=True),
        "batched, batches": Case((2 * r, 9), 17, 10, 0, batched=True, bias=True),
        "average": Case((41 * r,), 13, 50, 0, reduce_op="avg"),
        "average, bias": Case((41,), 13, 50 * r, 1, reduce_op="avg", bias=True),
        "no rows": Case((0,), 8, 4 * r, 1),
        "no depth": Case((3 * r, 2), 0, 5, 0, bias=True),
        "no columns": Case((4 * r,), 8, 0, 0, bias=True),
    }


ON_ALL_SIZES = ["rows", "columns", "interleaved rows", "batched, batches", "average, bias", "no rows"]


@pytest.mark.parametrize(("group_size", "name"), sizes_and_names(cases(1), ON_ALL_SIZES))
def test_every_shape(group_size: int, name: str) -> None:
    run(cases(group_size)[name], group_size)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["rows", "columns", "batched, columns", "average, bias"])
def test_half_precision(dtype: torch.dtype, name: str) -> None:
    run(dataclasses.replace(cases(3)[name], dtype=dtype), 3)


@pytest.mark.parametrize(
    "name", thorough_but(["rows"], ["rows", "columns", "interleaved rows", "batched, batches", "average, bias"])
)
def test_rounds_cut_a_call(name: str) -> None:
    """A part of a chunk starts with a whole row, so that the bias fits."""
    case = cases(2)[name]
    part = case.exchange(2).chunk_numel // 3
    assert len(case.exchange(2).rounds(part)) >= 3
    run(dataclasses.replace(case, max_chunk_numel=part), 2)


@pytest.mark.thorough
@pytest.mark.parametrize("group_size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_calls_back_to_back_with_fresh_data(group_size: int) -> None:
    run(cases(group_size)["batched, columns"], group_size, calls=7)


@pytest.mark.thorough
@pytest.mark.parametrize("max_chunk_numel", [1 << 40, 700])
@pytest.mark.parametrize("name", ["rows", "columns", "batched, batches"])
def test_what_was_reduced_is_gathered(name: str, max_chunk_numel: int) -> None:
    """These are the two rounds of an all_reduce. The second one sends what the first one has added."""
    case, group_size = cases(3)[name], 3
    exchange = shapes.matmul_all_reduce(*case.operand_shapes(), "sum", group_size)
    ranks = reduce_ranks(exchange, 4, max_chunk_numel)
    inputs = [case.inputs(rank, group_size) for rank in range(group_size)]
    padded = [guarded(exchange.out_shape, case.dtype) for _ in ranks]
    blocks = [torch.full(exchange.block, math.nan) for _ in ranks]
    rounds = exchange.rounds(max_chunk_numel)
    for spans in rounds:
        for rank, (x, w, _) in zip(ranks, inputs, strict=True):
            kernel_launch.push(x, w, None, spans, rank, FINGERPRINT)
        for rank, block in zip(ranks, blocks, strict=True):
            kernel_launch.reduce(block, spans, None, 1.0, rank, FINGERPRINT)
        for rank, block in zip(ranks, blocks, strict=True):
            kernel_launch.pack(block, spans, rank, FINGERPRINT)
        for rank, (out, _) in zip(ranks, padded, strict=True):
            kernel_launch.unpack(out, spans, rank, FINGERPRINT)
    total = torch.stack([x.double() @ w.double() for x, w, _ in inputs]).sum(0).float()
    assert_results(padded, [total] * group_size)
    for rank in ranks:
        rank.assert_idle(2 * len(rounds))


def reduced(
    partials: list[float], dtype: torch.dtype, scale: float = 1.0, bias: float | None = None
) -> list[list[float]]:
    """What every rank makes of one number per rank, repeated in 5 columns."""
    group_size = len(partials)
    exchange = shapes.matmul_reduce_scatter((group_size, 1), (1, 5), "sum", 0, group_size)
    (spans,) = exchange.rounds(1 << 40)
    ranks = reduce_ranks(exchange, dtype.itemsize)
    for rank, partial in zip(ranks, partials, strict=True):
        x, w = torch.full((group_size, 1), partial, dtype=dtype), torch.ones(1, 5, dtype=dtype)
        kernel_launch.push(x, w, None, spans, rank, FINGERPRINT)
    results = []
    for rank in ranks:
        out = torch.full((1, 5), math.nan, dtype=dtype)
        vector = None if bias is None else torch.full((5,), bias, dtype=dtype)
        kernel_launch.reduce(out, spans, vector, scale, rank, FINGERPRINT)
        results.append(out[0].tolist())
    return results


@pytest.mark.parametrize(
    "partials, total",
    [((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0), ((1.0, 1e8, -1e8), 0.0), ((-1e8, 1e8, 1.0), 1.0)],
)
def test_every_rank_adds_in_rank_order(partials: tuple[float, ...], total: float) -> None:
    assert reduced(list(partials), torch.float32) == [[total] * 5] * 3


def test_the_sum_is_rounded_once() -> None:
    """bfloat16 has steps of 2 from 256 on, so 256 + 1, rounded each time, would stay 256 for ever."""
    assert reduced([256.0, 1.0, 1.0], torch.bfloat16) == [[258.0] * 5] * 3
    assert reduced([256.0, 1.0], torch.bfloat16, bias=1.0) == [[258.0] * 5] * 2
    assert reduced([256.0, 2.0, 2.0], torch.bfloat16, scale=1 / 3) == [[86.5] * 5] * 3  # 86.67


def test_the_average_is_a_division() -> None:
    """The average of whole numbers is exact where it is one: a product with 1 / 3 need not be."""
    for total in (3 * 16777213, 3 * 11184811):
        third = float(total // 3)
        assert reduced([third, third, third], torch.float32, scale=1 / 3) == [[third] * 5] * 3


CASE = Case((6,), 8, 24, 0)


def push(rank: VirtualRank, value: float, fingerprint: int = FINGERPRINT) -> None:
    (spans,) = CASE.exchange(rank.group_size).rounds(1 << 40)
    kernel_launch.push(torch.full((6, 8), float(value)), torch.ones(8, 24), None, spans, rank, fingerprint)


def reduce(rank: VirtualRank, fingerprint: int = FINGERPRINT) -> Tensor:
    exchange = CASE.exchange(rank.group_size)
    (spans,) = exchange.rounds(1 << 40)
    out = torch.zeros(exchange.out_shape)
    kernel_launch.reduce(out, spans, None, 1.0, rank, fingerprint)
    return out


def case_ranks(group_size: int, timeout_s: float = 60.0, num_slots: int = 2) -> list[VirtualRank]:
    ranks = virtual_ranks(group_size, group_size * CASE.exchange(group_size).chunk_numel * 4, num_slots)
    for rank in ranks:
        rank.word(rank.layout.timeout)[0] = int(timeout_s * 1e9)
    return ranks


@pytest.mark.parametrize("num_slots", [2, 1])
def test_a_peer_may_be_one_round_ahead(num_slots: int) -> None:
    """Two slots are enough; one is not (negative control)."""
    ranks = case_ranks(2, timeout_s=0.2, num_slots=num_slots)
    for rank in ranks:
        push(rank, 1)
    assert (reduce(ranks[1]) == 16).all()
    push(ranks[1], 2)
    assert bool((reduce(ranks[0]) == 16).all()) == (num_slots == 2)


def test_time_out_names_who_is_missing() -> None:
    ranks = case_ranks(3, timeout_s=0.2)
    push(ranks[0], 1)
    push(ranks[1], 1)
    start = time.monotonic()
    assert torch.isnan(reduce(ranks[0])).all()
    assert 0.2 <= time.monotonic() - start < 10
    assert ranks[0].record.tolist() == record(1, 1, 0, [flag(1), flag(1), 0], [0, 0, 1])
    assert [rank.broken for rank in ranks] == [[1 | 1 << 8, 0, 0]] * 3
    ranks[0].assert_idle(1, failed=True)


def test_mismatch_poisons() -> None:
    other = FINGERPRINT ^ 1
    ranks = case_ranks(2)
    push(ranks[0], 1)
    push(ranks[1], 1, other)
    assert torch.isnan(reduce(ranks[0])).all()
    assert ranks[0].record.tolist() == record(2, 1, 0, [flag(1), flag(1, other)], [0, 1])


def test_a_slot_that_was_given_up_poisons() -> None:
    ranks = case_ranks(3)
    for rank in ranks:
        push(rank, 1)
    ranks[0].word(ranks[0].layout.broken, 3)[1] = 1 | 1 << 8
    assert torch.isnan(reduce(ranks[0])).all()
    assert ranks[0].record.tolist() == record(3, 1, 0, [flag(1)] * 3, [0, 1, 0])
