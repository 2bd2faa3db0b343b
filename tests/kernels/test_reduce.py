"""The kernels that add up or norm what has come, behind those that send, in the Triton interpreter: virtual ranks."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusedcomm.bench import launch_now
from fusedcomm.plan.geometry import norm, shapes
from tests.helpers import virtual_ranks as virtual
from tests.helpers.problems import Problem

_scatter = partial(Problem, op="matmul_reduce_scatter")
CASES = virtual.by_name(  # at sizes that no tile divides
    [
        _scatter("rows", (37, 29), 50, scatter_dim=0, bias=True),
        _scatter("columns", (37, 29), 50, scatter_dim=1, bias=True),
        _scatter("one row", (1, 29), 8, scatter_dim=1),
        _scatter("interleaved rows", (3, 7, 13), 11, scatter_dim=1, bias=True),
        _scatter("batched, columns", (3, 21, 17), 10, scatter_dim=2, batched=True, bias=True),
        _scatter("batched, batches", (2, 9, 17), 10, scatter_dim=0, batched=True, bias=True),
        _scatter("average", (41, 13), 50, scatter_dim=0, reduce_op="avg"),
        _scatter("average, bias", (41, 13), 50, scatter_dim=1, reduce_op="avg", bias=True),
        _scatter("average, partial bias", (41, 13), 50, scatter_dim=1, reduce_op="avg", bias=True, partial=True),
        _scatter("no rows", (0, 8), 4, scatter_dim=1),
        _scatter("no depth", (3, 2, 0), 5, scatter_dim=0, bias=True),
        _scatter("no columns", (4, 8), 0, scatter_dim=0, bias=True),
    ]
)
ON_THREE = ["rows", "columns", "batched, batches", "average, bias", "average, partial bias", "no rows"]


@pytest.mark.parametrize(("group_size", "name"), virtual.sizes_and_names(CASES, ON_THREE))
def test_every_shape(group_size: int, name: str) -> None:
    virtual.check_calls(CASES[name], group_size)


@pytest.mark.parametrize("name", ["rows", "interleaved rows", "average, bias"])
def test_rounds_cut_a_call(name: str) -> None:
    """A part of a chunk starts with a whole row, so that the bias fits. Two calls use each slot again."""
    virtual.check_calls(CASES[name], 2, num_rounds=3, num_calls=2)


@pytest.mark.parametrize(("cut", "shape", "num_rounds"), [("columns", (37, 29), 1), ("rows", (111, 29), 3)])
def test_a_reduced_chunk_is_gathered(cut: str, shape: tuple[int, ...], num_rounds: int) -> None:
    """The two rounds of an all_reduce: the second one sends what the first one has added."""
    virtual.check_calls(Problem(cut, shape, 150, op="matmul_all_reduce"), 3, num_rounds=num_rounds)


def reduced(
    partials: list[float], dtype: torch.dtype, scale: float = 1.0, bias: float | None = None
) -> list[list[float]]:
    """What every rank makes of one number per rank, repeated in 5 columns."""
    group_size = len(partials)
    exchange = shapes.matmul_reduce_scatter((group_size, 1), (1, 5), "sum", 0, group_size)
    (spans,) = exchange.rounds(1 << 40)
    ranks = virtual.virtual_ranks(group_size, group_size * exchange.chunk_numel * dtype.itemsize)
    for rank, value in zip(ranks, partials, strict=True):
        x, w = torch.full((group_size, 1), value, dtype=dtype), torch.ones(1, 5, dtype=dtype)
        launch_now.push(x, w, None, spans, rank, virtual.FINGERPRINT)
    results = []
    for rank in ranks:
        out = torch.full((1, 5), math.nan, dtype=dtype)
        vector = None if bias is None else torch.full((5,), bias, dtype=dtype)
        launch_now.reduce(out, spans, vector, scale, rank, virtual.FINGERPRINT)
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


EPS = 1e-5
RTOL = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def check_normed(normed: Tensor, out: Tensor, weight: Tensor | None) -> None:
    want = F.rms_norm(out.double(), out.shape[-1:], None if weight is None else weight.double(), EPS)
    torch.testing.assert_close(normed.double(), want, rtol=RTOL[out.dtype], atol=0)


@pytest.mark.parametrize(
    ("group_size", "shape", "given", "dtype"),  # a block of the interpreter has 64 columns
    [
        (2, (5, 97), "bias, weight", torch.float32),
        (4, (2, 3, 64), "weight", torch.bfloat16),
        (4, (3, 7), "bias", torch.float16),
        (3, (130,), "", torch.bfloat16),
        (2, (2, 1), "bias, weight", torch.float32),
        (2, (0, 8), "", torch.float32),
        (2, (4, 0), "", torch.float32),
    ],
)
@pytest.mark.parametrize("num_rounds", [1, 2])
def test_sums_are_exact_and_normed(
    group_size: int, shape: tuple[int, ...], given: str, dtype: torch.dtype, num_rounds: int
) -> None:
    n, numel = shape[-1], math.prod(shape)
    terms = [integers(*shape, seed=rank) for rank in range(group_size)]
    residual, bias, weight = integers(*shape, seed=8).to(dtype), integers(n, seed=9).to(dtype), integers(n, seed=10)
    weight = weight.to(dtype)
    chunk_numel = max(n, numel // num_rounds // max(n, 1) * n, 1)
    rounds = norm.one_shot(shape, 0, EPS, group_size).rounds(chunk_numel)
    ranks = virtual.virtual_ranks(group_size, group_size * chunk_numel * dtype.itemsize)
    results = [(virtual.guarded([*shape], dtype), virtual.guarded([*shape], dtype)) for _ in ranks]
    for spans in rounds:
        for rank, term in zip(ranks, terms, strict=True):
            launch_now.pack(term.to(dtype), spans, rank, virtual.FINGERPRINT)
        for rank, ((normed, _), (out, _)) in zip(ranks, results, strict=True):
            vectors = weight if "weight" in given else None, bias if "bias" in given else None
            launch_now.reduce_norm(normed, out, residual, *vectors, spans, EPS, rank, virtual.FINGERPRINT)
    total = sum(terms, residual.double()) + (bias if "bias" in given else 0)
    for rank, ((normed, around), (out, around_out)) in zip(ranks, results, strict=True):
        assert torch.equal(out, total.to(dtype)) and torch.equal(normed, results[0][0][0])
        check_normed(normed, out, weight if "weight" in given else None)
        assert all(guard.isnan().all() for guard in (*around, *around_out))
        rank.assert_idle(len(rounds))


@pytest.mark.parametrize("group_size", range(1, 5))
def test_rows_are_normed_as_they_come(group_size: int) -> None:
    """They have the bits of rows that are there. ``own``: this rank's lie in its slot, else in the result."""
    own, n, rows = group_size % 2 == 1, 97 if group_size % 3 else 64, 3  # of a round; all 5 or 10 in several
    exchange = norm.two_shot((2, 5 * group_size, 4), (2, 4, n), EPS, group_size)
    sums, weight = torch.randn(exchange.out_shape).bfloat16(), integers(n).bfloat16()
    ranks, rounds = virtual.virtual_ranks(group_size, group_size * rows * n * 2), exchange.rounds(rows * n)
    results = [[virtual.guarded([*sums.shape], sums.dtype) for _ in range(2)] for _ in ranks]
    for spans in rounds:
        for rank, block in zip(ranks, sums.chunk(group_size, exchange.split_dim), strict=True):
            launch_now.pack(block.contiguous(), spans, rank, virtual.FINGERPRINT, own=own)
        for rank, ((normed, _), (out, _)) in zip(ranks, results, strict=True):
            if not own:
                place, mine = (spans.unpack.view(t.view(-1), 0, rank.rank) for t in (out, sums))
                place.copy_(mine)
            virtual.unpack_and_norm(normed, out, weight, spans, rank, virtual.FINGERPRINT, own)
    there = torch.full_like(sums, math.nan)
    launch_now.norm(there, sums, weight, EPS, ranks[0])
    check_normed(there, sums, weight)
    for rank, given in zip(ranks, results, strict=True):
        virtual.assert_results(given, [there, sums])
        rank.assert_idle(len(rounds))


def test_the_norm_reads_the_rounded_sum() -> None:
    x, ranks = (
        torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16(),
        virtual.virtual_ranks(2, 256),
    )
    (spans,) = norm.one_shot((1, 64), 0, EPS, 2).rounds(64)
    for rank in ranks:
        launch_now.pack(x[rank.rank], spans, rank, virtual.FINGERPRINT)
    normed, out = torch.full_like(x, math.nan).unbind()
    launch_now.reduce_norm(normed, out, torch.zeros_like(out), None, None, spans, EPS, ranks[0], virtual.FINGERPRINT)
    unrounded = x.float().sum(0)
    assert torch.equal(out, unrounded.bfloat16())
    assert torch.equal(normed, F.rms_norm(out.float(), (64,), None, EPS).bfloat16())
    assert not torch.equal(normed, F.rms_norm(unrounded, (64,), None, EPS).bfloat16())
