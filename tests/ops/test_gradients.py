"""All five ops over real processes: values and gradients, of frozen inputs and inputs used twice too; opcheck."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.plan.geometry import exchange
from tests.helpers.groups import DTYPES, empty_is_nan, non_contiguous
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED, TABLES, as_list, check_gradients, expected_gradients, loss_weights
from tests.helpers.problems import GATHERS, OPS, Problem, flat, integers, leaves, unflat
from tests.ops.test_transforms import ONE_EACH


def loss_of(problem: Problem, out: Any, rank: int) -> Tensor:
    outs = as_list(out)
    weights = loss_weights(problem, outs, rank, dist.get_world_size())
    return torch.stack([(out * weight).sum() for out, weight in zip(outs, weights, strict=True)]).sum()


def check_problems(problems: list[Problem], dtype: torch.dtype, algorithm: str) -> None:
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        for problem in problems:
            try:
                check_gradients(problem, dtype)
            except Exception as error:
                raise AssertionError(str(problem)) from error


def problems_of(op: str, dtype: torch.dtype) -> list[Problem]:
    """The third of an op's problems that runs in this dtype."""
    return TABLES[op][DTYPES.index(dtype) :: len(DTYPES)]


@on_ranks(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ["unfused", "chunked", "pipelined"])
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients(rank: int, op: str, algorithm: str, dtype: torch.dtype) -> None:
    """Integers are exact. Shapes are proved by tests/run and tests/kernels, without processes."""
    check_problems(problems_of(op, dtype), dtype, algorithm)


@on_ranks(2)
@pytest.mark.parametrize(("op", "dtype"), [(op, DTYPES[i % 3]) for i, op in enumerate(OPS)], ids=str)
def test_values_and_gradients_of_kernels(rank: int, op: str, dtype: torch.dtype) -> None:
    """Triton's interpreter is slow: one problem."""
    check_problems(problems_of(op, dtype)[:1], dtype, "fused")


@on_ranks(3)
@pytest.mark.parametrize("op", OPS)
def test_chunks_multiplied_one_by_one(rank: int, op: str) -> None:
    """The problems are small, so thresholds are lowered below which chunks are not multiplied one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "FEW_ROWS", 0)
        patch.setattr(exchange, "MIN_RUN", 1)
        check_problems(TABLES[op], torch.float32, "chunked")


@on_ranks(2)
@pytest.mark.parametrize(
    ("number", "name"),
    [*enumerate(["packed-qkv", *(f"{op}-batched-w" for op in OPS[1:]), "all_gather_matmul-list-qkv"])],
)
def test_opcheck(rank: int, number: int, name: str) -> None:
    """Every second one is not contiguous, and every second pair asks for the by-product."""
    problem, tensors = NAMED[name], leaves(NAMED[name], rank, 2)
    if number % 2:
        tensors = [None if t is None else non_contiguous(t.detach()).requires_grad_() for t in tensors]
    args = problem.dispatched(unflat(problem, tensors), by_product=number % 4 < 2)
    with fusedcomm.force_algorithm("chunked", strict=True):
        torch.library.opcheck(getattr(torch.ops.fusedcomm, problem.op).default, args)


@on_ranks(2)
def test_a_list_with_a_frozen_weight_and_an_unused_result(rank: int) -> None:
    problem = NAMED["all_gather_matmul-list-qkv"]
    size = dist.get_world_size()
    tensors = leaves(problem, rank, size)
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
@pytest.mark.parametrize("name", [name for name in ONE_EACH if name.startswith(GATHERS)])
def test_gradients_through_the_by_product(rank: int, name: str, asked: bool) -> None:
    """The loss takes the second result too, whose gradient goes back through the plain collective, if asked for."""
    problem = NAMED[name]
    size = dist.get_world_size()
    tensors = leaves(problem, rank, size)
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


@on_ranks(2)
@pytest.mark.parametrize("name", ONE_EACH)
def test_inputs_used_twice(rank: int, name: str) -> None:
    """The op runs twice with the same x and w, x is in another term too, and all of them are views of one base."""
    problem = NAMED[name]
    size = dist.get_world_size()
    tensors = flat(integers(problem, rank, size))
    there = [t for t in tensors if t is not None]
    base = torch.cat([t.flatten() for t in there]).requires_grad_()
    views = iter(part.view(t.shape) for part, t in zip(base.split([t.numel() for t in there]), there, strict=True))
    inputs = unflat(problem, [None if t is None else next(views) for t in tensors])
    with fusedcomm.force_algorithm("chunked", strict=True):
        loss = loss_of(problem, problem.call(inputs), rank)
        loss = loss + 2 * loss_of(problem, problem.call(inputs), rank) + 5 * inputs[0].sum()
        loss.backward()
    wants = [3 * want.flatten() for want in expected_gradients(problem, rank, size) if want is not None]
    wants[0] += 5
    torch.testing.assert_close(base.grad, torch.cat(wants), rtol=0, atol=0)
