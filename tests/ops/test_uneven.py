"""Lengths and heads that the ranks do not divide, parts of given sizes, and parts that several ranks get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from tests.helpers.groups import empty_is_nan
from tests.helpers.uneven import Uneven

A2A, BACK = "matmul_all_to_all", "all_to_all_matmul"
GATHER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter"
CALLS = 4  # from the third on prepared calls run, in both slots


def into_attention(tokens: int, heads: int, **options: Any) -> Uneven:
    return Uneven(A2A, (2, tokens, heads, 3), num_columns=2, gather_dim=1, scatter_dim=-2, **options)


def out_of_attention(tokens: int, heads: int, **options: Any) -> Uneven:
    return Uneven(BACK, (2, tokens, heads, 3), num_columns=2, gather_dim=-2, scatter_dim=1, **options)


def replicas(num_ranks: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Rank r reads one of few heads."""
    return tuple((rank * heads // num_ranks, 1) for rank in range(num_ranks))


CASES: dict[str, tuple[int, Uneven]] = {
    **{f"tokens-{2 * size + rest}-of-{size}": (size, into_attention(2 * size + rest, size)) for size in (2, 3, 4, 5)
       for rest in range(size)},
    **{f"back-{2 * size + rest}-of-{size}": (size, out_of_attention(2 * size + rest, size + rest))
       for size in (2, 3, 4, 5) for rest in range(size)},
    "heads-7-of-4": (4, into_attention(9, 7, bias=True)),
    "heads-7-of-4-balanced": (4, into_attention(9, 7, scatter=(2, 2, 2, 1))),
    "heads-1-of-3": (3, into_attention(1, 1)),
    "splits-with-none": (3, into_attention(8, 5, gather=(0, 6, 2), scatter=(4, 0, 1), bias=True)),
    "kv-1-of-4": (4, into_attention(10, 1, scatter=replicas(4, 1), bias=True)),
    "kv-2-of-4": (4, into_attention(10, 2, scatter=replicas(4, 2))),
    "kv-straddles": (4, into_attention(6, 3, scatter=((0, 1), (0, 2), (1, 2), (2, 1)))),
    "kv-with-a-gap": (2, into_attention(5, 4, scatter=((0, 1), (3, 1)))),
    "kv-packed": (4, Uneven(A2A, (2, 10, 2, 2, 3), 3, gather_dim=1, scatter_dim=3, scatter=replicas(4, 2))),
    "qkv-packed": (3, Uneven(A2A, (2, 10, 3, 4, 3), 3, gather_dim=1, scatter_dim=3, bias=True)),
    "gathers-columns": (3, Uneven(A2A, (7, 8), gather_dim=1, scatter_dim=0, gather=(1, 5, 2))),
    "batched-w": (2, Uneven(A2A, (2, 5, 7), gather_dim=1, scatter_dim=2, batched=True)),
    "batched-by-batch": (2, Uneven(A2A, (5, 3, 7), gather_dim=2, scatter_dim=0, batched=True)),
    "many-rows": (2, Uneven(A2A, (601, 7), gather_dim=0, scatter_dim=1)),
    "many-rows-long-runs": (2, Uneven(A2A, (601, 2, 5), gather_dim=0, scatter_dim=1)),
    "back-splits": (3, out_of_attention(8, 5, gather=(1, 0, 4), scatter=(6, 0, 2), bias=True)),
    "back-ranges": (2, out_of_attention(7, 3, scatter=((0, 4), (3, 4)))),
    "back-long-runs": (2, Uneven(BACK, (9, 3, 130), 2, gather_dim=1, scatter_dim=0)),
    "back-rows": (3, Uneven(BACK, (8, 7), 1, gather_dim=0, scatter_dim=1)),
    "gather-rows": (3, Uneven(GATHER, (7, 4), 1, gather_dim=0, bias=True)),
    "gather-splits": (4, Uneven(GATHER, (2, 9, 4), 1, gather_dim=1, gather=(3, 0, 5, 1))),
    "gather-many-rows": (2, Uneven(GATHER, (533, 4), 1, gather_dim=0)),
    "gather-k": (3, Uneven(GATHER, (4, 11), 1, gather_dim=1)),
    "gather-long-k": (2, Uneven(GATHER, (4, 401), 1, gather_dim=1)),
    "reduce-rows": (3, Uneven(REDUCE, (7, 4), 1, scatter_dim=0, bias=True)),
    "reduce-splits": (4, Uneven(REDUCE, (2, 9, 4), 1, scatter_dim=1, scatter=(3, 0, 5, 1))),
    "reduce-columns": (3, Uneven(REDUCE, (4, 11), 1, scatter_dim=1, bias=True)),
    "reduce-ranges": (2, Uneven(REDUCE, (7, 4), 1, scatter_dim=0, scatter=((0, 5), (2, 5)))),
    "reduce-nothing": (3, Uneven(REDUCE, (2, 4), 1, scatter_dim=0)),
}  # fmt: skip


def results(case: Uneven, rank: int, num_ranks: int, seed: int) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """This rank's result and gradients: of the op, and of the whole group's program."""
    inputs = case.inputs(num_ranks, seed)
    whole = [tuple(None if t is None else t.double().requires_grad_() for t in each) for each in inputs]
    wanted = case.expected(whole)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed + 1)
    grads = [torch.randint(-3, 4, out.shape, generator=generator) for out in wanted]
    torch.autograd.backward(wanted, [grad.double() for grad in grads])
    own = tuple(None if t is None else t.requires_grad_() for t in inputs[rank])
    with empty_is_nan():
        out = case.call(own, dist.group.WORLD, num_ranks)  # type: ignore[arg-type]
        out.backward(grads[rank].to(out.dtype))
    found = [out.detach(), *(None if t is None else t.grad for t in own)]
    return found, [wanted[rank].detach(), *(None if t is None else t.grad for t in whole[rank])]


def check_case(rank: int, case: Uneven, num_ranks: int, algorithm: str, calls: int = CALLS) -> None:
    with fusedcomm.force_algorithm(algorithm, strict=True):
        for seed in range(calls):
            for found, wanted in zip(*results(case, rank, num_ranks, seed), strict=True):
                if found is not None or wanted is not None:
                    assert found is not None and wanted is not None
                    assert found.shape == wanted.shape and torch.equal(found.double(), wanted), (seed, found, wanted)


@pytest.mark.parametrize("algorithm", ["unfused", "chunked"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(ranks: Any, name: str, algorithm: str) -> None:
    num_ranks, case = CASES[name]
    ranks(num_ranks).run(check_case, case, num_ranks, algorithm)
