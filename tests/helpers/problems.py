"""Calls of the five ops that tests run, their inputs, and the expected results without any communication.

The oracle knows nothing of fusedcomm: it takes every rank's inputs, in float64, and cuts and concatenates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.exchange import Exchange

EVEN = {  # the arguments that say which part of a dim each rank has
    "matmul_all_to_all": (None,) * 5,
    "all_to_all_matmul": (None,) * 5,
    "all_gather_matmul": (None,) * 3,
    "matmul_reduce_scatter": (None,) * 3,
    "matmul_all_reduce": (),
}

Inputs = tuple[Tensor, Any, Any]  # x, w, bias, as the op's function takes them


@dataclass(frozen=True)
class Problem:
    """x_shape is per rank; where a dim is scattered, its size is ``group_size`` times what stands here."""

    name: str
    x_shape: tuple[int, ...]
    n: int | tuple[int, ...]  # a tuple stands for a list of weights
    gather_dim: int | None = None
    scatter_dim: int | None = None
    out_shape: tuple[int, ...] | None = None
    batched: bool = False
    bias: bool | tuple[bool, ...] = False
    transposed: bool = False  # w is stored as nn.Linear stores its weight
    op: str = "matmul_all_to_all"
    k_dims: int = 1  # dims of the exchanged x that all_to_all_matmul flattens
    reduce_op: str = "sum"
    partial: bool = False  # the bias is a partial_bias, and rank 1 has none

    def __str__(self) -> str:
        return self.name if self.op == "matmul_all_to_all" else f"{self.op}-{self.name}"

    @property
    def ns(self) -> tuple[int, ...]:
        return self.n if isinstance(self.n, tuple) else (self.n,)

    @property
    def kinds(self) -> str:
        """A letter of x, w and b for each tensor of `flat`."""
        return "x" + "w" * len(self.ns) + "b" * len(self.ns)

    def sizes(self, group_size: int) -> tuple[list[int], list[list[int]], list[int] | None]:
        """x's shape, each w's shape, and out_shape for a group, so that the scattered dim divides."""
        if self.op in ("matmul_all_to_all", "matmul_reduce_scatter"):
            lead, columns = list(self.x_shape[:-1]), list(self.out_shape or self.ns)
            y = lead + columns
            assert self.scatter_dim is not None
            y[self.scatter_dim] *= group_size
            lead, columns = y[: len(lead)], y[len(lead) :]
            x = [*lead, self.x_shape[-1]]
            w = [*(lead[:-1] if self.batched else []), x[-1], math.prod(columns)]
            return x, [w], columns if self.out_shape else None
        x = list(self.x_shape)
        if self.scatter_dim is not None:
            x[self.scatter_dim] *= group_size
        gathered = self.gathered_shape(x, group_size)
        lead, k = gathered[: -self.k_dims], math.prod(gathered[-self.k_dims :])
        return x, [[*(lead[:-1] if self.batched else []), k, n] for n in self.ns], None

    def gathered_shape(self, x: Sequence[int], group_size: int) -> list[int]:
        shape = list(x)
        if self.scatter_dim is not None:
            shape[self.scatter_dim] //= group_size
        if self.gather_dim is not None:
            shape[self.gather_dim] *= group_size
        return shape

    def bias_sizes(self, group_size: int) -> list[int | None]:
        """[N] for each w, or [N / R] where N is scattered."""
        x, ws, _ = self.sizes(group_size)
        own_part = self.op == "matmul_reduce_scatter" and not self.partial and self.scatter_dim % len(x) == len(x) - 1
        flags = self.bias if isinstance(self.bias, tuple) else (self.bias,) * len(ws)
        return [w[-1] // (group_size if own_part else 1) if flag else None for w, flag in zip(ws, flags, strict=True)]

    def exchange(self, x: Tensor, w: Any, group_size: int) -> Exchange:
        make = getattr(shapes, self.op)
        w_shapes = [w.shape] if isinstance(w, Tensor) else [[each.shape for each in w]]
        if self.op == "all_gather_matmul" and isinstance(w, Tensor):
            w_shapes = [[w.shape]]
        return make(x.shape, *w_shapes, *self.arguments(group_size), group_size)

    def arguments(self, group_size: int) -> list[Any]:
        """The arguments of the dispatcher op between the bias and the group, except the by-product."""
        arguments: dict[str, list[Any]] = {
            "matmul_all_to_all": [self.sizes(group_size)[2], self.gather_dim, self.scatter_dim],
            "all_to_all_matmul": [self.gather_dim, self.scatter_dim],
            "all_gather_matmul": [self.gather_dim],
            "matmul_reduce_scatter": [self.reduce_op, self.scatter_dim],
            "matmul_all_reduce": [self.reduce_op],
        }
        return arguments[self.op]

    def call(self, inputs: Inputs, group: Any = None, **options: Any) -> Any:
        args, kwargs = self.user_arguments(inputs, group)
        return getattr(fusedcomm, self.op)(*args, **kwargs, **options)

    def plan(self, inputs: Inputs, group: Any = None) -> fusedcomm.Plan:
        args, kwargs = self.user_arguments(inputs, group)
        return fusedcomm.explain(self.op, *args, **kwargs)

    def user_arguments(self, inputs: Inputs, group: Any) -> tuple[list[Any], dict[str, Any]]:
        x, w, bias = inputs
        dims = [dim for dim in (self.gather_dim, self.scatter_dim) if dim is not None]
        options: dict[str, Any] = {"partial_bias" if self.partial else "bias": bias}
        if self.op == "matmul_all_to_all":
            scattered = w.shape[-1] // self.n if self.out_shape else 1  # how many parts columns have
            options["out_shape"] = self.sizes(scattered)[2]
        if self.op in ("matmul_reduce_scatter", "matmul_all_reduce"):
            options["reduce_op"] = self.reduce_op
        return [x, w, *dims, group], options

    def dispatched(self, inputs: Inputs, by_product: bool = False) -> tuple[Any, ...]:
        """The arguments of ``torch.ops.fusedcomm.<op>`` on WORLD; ``by_product``: ask for the second result."""
        x, w, bias = inputs
        if self.op == "all_gather_matmul" and isinstance(w, Tensor):
            w, bias = [w], [bias]
        asked = [by_product] if self.op in GATHERS else []
        group = dist.group.WORLD
        where = *self.arguments(group.size()), *asked, *EVEN[self.op], group.size(), group.group_name
        return (x, w, None, *where, bias) if self.partial else (x, w, bias, *where)


GATHERS = ("all_to_all_matmul", "all_gather_matmul")
OPS = ("matmul_all_to_all", *GATHERS, "matmul_reduce_scatter", "matmul_all_reduce")


PROBLEMS = [
    Problem("rows-gathered", (6, 5), 7, 0, 1),
    Problem("columns-gathered", (6, 5), 7, 1, 0),
    Problem("batch-rows-to-columns", (2, 6, 5), 8, 1, 2),
    Problem("batch-columns-to-rows", (2, 6, 5), 8, 2, 1),
    Problem("batch-scattered", (2, 6, 5), 8, 1, 0),
    Problem("batch-gathered", (2, 6, 5), 8, 0, 2),
    Problem("heads", (2, 6, 5), 12, 1, -2, out_shape=(4, 3)),
    Problem("head-dim-scattered", (2, 6, 5), 12, 1, -1, out_shape=(4, 3)),
    Problem("packed-qkv", (2, 6, 5), 24, 1, 3, out_shape=(3, 2, 4), bias=True),
    Problem("packed-qkv-rows-scattered", (2, 6, 5), 24, 3, 1, out_shape=(3, 2, 4), bias=True),
    Problem("bias", (7, 5), 6, 0, 1, bias=True),
    Problem("transposed-w", (7, 5), 6, 0, 1, bias=True, transposed=True),
    Problem("batched-w", (3, 6, 5), 8, 1, 2, batched=True),
    Problem("batched-w-heads", (3, 6, 5), 8, 1, -2, out_shape=(4, 2), batched=True, bias=True),
    Problem("batched-w-rows-scattered", (3, 6, 5), 8, 0, 1, batched=True),
    Problem("batched-w-batch-scattered", (3, 6, 5), 8, 1, 0, batched=True),
    Problem("two-batch-dims", (2, 3, 4, 5), 6, 2, 1, batched=True),
    Problem("two-batch-dims-columns", (2, 3, 4, 5), 6, 0, 3, batched=True),
    Problem("three-lead-dims", (2, 3, 4, 5), 6, 1, 2),
    Problem("columns-to-columns", (4, 5), 12, 1, 2, out_shape=(4, 3)),
    Problem("one-row", (1, 29), 37, 0, 1),
    Problem("ragged", (37, 29), 50, 0, 1),
    Problem("zero-rows", (0, 5), 4, 0, 1),
    Problem("zero-k", (4, 0), 6, 0, 1, bias=True),
]
HEADS = next(problem for problem in PROBLEMS if problem.name == "heads")


def integers(problem: Problem, rank: int, group_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Small integers: every product, partial sum and average is exact in every dtype. They differ by rank and seed."""
    x_shape, w_shapes, _ = problem.sizes(group_size)
    x = _integers(x_shape, 1000 * seed + rank)
    if problem.reduce_op == "avg":
        x = x * group_size
    ws = [_integers(shape, 1000 * seed + 100 + 10 * i + rank).to(dtype) for i, shape in enumerate(w_shapes)]
    if problem.transposed:
        ws = [w.mT.contiguous().mT for w in ws]
    bias_seed = 1000 * seed + 200 + (0 if problem.op == "matmul_all_reduce" and not problem.partial else rank)
    sizes = problem.bias_sizes(group_size)
    biases = [None if size is None else _integers([size], bias_seed + 10 * i).to(dtype) for i, size in enumerate(sizes)]
    if problem.partial:
        scale = group_size if problem.reduce_op == "avg" else 1
        biases = [None if rank == 1 or each is None else each * scale for each in biases]
    return (x.to(dtype), ws, biases) if isinstance(problem.n, tuple) else (x.to(dtype), ws[0], biases[0])


def _integers(shape: list[int], seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def flat(inputs: Inputs) -> list[Tensor | None]:
    x, w, bias = inputs
    if isinstance(w, Tensor):
        return [x, w, bias]
    return [x, *w, *([None] * len(w) if bias is None else bias)]


def leaves(
    problem: Problem, rank: int, group_size: int, dtype: torch.dtype = torch.float32, seed: int = 0, frozen: str = ""
) -> list[Tensor | None]:
    """`integers` that require grad, but for those of the kinds that are ``frozen``."""
    pairs = zip(flat(integers(problem, rank, group_size, dtype, seed)), problem.kinds, strict=True)
    return [t if t is None else t.detach().requires_grad_(kind not in frozen) for t, kind in pairs]


def unflat(problem: Problem, tensors: Sequence[Tensor | None]) -> Inputs:
    x, *rest = tensors
    assert x is not None
    half = len(rest) // 2
    if isinstance(problem.n, tuple):
        return x, rest[:half], rest[half:]
    return x, rest[0], rest[1]


def whole_group(
    problem: Problem, inputs: Sequence[Sequence[Tensor | None]], group_size: int
) -> tuple[list[list[Tensor]], list[Tensor] | None]:
    """Each rank's results, and its exchanged or gathered x, by one process; ``inputs``: of `flat`, by rank."""
    num_ws = len(problem.ns)
    xs, ws, biases = [i[0] for i in inputs], [i[1 : 1 + num_ws] for i in inputs], [i[1 + num_ws :] for i in inputs]

    def cut(t: Tensor) -> tuple[Tensor, ...]:
        return t.tensor_split(group_size, problem.scatter_dim)

    def exchanged(ts: list[Tensor]) -> list[Tensor]:
        blocks = [cut(t) for t in ts]
        return [torch.cat([b[dst] for b in blocks], problem.gather_dim) for dst in range(group_size)]

    def matmul(x: Tensor, rank: int) -> list[Tensor]:
        ys = [x @ w for w in ws[rank]]
        return [y if bias is None else y + bias for y, bias in zip(ys, biases[rank], strict=True)]

    if problem.op == "matmul_all_to_all":
        columns = problem.sizes(group_size)[2]
        ys = [matmul(x, rank)[0] for rank, x in enumerate(xs)]
        return [[out] for out in exchanged([y if columns is None else y.unflatten(-1, columns) for y in ys])], None
    if problem.op == "all_to_all_matmul":
        arrived = exchanged(xs)
        return [matmul(x.flatten(-problem.k_dims), rank) for rank, x in enumerate(arrived)], arrived
    if problem.op == "all_gather_matmul":
        gathered = torch.cat(xs, problem.gather_dim)
        return [matmul(gathered, rank) for rank in range(group_size)], [gathered] * group_size
    ys = (
        [matmul(x, rank)[0] for rank, x in enumerate(xs)]
        if problem.partial
        else [x @ w[0] for x, w in zip(xs, ws, strict=True)]
    )
    total = torch.stack(ys).sum(0)
    total = total / group_size if problem.reduce_op == "avg" else total
    parts = cut(total) if problem.op == "matmul_reduce_scatter" else [total] * group_size
    return [[y if problem.partial or b[0] is None else y + b[0]] for y, b in zip(parts, biases, strict=True)], None


def expected(problem: Problem, group_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Any]:
    """The result of every rank, as its call returns it."""
    doubles = [_doubles(problem, rank, group_size, seed) for rank in range(group_size)]
    outs = [[exact(out, dtype) for out in rank_outs] for rank_outs in whole_group(problem, doubles, group_size)[0]]
    return outs if isinstance(problem.n, tuple) else [out for (out,) in outs]


def expected_by_product(problem: Problem, group_size: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Every rank's exchanged or gathered x."""
    doubles = [_doubles(problem, rank, group_size, seed) for rank in range(group_size)]
    arrived = whole_group(problem, doubles, group_size)[1]
    assert arrived is not None
    return [exact(x, dtype) for x in arrived]


def _doubles(problem: Problem, rank: int, group_size: int, seed: int) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in flat(integers(problem, rank, group_size, seed=seed))]


def exact(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in ``dtype``, where nothing may be lost: otherwise the test's numbers are too large."""
    rounded = t.to(dtype)
    assert torch.equal(rounded.double(), t.double())
    return rounded
