"""torch.autograd.gradcheck and gradgradcheck of all five ops, in float64, through the program of the whole group."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED, as_list
from tests.helpers.problems import GATHERS, Problem, flat, integers, unflat

ONE_EACH = ["batched-w-heads", "all_to_all_matmul-heads-gathered", "all_gather_matmul-list-qkv"]
ONE_EACH += ["matmul_reduce_scatter-batched-w-batch-scattered", "matmul_all_reduce-nothing-divides-wide"]
ONE_EACH += ["matmul_reduce_scatter-partial-bias", "matmul_all_reduce-partial-bias"]


class Mine(torch.autograd.Function):
    """This rank's of a stack that all ranks have; the gradients of all of them make the stack's."""

    @staticmethod
    def forward(ctx: Any, stack: Tensor) -> Tensor:
        return stack[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Everyones.apply(grad)


class Everyones(torch.autograd.Function):
    """The reverse of `Mine`."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Mine.apply(grad)


def group_program(problem: Problem, frozen: str, options: dict[str, Any]) -> tuple[Callable[..., Any], list[Tensor]]:
    """All ranks' results as a function of all ranks' inputs, in which this rank makes its part, and inputs for it.

    Every rank calls it with the same values, so it is an ordinary function. What is replicated is not stacked: the bias
    and the result of matmul_all_reduce. ``frozen``: letters of x, w, b.
    """
    size = dist.get_world_size()
    everyone = [flat(integers(problem, r, size)) for r in range(size)]
    replicated = [problem.op == "matmul_all_reduce" and not problem.partial and kind == "b" for kind in problem.kinds]
    torch.manual_seed(0)
    leaves: list[Tensor | None] = []
    for i, kind in enumerate(problem.kinds):
        t = everyone[0][i]
        shape = () if t is None else t.shape if replicated[i] else (size, *t.shape)
        made = None if t is None else torch.randn(shape, dtype=torch.float64)
        if made is not None and problem.transposed and kind == "w":
            made = made.mT.contiguous().mT
        leaves.append(None if made is None else made.requires_grad_(kind not in frozen))

    def program(*given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        tensors = [None if leaf is None else next(rest) for leaf in leaves]
        mine = [t if t is None or same else Mine.apply(t) for t, same in zip(tensors, replicated, strict=True)]
        outs = as_list(problem.call(unflat(problem, mine), **options))
        return tuple(out if problem.op == "matmul_all_reduce" else Everyones.apply(out) for out in outs)

    return program, [leaf for leaf in leaves if leaf is not None]


def check(problem: Problem, frozen: str = "", **options: Any) -> None:
    program, leaves = group_program(problem, frozen, options)
    assert gradcheck(program, leaves, fast_mode=True)
    assert gradgradcheck(program, leaves, fast_mode=True)


@on_ranks(2)
@pytest.mark.parametrize("name", ONE_EACH)
def test_gradcheck(rank: int, name: str) -> None:
    problem = NAMED[name]
    check(problem)
    check(problem, frozen="xw" if problem.partial else "x")
    if problem.op in GATHERS:
        check(problem, **{"save_exchanged" if problem.op == "all_to_all_matmul" else "save_gathered": False})
