"""All five ops over real processes: late ranks, strided inputs, rounding, order of sums, by-products, bad types."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from tests.helpers import problems as given
from tests.helpers.groups import ALGORITHMS, after_peers, call, check, check_values, empty_is_nan
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import ALL_PROBLEMS, NAMED, TABLES, as_list
from tests.helpers.spies import Dispatched
from tests.helpers.tiers import nightly_but


@on_ranks(1)
def test_one_rank_has_nothing_to_exchange(rank: int) -> None:
    for problem in ALL_PROBLEMS[::4]:
        check_values(rank, problem, torch.float32, None, 1)


@on_ranks(3)
@pytest.mark.parametrize("op", given.OPS)
def test_a_late_rank_is_waited_for(rank: int, op: str) -> None:
    """Each rank in turn begins when its peers have signalled, and so wait for it."""
    problem = TABLES[op][1]
    world = dist.group.WORLD
    with fusedcomm.force_algorithm("chunked", strict=True), empty_is_nan():
        for seed in range(6):
            after_peers(world, seed % 3)
            check(world, problem, call(world, problem, seed), seed)


# rounding, and the order of sums
ROUNDING = [
    given.Problem("rounding", (24, 150), 20, 0, 1, bias=True),
    given.Problem("rounding", (24, 150), 20, 0, 1, bias=True, op="all_to_all_matmul"),
    given.Problem("rounding-k-gathered", (24, 75), 20, 1, 0, bias=True, op="all_to_all_matmul"),
    given.Problem("rounding", (24, 150), 20, 0, bias=True, op="all_gather_matmul"),
    given.Problem("rounding-k-gathered", (24, 75), 20, 1, bias=True, op="all_gather_matmul"),
    given.Problem("rounding", (24, 150), 20, scatter_dim=0, bias=True, op="matmul_reduce_scatter"),
    given.Problem("rounding", (24, 150), 20, bias=True, reduce_op="avg", op="matmul_all_reduce"),
    given.Problem("rounding-padded", (5, 150), 31, op="matmul_all_reduce"),
]


def normal(problem: given.Problem, rank: int, group_size: int, dtype: torch.dtype) -> list[Tensor | None]:
    """Numbers that do not add up exactly, in the shapes of `integers`."""
    tensors = given.flat(given.integers(problem, rank, group_size))
    generators = [torch.Generator().manual_seed(100 * i + rank) for i in range(len(tensors))]
    if problem.op == "matmul_all_reduce":  # whose bias all ranks share
        generators[-1].manual_seed(7)
    return [
        None if t is None else torch.randn(t.shape, generator=g).to(dtype)
        for t, g in zip(tensors, generators, strict=True)
    ]


def check_rounding(rank: int, problem: given.Problem, dtype: torch.dtype, algorithm: str) -> Tensor:
    """Check that the error against float64 is at most twice that of the reference in the same dtype."""
    size = dist.get_world_size()
    tensors = [normal(problem, r, size, dtype) for r in range(size)]
    want = given.whole_group(problem, [[t if t is None else t.double() for t in ts] for ts in tensors], size)[0][rank][
        0
    ]
    mine = given.unflat(problem, tensors[rank])
    with fusedcomm.force_algorithm("unfused"):
        error_of_reference = (problem.call(mine) - want).abs().max()
    with fusedcomm.force_algorithm(algorithm, strict=True):
        outs = [problem.call(mine) for _ in range(3)]
    assert (outs[0] - want).abs().max() <= 2 * error_of_reference + 1e-12
    assert all(torch.equal(outs[0], out) for out in outs[1:])  # bit-equal from run to run
    return outs[0]


@pytest.mark.parametrize("algorithm", nightly_but(["chunked", "pipelined"], ALGORITHMS[1:]))
@pytest.mark.parametrize("problem", ROUNDING, ids=str)
def test_rounding(ranks: Any, problem: given.Problem, algorithm: str) -> None:
    """An all_reduce gives all ranks the same bits."""
    for dtype in (torch.float32, torch.bfloat16):
        outs = ranks(3).run(check_rounding, problem, dtype, algorithm)
        assert problem.op != "matmul_all_reduce" or all(torch.equal(outs[0], out) for out in outs[1:])


def gathered_k(rank: int, op: str, algorithm: str) -> Tensor:
    x = torch.tensor([[256.0, 1], [2, 0]][rank], dtype=torch.bfloat16).expand(4, 2)
    dims = [1, 0] if op == "all_to_all_matmul" else [1]
    with fusedcomm.force_algorithm(algorithm, strict=True):
        return getattr(fusedcomm, op)(x, torch.ones(4, 3, dtype=torch.bfloat16), *dims)


@pytest.mark.parametrize("algorithm", ["unfused", "chunked", "pipelined"])
@pytest.mark.parametrize("op", given.GATHERS)
def test_sums_over_sources_are_rounded_once(ranks: Any, op: str, algorithm: str) -> None:
    rounded_per_source = torch.tensor(257.0).bfloat16() + torch.tensor(2.0).bfloat16()
    once = torch.tensor(259.0).bfloat16()
    assert once != rounded_per_source
    for out in ranks(2).run(gathered_k, op, algorithm):
        assert (out == once).all()


# the second result of the dispatcher ops
def check_by_product(rank: int, problems: list[given.Problem], algorithm: str, dtype: torch.dtype) -> None:
    size = dist.get_world_size()
    for problem in problems:
        inputs = given.integers(problem, rank, size, dtype)
        op = getattr(torch.ops.fusedcomm, problem.op)
        with fusedcomm.force_algorithm(algorithm, strict=size > 1), empty_is_nan():
            outs, gathered = op(*problem.dispatched(inputs, by_product=True))
            without, empty = op(*problem.dispatched(inputs, by_product=False))
        assert list(empty.shape) == [0]
        assert gathered.untyped_storage().data_ptr() != inputs[0].untyped_storage().data_ptr() or gathered.numel() == 0
        assert gathered.is_contiguous()
        torch.testing.assert_close(gathered, given.expected_by_product(problem, size, dtype, 0)[rank], rtol=0, atol=0)
        want = as_list(given.expected(problem, size, dtype)[rank])
        torch.testing.assert_close(as_list(outs), want, rtol=0, atol=0)
        torch.testing.assert_close(as_list(without), want, rtol=0, atol=0)


@on_ranks()
@pytest.mark.parametrize("op", given.GATHERS)
@pytest.mark.parametrize(("world_size", "algorithm"), [(1, "unfused"), (3, "unfused"), (3, "chunked")])
def test_by_products(rank: int, op: str, world_size: int, algorithm: str) -> None:
    """A by-product that was asked for is right and not x itself; one that was not asked for is empty."""
    check_by_product(rank, TABLES[op], algorithm, torch.float32)


def check_inference(rank: int, problem: given.Problem, by_product: int) -> None:
    def asks(grad: bool, w_needs_grad: bool, **options: Any) -> bool:
        tensors = given.flat(given.integers(problem, rank, dist.get_world_size()))
        for t in tensors[1 : 1 + len(problem.ns)]:
            t.requires_grad_(w_needs_grad)
        with Dispatched() as dispatched, torch.set_grad_enabled(grad):
            problem.call(given.unflat(problem, tensors), **options)
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
    x, w, *rest = given.flat(given.integers(problem, rank, size))
    for tensors, message in [
        ([x.int(), w, *rest], "x must be float32, float16, bfloat16 or float64, got torch.int32"),
        ([x, w.bfloat16(), *rest], "w must have x's dtype torch.float32, got torch.bfloat16"),
        ([x, w.to("meta"), *rest], "w must be on x's device cpu, got meta"),
        ([x, w, *rest[:-1], rest[-1].half()], "bias must have x's dtype torch.float32, got torch.float16"),
    ]:
        with pytest.raises(ValueError, match=message):
            op(*problem.dispatched(given.unflat(problem, tensors)))
    *arguments, _, name = problem.dispatched(given.unflat(problem, [x, w, *rest]))
    with pytest.raises(ValueError, match="group_size must be the size of group"):
        op(*arguments, 1, name)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        op(*arguments, 0, name)
    with pytest.raises(ValueError, match="must be an initialised process group, got name 'nobody'"):
        op(*arguments, size, "nobody")
