"""All five ops over real processes: gradients of every combination, of frozen inputs, of inputs used twice; opcheck."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.algorithms import chunk_matmul
from fusedcomm.geometry import exchange
from tests.helpers.groups import ALGORITHMS, DTYPES, empty_is_nan, non_contiguous
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import (
    ALL_PROBLEMS,
    COMBINATIONS,
    NAMED,
    Combination,
    as_list,
    expected_gradients,
    loss_weights,
)
from tests.helpers.problems import GATHERS, OPS, Problem, expected, flat, integers, unflat
from tests.helpers.tiers import ALL_ALGORITHMS, thorough_but


def leaves(problem: Problem, rank: int, frozen: str = "", dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """x, the weights and the biases as leaves. ``frozen``: letters of x, w, b."""
    tensors = flat(integers(problem, rank, dist.get_world_size(), dtype))
    kinds = "x" + "w" * len(problem.ns) + "b" * len(problem.ns)
    return [
        t if t is None else t.detach().requires_grad_(kind not in frozen)
        for t, kind in zip(tensors, kinds, strict=True)
    ]


def loss_of(problem: Problem, out: Any, rank: int) -> Tensor:
    outs = as_list(out)
    weights = loss_weights(problem, outs, rank, dist.get_world_size())
    return torch.stack([(out * weight).sum() for out, weight in zip(outs, weights, strict=True)]).sum()


def check_gradients(
    rank: int,
    problem: Problem,
    dtype: torch.dtype = torch.float32,
    algorithm: str | None = None,
    frozen: str = "",
    **options: Any,
) -> None:
    """Check that they equal those of autograd through the whole group's program, without communication, in float64."""
    size = dist.get_world_size()
    wants = expected_gradients(problem, rank, size, dtype)
    tensors = leaves(problem, rank, frozen, dtype)
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        out = problem.call(unflat(problem, tensors), **options)
        torch.testing.assert_close(out, expected(problem, size, dtype)[rank], rtol=0, atol=0)
        outs = as_list(out)
        torch.autograd.backward(outs, [w.to(dtype) for w in loss_weights(problem, outs, rank, size)])
    for t, want in zip(tensors, wants, strict=True):
        if t is not None and t.requires_grad:
            torch.testing.assert_close(t.grad, want, rtol=0, atol=0)
        else:
            assert t is None or t.grad is None


def quick() -> list[Combination]:
    """The quick combinations: all but most of the slow ones.

    `fused` has half of those on 2 ranks, and per op one on 3 and one on 4.
    """
    kept, seen = [], Counter[Any]()
    for c in COMBINATIONS:
        if c.algorithm == "fused":
            kind = (c.problem.op, c.dtype if c.group_size == 2 else c.group_size)
            seen[kind] += 1
            if seen[kind] % 2 == 0 or (c.group_size > 2 and seen[kind] > 1):
                continue
        kept.append(c)
    return kept


def first_fused() -> list[Combination]:
    """The first problem of each op that `fused` runs on two ranks."""
    first: dict[str, Combination] = {}
    for c in quick():
        if c.algorithm == "fused" and c.group_size == 2:
            first.setdefault(c.problem.op, c)
    return list(first.values())


def marked() -> list[Any]:
    """Combinations that are not quick are soak tests. Those of `fused` are thorough, but for the first of each op."""
    kept, fused = set(quick()), first_fused()

    def marks(c: Combination) -> Any:
        if c not in kept:
            return pytest.mark.nightly
        return () if c.algorithm != "fused" or c in fused else pytest.mark.thorough

    return [pytest.param(c, marks=marks(c), id=str(c)) for c in COMBINATIONS]


@pytest.mark.parametrize("combination", marked())
def test_values_and_gradients_of_every_combination(ranks: Any, combination: Combination) -> None:
    c = combination
    ranks(c.group_size).run(check_gradients, c.problem, c.dtype, c.algorithm)


def check_opcheck(rank: int, problem: Problem, dtype: torch.dtype, algorithm: str, number: int) -> None:
    tensors = leaves(problem, rank, dtype=dtype)
    if number % 2:
        tensors = [None if t is None else non_contiguous(t.detach()).requires_grad_() for t in tensors]
    args = problem.dispatched(unflat(problem, tensors), by_product=number % 4 < 2)
    with fusedcomm.force_algorithm(algorithm, strict=True):
        torch.library.opcheck(getattr(torch.ops.fusedcomm, problem.op).default, args)


def opchecked() -> list[tuple[int, Combination]]:
    """The combinations that are opchecked: half of all, with few of the slow ones, which are `fused` or on more than
    two ranks.
    """
    on_hosts = [c for c in COMBINATIONS if c.algorithm in ("unfused", "chunked")]  # both of each problem
    plain = [c for i, c in enumerate(on_hosts) if c.algorithm == "chunked" or i // 2 % 2]
    fused = [c for c in COMBINATIONS if c.algorithm == "fused" and c.group_size == 2][::11]
    return list(enumerate(fused + [c if i % 16 == 0 else replace(c, group_size=2) for i, c in enumerate(plain)]))


def opchecks() -> list[Any]:
    """The first `chunked` problem of each op with each dtype is quick; a sixth of the others, and `fused`, is thorough,
    and the rest for `make soak`.
    """
    seen, params = set(), []
    for number, c in opchecked():
        kind = (c.problem.op, c.dtype)
        quick = c.algorithm == "chunked" and kind not in seen
        if quick:
            seen.add(kind)
        slow = pytest.mark.thorough if number % 6 == 0 or c.algorithm == "fused" else pytest.mark.nightly
        params.append(pytest.param(number, c, marks=() if quick else slow))
    return params


@pytest.mark.parametrize("number, combination", opchecks(), ids=str)
def test_opcheck(ranks: Any, number: int, combination: Combination) -> None:
    c = combination
    ranks(c.group_size).run(check_opcheck, c.problem, c.dtype, c.algorithm, number)


def test_the_table_is_as_large_as_it_should_be() -> None:
    assert len(quick()) >= 144
    assert len(opchecked()) >= 144
    assert {c.problem.op for _, c in opchecked() if c.algorithm == "fused"} == set(OPS)
    for op in OPS:
        mine = [c for c in quick() if c.problem.op == op]
        assert {(c.algorithm, c.dtype) for c in mine} == {(a, d) for a in ALGORITHMS for d in DTYPES}
        assert {(c.algorithm, c.group_size) for c in mine} == {(a, r) for a in ALGORITHMS for r in (2, 3, 4)}


FROZEN = [
    "packed-qkv",
    "batched-w-heads",
    "all_to_all_matmul-heads-gathered",
    "all_to_all_matmul-batched-w",
    "all_gather_matmul-list-qkv",
    "all_gather_matmul-batched-w-k-gathered",
    "matmul_reduce_scatter-batch-columns-scattered",
    "matmul_reduce_scatter-batched-w",
    "matmul_all_reduce-nothing-divides-wide",
    "matmul_all_reduce-batched-w",
]


@pytest.mark.parametrize("frozen", thorough_but(["x", "wb"], ["x", "w", "b", "xb", "wb", "xw"]))
@pytest.mark.parametrize("name", FROZEN)
def test_gradients_with_frozen_inputs(ranks: Any, name: str, frozen: str) -> None:
    for algorithm in ("unfused", "chunked"):
        ranks(3).run(check_gradients, NAMED[name], torch.float32, algorithm, frozen)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FROZEN[::2])
def test_gradients_of_the_kernels_with_a_frozen_x(ranks: Any, name: str) -> None:
    ranks(2).run(check_gradients, NAMED[name], torch.bfloat16, "fused", "x")


@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
@pytest.mark.parametrize("name", [name for name in FROZEN if name.startswith(GATHERS)])
def test_gradients_without_a_saved_by_product(ranks: Any, name: str, algorithm: str) -> None:
    save = "save_exchanged" if name.startswith("all_to_all_matmul") else "save_gathered"
    for frozen in ("", "x", "w") if algorithm != "fused" else ("",):
        ranks(2).run(check_gradients, NAMED[name], torch.float32, algorithm, frozen, **{save: False})


@on_ranks(2)
def test_a_list_with_a_frozen_weight_and_an_unused_result(rank: int) -> None:
    """One weight of the list is frozen, one result unused."""
    problem = NAMED["all_gather_matmul-list-qkv"]
    size = dist.get_world_size()
    tensors = leaves(problem, rank)
    tensors[1].requires_grad_(False)
    outs = problem.call(unflat(problem, tensors))
    weights = loss_weights(problem, outs, rank, size)
    torch.autograd.backward([outs[0], outs[2]], [weights[0].float(), weights[2].float()])
    wants = expected_gradients(problem, rank, size, used=(0, 2))
    assert tensors[1].grad is None and tensors[2].grad is None
    for i in (0, 3, 4, 6):
        torch.testing.assert_close(tensors[i].grad, wants[i], rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("name", ["all_to_all_matmul-heads-gathered", "all_gather_matmul-list-qkv"])
def test_gradients_through_the_by_product(rank: int, name: str, asked: bool) -> None:
    """The loss takes the second result too.

    Its gradient goes back through the plain collective, and is none if not asked for.
    """
    problem = NAMED[name]
    size = dist.get_world_size()
    tensors = leaves(problem, rank)
    outs, gathered = getattr(torch.ops.fusedcomm, problem.op)(*problem.dispatched(unflat(problem, tensors), asked))
    outs = as_list(outs)
    weights = [w.float() for w in loss_weights(problem, outs, rank, size)]
    torch.autograd.backward([*outs, gathered], [*weights, torch.full_like(gathered, 3)])
    wants = expected_gradients(problem, rank, size)
    copies = size if problem.op == "all_gather_matmul" else 1
    assert wants[0] is not None
    wants[0] = wants[0] + 3 * copies * asked
    for t, want in zip(tensors, wants, strict=True):
        assert t is want is None or torch.equal(t.grad, want)
    (alone,) = torch.autograd.grad(
        getattr(torch.ops.fusedcomm, problem.op)(*problem.dispatched(unflat(problem, tensors), True))[1].sum(),
        tensors[0],
    )
    assert (alone == copies).all()


TWICE = ["packed-qkv", "all_to_all_matmul-heads-gathered", "all_gather_matmul-list-qkv"]
TWICE += ["matmul_reduce_scatter-batched-w", "matmul_all_reduce-nothing-divides"]


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
@pytest.mark.parametrize("name", TWICE)
def test_inputs_used_twice(rank: int, name: str, algorithm: str) -> None:
    """The op runs twice with the same x and w, x is in another term too, and all of them are views of one base."""
    problem = NAMED[name]
    size = dist.get_world_size()
    tensors = flat(integers(problem, rank, size))
    there = [t for t in tensors if t is not None]
    base = torch.cat([t.flatten() for t in there]).requires_grad_()
    views = iter(part.view(t.shape) for part, t in zip(base.split([t.numel() for t in there]), there, strict=True))
    inputs = unflat(problem, [None if t is None else next(views) for t in tensors])
    with fusedcomm.force_algorithm(algorithm, strict=True):
        loss = loss_of(problem, problem.call(inputs), rank)
        loss = loss + 2 * loss_of(problem, problem.call(inputs), rank) + 5 * inputs[0].sum()
        loss.backward()
    wants = [3 * want.flatten() for want in expected_gradients(problem, rank, size) if want is not None]
    wants[0] += 5
    torch.testing.assert_close(base.grad, torch.cat(wants), rtol=0, atol=0)


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "min_piece"),
    [(3, 1), pytest.param(2, 128, marks=pytest.mark.thorough), pytest.param(2, 1, marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("problem", ALL_PROBLEMS, ids=str)
def test_chunks_multiplied_one_by_one(rank: int, problem: Problem, world_size: int, min_piece: int) -> None:
    """The problems are small, so thresholds are lowered below which chunks are not multiplied one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "FEW_ROWS", 0)
        patch.setattr(chunk_matmul, "_MIN_PIECE", min_piece)
        check_gradients(rank, problem, algorithm="chunked")
