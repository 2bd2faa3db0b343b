"""All five ops over real processes: values of every algorithm, rounding, order of sums, by-products."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from tests.helpers.groups import (
    DTYPES,
    WITH_FEW_FUSED,
    call,
    check,
    check_values,
    empty_is_nan,
    non_contiguous,
)
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import ALL_PROBLEMS, NAMED, TABLES, as_list
from tests.helpers.problems import (
    GATHERS,
    OPS,
    Problem,
    expected,
    expected_by_product,
    flat,
    integers,
    unflat,
    whole_group,
)
from tests.helpers.spies import Dispatched
from tests.helpers.tiers import ALL_ALGORITHMS, OVERLAPPED

CALLS = 6  # back to back with fresh data: both slots are used again, and again
WORLD_SIZES = ["packed-qkv", *(f"{op}-batched-w" for op in OPS[1:]), "all_gather_matmul-list-qkv"]


def every_problem() -> list[Any]:
    """Each problem with each algorithm on 2, 3 and 4 ranks. Sizes take turns: one is quick, for `chunked` another one
    thorough, and the others are soak tests.
    """
    params = []
    for i, problem in enumerate(ALL_PROBLEMS):
        for j, algorithm in enumerate(["unfused", "chunked"]):
            for world_size in (2, 3, 4):
                turn = (world_size + i + j) % 3
                marks = [
                    (),
                    pytest.mark.nightly if algorithm == "unfused" else pytest.mark.thorough,
                    pytest.mark.nightly,
                ]
                params.append(pytest.param(problem, world_size, algorithm, marks=marks[turn]))
    return params


@pytest.mark.parametrize(("problem", "world_size", "algorithm"), every_problem(), ids=str)
def test_values(ranks: Any, problem: Problem, world_size: int, algorithm: str) -> None:
    """Integers are exact, for every problem of the table in fp32. `fused` and other dtypes: test_gradients.py."""
    ranks(world_size).run(check_values, problem, torch.float32, algorithm, CALLS if algorithm == "chunked" else 2)


def check_all_values(rank: int, names: list[str], algorithm: str | None, calls: int) -> None:
    for name in names:
        check_values(rank, NAMED[name], torch.float32, algorithm, calls)


def test_one_rank_has_nothing_to_exchange(ranks: Any) -> None:
    ranks(1).run(check_all_values, [str(problem) for problem in ALL_PROBLEMS], None, 1)


def test_eight_ranks_share_two_cores(ranks: Any) -> None:
    ranks(8).run(check_all_values, WORLD_SIZES, "chunked", 3)


@pytest.mark.thorough
@pytest.mark.parametrize("op", OPS)
def test_back_to_back_calls_of_the_kernels(ranks: Any, op: str) -> None:
    ranks(2).run(check_values, TABLES[op][0], torch.float32, "fused", CALLS)


@on_ranks(3)
@pytest.mark.parametrize(("op", "algorithm"), [*WITH_FEW_FUSED, ("matmul_all_to_all", "pipelined")])
def test_a_late_rank_is_waited_for(rank: int, op: str, algorithm: str) -> None:
    problem = TABLES[op][1]
    world = dist.group.WORLD
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        for seed in range(3):
            if rank == seed:
                time.sleep(0.1)
            check(world, problem, call(world, problem, seed), seed)


NON_CONTIGUOUS = [
    "heads",
    "packed-qkv",
    "batched-w-rows-scattered",
    "batch-columns-to-rows",
    "all_to_all_matmul-heads-gathered",
    "all_to_all_matmul-batched-w",
    "all_gather_matmul-list-qkv",
    "all_gather_matmul-batched-w-k-gathered",
    "matmul_reduce_scatter-batch-columns-scattered",
    "matmul_all_reduce-batched-w-nothing-divides",
]


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
@pytest.mark.parametrize("name", NON_CONTIGUOUS)
def test_non_contiguous_inputs(rank: int, name: str, algorithm: str) -> None:
    problem = NAMED[name]
    size = dist.get_world_size()
    tensors = flat(integers(problem, rank, size))
    for x in (tensors[0], tensors[0].mT.contiguous().mT):
        strided = [None if t is None else non_contiguous(t) for t in (x, *tensors[1:])]
        with fusedcomm.force_algorithm(algorithm, strict=True):
            out = problem.call(unflat(problem, strided))
        torch.testing.assert_close(out, expected(problem, size)[rank], rtol=0, atol=0)


# rounding, and the order of sums


ROUNDING = [
    Problem("rounding", (24, 150), 20, 0, 1, bias=True),
    Problem("rounding", (24, 150), 20, 0, 1, bias=True, op="all_to_all_matmul"),
    Problem("rounding-k-gathered", (24, 75), 20, 1, 0, bias=True, op="all_to_all_matmul"),
    Problem("rounding", (24, 150), 20, 0, bias=True, op="all_gather_matmul"),
    Problem("rounding-k-gathered", (24, 75), 20, 1, bias=True, op="all_gather_matmul"),
    Problem("rounding", (24, 150), 20, scatter_dim=0, bias=True, op="matmul_reduce_scatter"),
    Problem("rounding", (24, 150), 20, bias=True, reduce_op="avg", op="matmul_all_reduce"),
]


def normal(problem: Problem, rank: int, group_size: int, dtype: torch.dtype) -> list[Tensor | None]:
    """Numbers that do not add up exactly, in the shapes of `integers`."""
    tensors = flat(integers(problem, rank, group_size))
    generators = [torch.Generator().manual_seed(100 * i + rank) for i in range(len(tensors))]
    if problem.op == "matmul_all_reduce":  # whose bias all ranks share
        generators[-1].manual_seed(7)
    return [
        None if t is None else torch.randn(t.shape, generator=g).to(dtype)
        for t, g in zip(tensors, generators, strict=True)
    ]


def check_rounding(rank: int, problem: Problem, dtype: torch.dtype, algorithm: str) -> Tensor:
    """Check that the error against float64 is at most twice that of the reference in the same dtype."""
    size = dist.get_world_size()
    tensors = [normal(problem, r, size, dtype) for r in range(size)]
    want = whole_group(problem, [[t if t is None else t.double() for t in ts] for ts in tensors], size)[0][rank][0]
    mine = unflat(problem, tensors[rank])
    with fusedcomm.force_algorithm("unfused"):
        error_of_reference = (problem.call(mine) - want).abs().max()
    with fusedcomm.force_algorithm(algorithm, strict=True):
        outs = [problem.call(mine) for _ in range(3)]
    assert (outs[0] - want).abs().max() <= 2 * error_of_reference + 1e-12
    assert all(torch.equal(outs[0], out) for out in outs[1:])  # bit-equal from run to run
    return outs[0]


def rounding() -> list[Any]:
    """The cases of rounding. The kernels convert both half precisions alike, so those with float16 are soak tests."""
    marks = {torch.float16: pytest.mark.nightly}
    return [
        param
        for problem in ROUNDING
        for dtype in DTYPES
        for param in (
            pytest.param(problem, dtype, "chunked"),
            pytest.param(problem, dtype, "pipelined"),
            pytest.param(problem, dtype, "fused", marks=marks.get(dtype, pytest.mark.thorough)),
        )
    ]


@pytest.mark.parametrize(("problem", "dtype", "algorithm"), rounding(), ids=str)
def test_rounding(ranks: Any, problem: Problem, dtype: torch.dtype, algorithm: str) -> None:
    outs = ranks(2).run(check_rounding, problem, dtype, algorithm)
    if problem.op == "matmul_all_reduce":
        assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("algorithm", OVERLAPPED)
def test_all_ranks_get_the_same_bits_of_an_all_reduce(ranks: Any, algorithm: str) -> None:
    for shape, n in (((24, 50), 20), ((5, 50), 31)):
        problem = Problem("bits", shape, n, op="matmul_all_reduce")
        outs = ranks(3).run(check_rounding, problem, torch.bfloat16, algorithm)
        assert all(torch.equal(outs[0], out) for out in outs[1:])


def partial_sums(rank: int, op: str, partials: list[float], dtype: torch.dtype, algorithm: str) -> Tensor:
    """The sum of ``partials``, one per rank, in many places."""
    x, w = torch.full((6, 1), partials[rank], dtype=dtype), torch.ones(1, 6, dtype=dtype)
    dims = [0] if op == "matmul_reduce_scatter" else []
    with fusedcomm.force_algorithm(algorithm, strict=True):
        return getattr(fusedcomm, op)(x, w, *dims)


@pytest.mark.parametrize("algorithm", OVERLAPPED)
@pytest.mark.parametrize("op", OPS[3:])
def test_partial_sums_are_added_in_rank_order_in_float32(ranks: Any, op: str, algorithm: str) -> None:
    for partials, total in (([1e8, 1, -1e8], 0), ([1, 1e8, -1e8], 0), ([1e8, -1e8, 1], 1), ([-1e8, 1e8, 1], 1)):
        for out in ranks(3).run(partial_sums, op, partials, torch.float32, algorithm):
            assert (out == total).all(), (partials, out)
    half = torch.tensor([256.0, 1, 1], dtype=torch.bfloat16)
    assert half[0] + half[1] + half[2] == 256  # rounded after each addition
    for out in ranks(3).run(partial_sums, op, half.tolist(), torch.bfloat16, algorithm):
        assert (out == 258).all()


def gathered_k(rank: int, op: str, algorithm: str) -> Tensor:
    x = torch.tensor([[256.0, 1], [2, 0]][rank], dtype=torch.bfloat16).expand(4, 2)
    dims = [1, 0] if op == "all_to_all_matmul" else [1]
    with fusedcomm.force_algorithm(algorithm, strict=True):
        return getattr(fusedcomm, op)(x, torch.ones(4, 3, dtype=torch.bfloat16), *dims)


@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
@pytest.mark.parametrize("op", GATHERS)
def test_sums_over_sources_are_rounded_once(ranks: Any, op: str, algorithm: str) -> None:
    rounded_per_source = torch.tensor(257.0).bfloat16() + torch.tensor(2.0).bfloat16()
    once = torch.tensor(259.0).bfloat16()
    assert once != rounded_per_source
    for out in ranks(2).run(gathered_k, op, algorithm):
        assert (out == once).all()


# the second result of the dispatcher ops


def check_by_product(rank: int, names: list[str], algorithm: str, dtype: torch.dtype) -> None:
    size = dist.get_world_size()
    for problem in (NAMED[name] for name in names):
        inputs = integers(problem, rank, size, dtype)
        op = getattr(torch.ops.fusedcomm, problem.op)
        with fusedcomm.force_algorithm(algorithm, strict=size > 1), empty_is_nan():
            outs, gathered = op(*problem.dispatched(inputs, by_product=True))
            without, empty = op(*problem.dispatched(inputs, by_product=False))
        assert list(empty.shape) == [0]
        assert gathered.untyped_storage().data_ptr() != inputs[0].untyped_storage().data_ptr() or gathered.numel() == 0
        assert gathered.is_contiguous()
        torch.testing.assert_close(gathered, expected_by_product(problem, size, dtype, 0)[rank], rtol=0, atol=0)
        want = as_list(expected(problem, size, dtype)[rank])
        torch.testing.assert_close(as_list(outs), want, rtol=0, atol=0)
        torch.testing.assert_close(as_list(without), want, rtol=0, atol=0)


@pytest.mark.parametrize("algorithm", ["unfused", "chunked"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("op", GATHERS)
def test_by_products(ranks: Any, op: str, world_size: int, algorithm: str) -> None:
    """A by-product that was asked for is right and not x itself; one that was not asked for is empty."""
    ranks(world_size).run(check_by_product, [str(problem) for problem in TABLES[op]], algorithm, torch.float32)


@pytest.mark.parametrize("name", ["heads-gathered", "batched-w-batch-gathered", "zero-rows"])
def test_by_products_of_the_kernels(ranks: Any, name: str) -> None:
    names = [str(problem) for op in GATHERS for problem in TABLES[op] if problem.name == name]
    ranks(2).run(check_by_product, names, "fused", torch.bfloat16)


def check_inference(rank: int, problem: Problem, by_product: int) -> None:
    def asks(grad: bool, w_needs_grad: bool, **options: Any) -> bool:
        tensors = flat(integers(problem, rank, dist.get_world_size()))
        for t in tensors[1 : 1 + len(problem.ns)]:
            t.requires_grad_(w_needs_grad)
        with Dispatched() as dispatched, torch.set_grad_enabled(grad):
            problem.call(unflat(problem, tensors), **options)
        return dispatched.arguments(f"fusedcomm::{problem.op}")[by_product]

    save = "save_exchanged" if problem.op == "all_to_all_matmul" else "save_gathered"
    assert asks(grad=True, w_needs_grad=True)
    assert not asks(grad=False, w_needs_grad=True)
    assert not asks(grad=True, w_needs_grad=False)
    assert not asks(grad=True, w_needs_grad=True, **{save: False})


def test_inference_does_not_ask_for_the_by_product(ranks: Any) -> None:
    ranks(2).run(check_inference, NAMED["all_to_all_matmul-k-gathered"], 5)
    ranks(2).run(check_inference, NAMED["all_gather_matmul-list-qkv"], 4)


TYPES = ["bias", "all_to_all_matmul-batch-scattered", "all_gather_matmul-batch-rows-gathered"]
TYPES += ["matmul_reduce_scatter-batch-scattered", "matmul_all_reduce-columns-divide"]


@on_ranks(2)
@pytest.mark.parametrize("name", TYPES)
def test_bad_types_and_groups_are_value_errors(rank: int, name: str) -> None:
    """dtypes, devices and the group's size are checked by the dispatcher op, as compiled graphs call it."""
    problem = NAMED[name]
    size = dist.get_world_size()
    op = getattr(torch.ops.fusedcomm, problem.op)
    x, w, *rest = flat(integers(problem, rank, size))
    for tensors, message in [
        ([x.int(), w, *rest], "x must be float32, float16, bfloat16 or float64, got torch.int32"),
        ([x, w.bfloat16(), *rest], "w must have x's dtype torch.float32, got torch.bfloat16"),
        ([x, w.to("meta"), *rest], "w must be on x's device cpu, got meta"),
        ([x, w, *rest[:-1], rest[-1].half()], "bias must have x's dtype torch.float32, got torch.float16"),
    ]:
        with pytest.raises(ValueError, match=message):
            op(*problem.dispatched(unflat(problem, tensors)))
    *arguments, _, name = problem.dispatched(unflat(problem, [x, w, *rest]))
    with pytest.raises(ValueError, match="group_size must be the size of group"):
        op(*arguments, 1, name)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        op(*arguments, 0, name)
    with pytest.raises(ValueError, match="must be an initialised process group, got name 'nobody'"):
        op(*arguments, size, "nobody")
