"""reduce_norm_kernel behind pack_kernel, and norm_kernel, in the Triton interpreter: virtual ranks in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusedcomm.plan.geometry import norm
from fusedcomm.testing import launch_now
from tests.helpers.virtual_ranks import FINGERPRINT, guarded, virtual_ranks

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
    ranks = virtual_ranks(group_size, group_size * chunk_numel * dtype.itemsize)
    results = [(guarded([*shape], dtype), guarded([*shape], dtype)) for _ in ranks]
    for spans in rounds:
        for rank, term in zip(ranks, terms, strict=True):
            launch_now.pack(term.to(dtype), spans, rank, FINGERPRINT)
        for rank, ((normed, _), (out, _)) in zip(ranks, results, strict=True):
            vectors = weight if "weight" in given else None, bias if "bias" in given else None
            launch_now.reduce_norm(normed, out, residual, *vectors, spans, EPS, rank, FINGERPRINT)
    total = sum(terms, residual.double()) + (bias if "bias" in given else 0)
    for rank, ((normed, around), (out, around_out)) in zip(ranks, results, strict=True):
        assert torch.equal(out, total.to(dtype)) and torch.equal(normed, results[0][0][0])
        check_normed(normed, out, weight if "weight" in given else None)
        assert all(guard.isnan().all() for guard in (*around, *around_out))
        rank.assert_idle(len(rounds))


@pytest.mark.parametrize("n", [64, 97])
def test_sums_that_are_there_are_normed(n: int) -> None:
    (rank, _), (normed, around), x = virtual_ranks(2, 8), guarded([5, n], torch.float32), integers(5, n)
    for weight in (None, integers(n).float()):
        launch_now.norm(normed, x.float(), weight, EPS, rank)
        check_normed(normed, x.float(), weight)
    assert all(guard.isnan().all() for guard in around)


def test_the_norm_reads_the_rounded_sum() -> None:
    x, ranks = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16(), virtual_ranks(2, 256)
    (spans,) = norm.one_shot((1, 64), 0, EPS, 2).rounds(64)
    for rank in ranks:
        launch_now.pack(x[rank.rank], spans, rank, FINGERPRINT)
    normed, out = torch.full_like(x, math.nan).unbind()
    launch_now.reduce_norm(normed, out, torch.zeros_like(out), None, None, spans, EPS, ranks[0], FINGERPRINT)
    unrounded = x.float().sum(0)
    assert torch.equal(out, unrounded.bfloat16())
    assert torch.equal(normed, F.rms_norm(out.float(), (64,), None, EPS).bfloat16())
    assert not torch.equal(normed, F.rms_norm(unrounded, (64,), None, EPS).bfloat16())
