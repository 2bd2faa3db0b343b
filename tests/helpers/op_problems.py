"""The table of problems of all five ops, and the gradients they should have."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from tests.helpers.problems import (
    OPS,
    PROBLEMS,
    Problem,
    exact,
    expected,
    flat,
    integers,
    leaves,
    unflat,
    whole_group,
)

_to_all = partial(Problem, op="all_to_all_matmul")
_gather = partial(Problem, op="all_gather_matmul")
_scatter = partial(Problem, op="matmul_reduce_scatter")
_reduce = partial(Problem, op="matmul_all_reduce")

ALL_TO_ALL_MATMUL = [
    _to_all("rows-gathered", (6, 5), 7, 0, 1),
    _to_all("k-gathered", (6, 5), 7, 1, 0, bias=True),
    _to_all("batch-k-gathered", (2, 6, 5), 7, 2, 1),
    _to_all("batch-k-scattered", (2, 3, 5), 7, 1, 2, bias=True),
    _to_all("batch-gathered", (2, 3, 5), 7, 0, 1),
    _to_all("batch-scattered", (2, 3, 5), 7, 1, 0, bias=True),
    _to_all("heads-gathered", (2, 3, 2, 4), 7, -2, 1, k_dims=2, bias=True),
    _to_all("head-dim-gathered", (2, 3, 2, 4), 7, -1, 1, k_dims=2),
    _to_all("heads-scattered", (2, 3, 2, 4), 7, 1, 2, k_dims=2, bias=True),
    _to_all("heads-to-head-dim", (2, 3, 2, 4), 7, 3, 2, k_dims=2),
    _to_all("transposed-w", (2, 3, 2, 4), 7, 2, 1, k_dims=2, bias=True, transposed=True),
    _to_all("batched-w", (3, 4, 5), 6, 1, 2, batched=True, bias=True),
    _to_all("batched-w-heads-gathered", (3, 4, 2, 3), 6, 2, 1, k_dims=2, batched=True, bias=True),
    _to_all("batched-w-batch-gathered", (2, 4, 5), 6, 0, 1, batched=True),
    _to_all("batched-w-batch-scattered", (2, 4, 5), 6, 1, 0, batched=True),
    _to_all("two-batch-dims", (2, 3, 4, 5), 6, 1, 2, batched=True),
    _to_all("three-lead-dims", (2, 3, 4, 5), 6, 1, 2),
    _to_all("one-row", (1, 29), 37, 0, 1),
    _to_all("ragged", (37, 29), 50, 1, 0),
    _to_all("zero-rows", (0, 5), 4, 1, 0),
    _to_all("zero-k", (4, 0), 6, 1, 0, bias=True),
]
ALL_GATHER_MATMUL = [
    _gather("rows-gathered", (3, 5), 7, 0),
    _gather("k-gathered", (3, 5), 7, 1, bias=True),
    _gather("batch-rows-gathered", (2, 3, 5), 7, 1, bias=True),
    _gather("batch-gathered", (2, 3, 5), 7, 0),
    _gather("batch-k-gathered", (2, 3, 5), 7, -1),
    _gather("three-lead-dims", (2, 3, 2, 5), 6, 1, bias=True),
    _gather("batched-w", (2, 3, 5), 6, 1, batched=True, bias=True),
    _gather("batched-w-batch-gathered", (2, 3, 5), 6, 0, batched=True),
    _gather("batched-w-k-gathered", (2, 3, 5), 6, 2, batched=True, bias=True),
    _gather("two-batch-dims", (2, 3, 2, 5), 6, 1, batched=True),
    _gather("list-qkv", (2, 3, 5), (8, 3, 5), 1, bias=(True, False, True)),
    _gather("list-k-gathered", (3, 5), (4, 6), -1, bias=(False, True)),
    _gather("list-batched-w", (2, 3, 5), (4, 6), 0, batched=True, bias=(True, False)),
    _gather("list-of-one", (3, 5), (6,), 0),
    _gather("transposed-w", (2, 3, 5), (7, 4), 1, bias=(True, True), transposed=True),
    _gather("one-row", (1, 29), 37, 0),
    _gather("ragged", (37, 29), 50, 0),
    _gather("zero-rows", (0, 5), 4, 0),
    _gather("zero-k", (4, 0), 6, 0, bias=True),
]
MATMUL_REDUCE_SCATTER = [
    _scatter("rows-scattered", (3, 5), 7, scatter_dim=0),
    _scatter("columns-scattered", (3, 5), 4, scatter_dim=1, bias=True),
    _scatter("batch-rows-scattered", (2, 3, 5), 7, scatter_dim=1, bias=True, reduce_op="avg"),
    _scatter("batch-scattered", (2, 3, 5), 7, scatter_dim=0, bias=True),
    _scatter("batch-columns-scattered", (2, 3, 5), 4, scatter_dim=-1, bias=True, reduce_op="avg"),
    _scatter("three-lead-dims", (2, 3, 2, 5), 6, scatter_dim=1),
    _scatter("third-lead-dim", (2, 2, 3, 5), 6, scatter_dim=-2, bias=True, reduce_op="avg"),
    _scatter("batched-w", (2, 3, 5), 6, scatter_dim=1, batched=True, bias=True),
    _scatter("batched-w-batch-scattered", (2, 3, 5), 6, scatter_dim=0, batched=True, reduce_op="avg"),
    _scatter("batched-w-columns-scattered", (2, 3, 5), 4, scatter_dim=2, batched=True, bias=True),
    _scatter("two-batch-dims", (2, 3, 2, 5), 6, scatter_dim=1, batched=True),
    _scatter("transposed-w", (2, 3, 5), 7, scatter_dim=1, bias=True, transposed=True),
    _scatter("one-row", (1, 29), 37, scatter_dim=0, reduce_op="avg"),
    _scatter("ragged", (37, 29), 50, scatter_dim=0),
    _scatter("ragged-columns", (37, 29), 25, scatter_dim=1, bias=True),
    _scatter("zero-rows", (0, 5), 4, scatter_dim=1),
    _scatter("zero-k", (4, 0), 6, scatter_dim=0, bias=True),
    _scatter("partial-bias-batched-w", (2, 3, 5), 6, scatter_dim=0, batched=True, bias=True, partial=True),
    _scatter("partial-bias-columns", (3, 5), 4, scatter_dim=1, bias=True, partial=True),
    _scatter("partial-bias", (2, 3, 5), 7, scatter_dim=1, bias=True, partial=True, reduce_op="avg"),
]
MATMUL_ALL_REDUCE = [
    _reduce("rows-divide", (12, 5), 7),
    _reduce("columns-divide", (5, 7), 24, bias=True),
    _reduce("both-divide", (12, 5), 24, bias=True, reduce_op="avg"),
    _reduce("batch-divides", (12, 5, 3), 7, bias=True),
    _reduce("nothing-divides", (5, 3), 7, bias=True),
    _reduce("nothing-divides-wide", (2, 5, 3), 31, bias=True, reduce_op="avg"),
    _reduce("nothing-divides-three-lead-dims", (5, 7, 5, 3), 7),
    _reduce("three-lead-dims", (5, 12, 2, 3), 7, reduce_op="avg"),
    _reduce("batched-w", (12, 5, 3), 7, batched=True, bias=True),
    _reduce("batched-w-columns", (5, 7, 3), 12, batched=True),
    _reduce("batched-w-nothing-divides", (5, 7, 3), 11, batched=True, bias=True, reduce_op="avg"),
    _reduce("two-batch-dims", (2, 3, 5, 4), 7, batched=True),
    _reduce("transposed-w", (2, 6, 5), 7, bias=True, transposed=True),
    _reduce("one-row", (1, 29), 37, reduce_op="avg"),
    _reduce("ragged", (37, 29), 50),
    _reduce("zero-rows", (0, 5), 4),
    _reduce("zero-k", (5, 0), 7, bias=True),
    _reduce("partial-bias-batched-w", (12, 5, 3), 7, batched=True, bias=True, partial=True),
    _reduce("partial-bias-columns", (5, 7), 24, bias=True, partial=True),
    _reduce("partial-bias", (2, 5, 3), 31, bias=True, partial=True, reduce_op="avg"),
]
TABLES = {
    "matmul_all_to_all": PROBLEMS,
    "all_to_all_matmul": ALL_TO_ALL_MATMUL,
    "all_gather_matmul": ALL_GATHER_MATMUL,
    "matmul_reduce_scatter": MATMUL_REDUCE_SCATTER,
    "matmul_all_reduce": MATMUL_ALL_REDUCE,
}
ALL_PROBLEMS = [problem for op in OPS for problem in TABLES[op]]
NAMED = {str(problem): problem for problem in ALL_PROBLEMS}


def loss_weights(problem: Problem, outs: list[Tensor], rank: int, group_size: int) -> list[Tensor]:
    """What each rank multiplies its results by, per output. For a replicated result it is the same on all ranks."""
    shift = 0 if problem.op == "matmul_all_reduce" else rank
    scale = group_size if problem.reduce_op == "avg" else 1
    return [scale * ((torch.arange(out.numel()).view(out.shape) + shift + 3 * i) % 5 - 2) for i, out in enumerate(outs)]


def expected_gradients(
    problem: Problem, rank: int, group_size: int, dtype: torch.dtype = torch.float32, used: Sequence[int] | None = None
) -> list[Tensor | None]:
    """The gradients of this rank's x, weights and biases, through the program of the whole group, in float64.

    ``used``: results of a list in the loss, which is a sum over ranks; a matmul_all_reduce has one of all ranks.
    """
    leaves = [
        [None if t is None else t.double().requires_grad_() for t in flat(integers(problem, r, group_size))]
        for r in range(group_size)
    ]
    results = whole_group(problem, leaves, group_size)[0]
    losses = []
    for r, outs in enumerate(results):
        terms = zip(outs, loss_weights(problem, outs, r, group_size), strict=True)
        losses.append(sum((out * w).sum() for i, (out, w) in enumerate(terms) if used is None or i in used))
    loss = losses[rank] if problem.op == "matmul_all_reduce" else sum(losses)
    mine = [t for t in leaves[rank] if t is not None]
    grads = iter(torch.autograd.grad(loss, mine, materialize_grads=True))
    return [None if t is None else exact(next(grads), dtype) for t in leaves[rank]]


def check_gradients(problem: Problem, dtype: torch.dtype = torch.float32, group: Any = None) -> None:
    """Check results and gradients against the whole group's program, without communication, in float64."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tensors = leaves(problem, rank, size, dtype)
    outs = as_list(problem.call(unflat(problem, tensors), group))
    torch.testing.assert_close(outs, as_list(expected(problem, size, dtype)[rank]), rtol=0, atol=0)
    torch.autograd.backward(outs, [w.to(dtype) for w in loss_weights(problem, outs, rank, size)])
    for t, want in zip(tensors, expected_gradients(problem, rank, size, dtype), strict=True):
        assert t is want is None or torch.equal(t.grad, want)


def as_list(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, list | tuple) else [out]


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
