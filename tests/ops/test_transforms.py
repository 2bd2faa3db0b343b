"""All five ops inside checkpoints, second derivatives, torch.func, autocast and compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedcomm
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED, as_list, expected_gradients, loss_weights
from tests.helpers.problems import OPS, Problem, flat, integers, unflat, whole_group
from tests.helpers.thorough import ALL_ALGORITHMS, thorough_but

ONE_EACH = ["heads", "all_to_all_matmul-heads-gathered", "all_gather_matmul-list-qkv"]
ONE_EACH += ["matmul_reduce_scatter-batch-columns-scattered", "matmul_all_reduce-nothing-divides"]


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ONE_EACH)
def test_in_a_checkpoint(rank: int, name: str, use_reentrant: bool) -> None:
    problem = NAMED[name]
    size = dist.get_world_size()
    tensors = [None if t is None else t.requires_grad_() for t in flat(integers(problem, rank, size))]

    def block(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(as_list(problem.call(unflat(problem, tensors))))

    outs = checkpoint(block, *tensors, use_reentrant=use_reentrant)
    torch.autograd.backward(outs, [w.float() for w in loss_weights(problem, outs, rank, size)])
    for t, want in zip(tensors, expected_gradients(problem, rank, size), strict=True):
        assert t is want is None or torch.equal(t.grad, want)


def check_second_derivatives(rank: int, problem: Problem, frozen_x: bool, options: dict[str, Any]) -> None:
    """Check d/d(x, w, bias) of sum(grad * v) for the loss sum(out ** 2 / 2) against the whole group's in float64.

    What is replicated in a matmul_all_reduce, the result and the bias, counts once, as in the program of one process.
    """
    size = dist.get_world_size()

    def of_loss(outs: list[Tensor], leaves: list[Tensor], order: torch.dtype) -> Tensor:
        loss = torch.stack([out.square().sum() / 2 for out in outs]).sum()
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        vs = [(torch.arange(g.numel(), dtype=order).view(g.shape) % 3 - 1) for g in grads]
        return torch.stack([(g * v).sum() for g, v in zip(grads, vs, strict=True)]).sum()

    def trained(tensors: list[Tensor | None]) -> list[Tensor]:
        return [t.requires_grad_() for i, t in enumerate(tensors) if t is not None and not (frozen_x and i == 0)]

    everyone = [[None if t is None else t.double() for t in flat(integers(problem, r, size))] for r in range(size)]
    leaves = [trained(tensors) for tensors in everyone]
    results = whole_group(problem, everyone, size)[0]
    if problem.op == "matmul_all_reduce":
        results = [results[rank]]
    every_leaf = [t for each in leaves for t in each]
    loss = torch.stack([out.square().sum() / 2 for outs in results for out in outs]).sum()
    grads = iter(torch.autograd.grad(loss, every_leaf, create_graph=True, materialize_grads=True))
    total = torch.zeros((), dtype=torch.float64)
    for each in leaves:
        for t in each:
            total = total + (next(grads) * (torch.arange(t.numel()).view(t.shape) % 3 - 1)).sum()
    wants = torch.autograd.grad(total, leaves[rank], materialize_grads=True)

    tensors = flat(integers(problem, rank, size))
    mine = trained(tensors)
    outs = as_list(problem.call(unflat(problem, tensors), **options))
    got = torch.autograd.grad(of_loss(outs, mine, torch.float32), mine, materialize_grads=True)
    for g, want in zip(got, wants, strict=True):
        torch.testing.assert_close(g.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("frozen_x", [False, True])
@pytest.mark.parametrize("name", ONE_EACH)
def test_second_derivatives(ranks: Any, name: str, frozen_x: bool, save: bool) -> None:
    option = {"all_to_all_matmul": "save_exchanged", "all_gather_matmul": "save_gathered"}.get(NAMED[name].op)
    if option or save:
        options = {option: save} if option else {}
        ranks(2).run(check_second_derivatives, NAMED[name], frozen_x, options)


@on_ranks(2)
@pytest.mark.parametrize("name", ONE_EACH)
def test_torch_func_is_refused(rank: int, name: str) -> None:
    problem = NAMED[name]
    size = dist.get_world_size()
    inputs = integers(problem, rank, size)

    def total(x: Tensor) -> Tensor:
        return torch.stack([out.sum() for out in as_list(problem.call((x, *inputs[1:])))]).sum()

    x = inputs[0]
    transformed: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(total)(x),
        "vjp": lambda: torch.func.vjp(total, x),
        "jvp": lambda: torch.func.jvp(total, (x,), (x,)),
        "vmap": lambda: torch.func.vmap(total)(torch.stack([x, x])),
        "hessian": lambda: torch.func.hessian(total)(x),
    }
    for run in transformed.values():
        with pytest.raises(RuntimeError, match=rf"fusedcomm\.{problem.op} does not work inside torch\.func transforms"):
            run()
    total(x)


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
@pytest.mark.parametrize("name", ONE_EACH)
def test_autocast(rank: int, name: str, algorithm: str) -> None:
    problem = NAMED[name]
    size = dist.get_world_size()
    shapes = [None if t is None else t.shape for t in flat(integers(problem, rank, size))]
    torch.manual_seed(7)  # the bias of a matmul_all_reduce is the same on all ranks
    tensors = [None if shape is None else torch.randn(shape).requires_grad_() for shape in shapes]
    half = [None if t is None else t.detach().bfloat16() for t in tensors]
    want = problem.call(unflat(problem, half))
    with fusedcomm.force_algorithm(algorithm, strict=True):
        for x in (tensors[0], half[0]):  # the second: what an earlier layer under autocast gives
            with torch.autocast("cpu", torch.bfloat16):
                out = problem.call(unflat(problem, [x, *tensors[1:]]))
            torch.testing.assert_close(out, want)
            assert all(each.dtype == torch.bfloat16 for each in as_list(out))
            given = [t for t in tensors[1:] if t is not None]
            grads = torch.autograd.grad(torch.stack([each.sum() for each in as_list(out)]).sum(), given)
            assert all(grad.dtype == torch.float32 for grad in grads)


def program_of(op: str) -> Callable[[Tensor, list[Tensor]], list[Tensor]]:
    """A program with x [2, tokens, 8] and weights [8 or 16, 8], in which the op stands between two others."""

    def matmul_all_to_all(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        return [fusedcomm.matmul_all_to_all(x.relu(), ws[0], 1, 2, bias=ws[0][0], out_shape=[4, 2]).sigmoid()]

    def all_to_all_matmul(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        return [fusedcomm.all_to_all_matmul(x.relu(), torch.cat([ws[0], ws[1]]), 2, 1, bias=ws[0][0]).sigmoid()]

    def all_gather_matmul(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        outs = fusedcomm.all_gather_matmul(x.relu(), [ws[0], ws[1]], 1, bias=[None, ws[0][0]])
        return [out.sigmoid() for out in [*outs, fusedcomm.all_gather_matmul(x, ws[1], 0, save_gathered=False)]]

    def matmul_reduce_scatter(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        return [fusedcomm.matmul_reduce_scatter(x.relu(), ws[0], -2, bias=ws[0][0], reduce_op="avg").sigmoid()]

    def matmul_all_reduce(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        return [fusedcomm.matmul_all_reduce(x.relu()[:, 1:], ws[0], bias=ws[0][0]).sigmoid()]

    return locals()[op]


def eager_and_compiled(rank: int, op: str, backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    program = program_of(op)
    compiled = torch.compile(program, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (4, 6, 10) if dynamic else (4, 6):
        x = torch.randn(2, tokens, 8, requires_grad=True)
        ws = [torch.full((8, 8), 0.1).normal_().requires_grad_() for _ in range(2)]
        answers = []
        for run in (program, compiled):
            outs = run(x, ws)
            loss = torch.stack([out.square().sum() for out in outs]).sum()
            grads = torch.autograd.grad(loss, (x, *ws), allow_unused=True)
            answers.append([*(out.detach() for out in outs), *(g for g in grads if g is not None)])
        torch.testing.assert_close(answers[0], answers[1])
        assert [t.stride() for t in answers[0]] == [t.stride() for t in answers[1]]


@pytest.mark.parametrize("dynamic", thorough_but([False], [False, True]), ids=["static", "dynamic"])
@pytest.mark.parametrize("op", OPS)
def test_in_a_compiled_graph(ranks: Any, op: str, dynamic: bool) -> None:
    ranks(2).run(eager_and_compiled, op, "aot_eager", dynamic)


@pytest.mark.thorough
def test_in_a_graph_of_inductor(ranks: Any) -> None:
    ranks(2).run(eager_and_compiled, "matmul_reduce_scatter", "inductor", False)
