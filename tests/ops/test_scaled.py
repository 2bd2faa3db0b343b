"""Scaled matmuls: values of every recipe, dtype pair and layout against float64, graphs, errors, what is sent."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fusedcomm
from fusedcomm.ops.table import SCALED
from tests.helpers.groups import empty_is_nan
from tests.helpers.on_ranks import on_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RECIPES = ["TensorWise", "RowWise", "BlockWise"]
OPS = [spec.name for spec in SCALED]
DIMS: dict[str, list[tuple[int, ...]]] = {  # of x [batch, rows, K], or of the product [batch, rows, N]
    "scaled_matmul_all_to_all": [(1, 2), (0, 1), (2, 1)],
    "scaled_all_to_all_matmul": [(2, 1), (1, 2), (0, 1)],
    "scaled_all_gather_matmul": [(1,), (0,), (2,)],
    "scaled_matmul_reduce_scatter": [(1,), (2,)],
    "scaled_matmul_all_reduce": [()],
}
GATHERS = OPS[1:3]


class Operand(NamedTuple):
    values: Tensor
    scale: Tensor
    of_each: Tensor  # the scale of each value

    @property
    def exact(self) -> Tensor:
        return self.values * self.of_each


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def operand(seed: int, recipe: str, lead: tuple[int, ...], rows: int, k: int, rows_block: int) -> Operand:
    """[*lead, rows, k], and scales that are powers of two; ``rows_block``: rows of a block."""
    shape = [*lead, rows, 1]
    if recipe == "TensorWise":
        shape = [] if seed % 2 else [1]
    elif recipe == "BlockWise":
        shape = [*lead, -(-rows // rows_block), -(-k // 128)]
    values, scale = integers(seed, *lead, rows, k), 2.0 ** integers(seed + 1, *shape).float()
    of_each = scale
    if recipe == "BlockWise":
        of_each = scale.repeat_interleave(rows_block, -2).repeat_interleave(128, -1)[..., :rows, :k]
    return Operand(values, scale, of_each)


class Case:
    """A call of all ranks."""

    def __init__(self, op: str, recipe: str, size: int, dims: tuple[int, ...]) -> None:
        self.op, self.size, self.dims = op, size, dims
        gathers_k, cuts_k = (op in GATHERS and dims[i : i + 1] == (2,) for i in (0, 1))
        ragged_k, n = 7 * size, 5 * size
        if recipe == "BlockWise":
            ragged_k, n = 150, 128 * size if 2 in dims and op not in GATHERS else 150
        k = 128 * (size if cuts_k else 1) if recipe == "BlockWise" and (gathers_k or cuts_k) else ragged_k
        whole_k = k * size if gathers_k else k // size if cuts_k else k
        self.xs = [operand(20 * r, recipe, (2 * size,), 3 * size, k, 1) for r in range(size)]
        self.ws = [operand(20 * r + 11, recipe, (), n, whole_k, 128) for r in range(size)]  # transposed
        self.bias = integers(99, n)

    def expected(self, rank: int, dtype: torch.dtype) -> Tensor:
        """Rank r's result, by one process."""
        xs, ws = [each.exact for each in self.xs], [each.exact.mT for each in self.ws]
        if self.op in GATHERS:
            parts = [x.chunk(self.size, self.dims[1])[rank] for x in xs] if len(self.dims) > 1 else xs
            return (torch.cat(parts, self.dims[0]) @ ws[rank] + self.bias).to(dtype)
        ys = [x @ w for x, w in zip(xs, ws, strict=True)]
        if self.op == OPS[0]:
            sent = [(y + self.bias).chunk(self.size, self.dims[1])[rank] for y in ys]
            return torch.cat(sent, self.dims[0]).to(dtype)
        total = sum((y.to(dtype).double() for y in ys), torch.zeros(()))
        if not self.dims:
            return (total + self.bias).to(dtype)
        bias = self.bias.chunk(self.size)[rank] if self.dims == (2,) else self.bias
        return (total.chunk(self.size, self.dims[0])[rank] + bias).to(dtype)

    def call(self, rank: int, pair: tuple[torch.dtype, torch.dtype], dtype: torch.dtype, k_first: bool) -> Tensor:
        """``k_first``: whether K of w is contiguous."""
        x, w = self.xs[rank], self.ws[rank]
        x8, w8 = x.values.to(pair[0]), w.values.to(pair[1]).mT
        scale_w = w.scale.mT if w.scale.ndim > 1 else w.scale
        bias = self.bias
        if self.op == "scaled_matmul_reduce_scatter" and self.dims == (2,):
            bias = bias.chunk(self.size)[rank]
        op = getattr(fusedcomm, self.op)
        w8 = w8 if k_first else w8.contiguous()
        made: Tensor = op(x8, w8, x.scale, scale_w, *self.dims, bias=bias.to(dtype), out_dtype=dtype)
        return made


@on_ranks()
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", ["unfused", "chunked", "pipelined"])
@pytest.mark.parametrize("op", OPS)
def test_values(rank: int, world_size: int, algorithm: str, op: str) -> None:
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        for i, recipe in enumerate(RECIPES):
            for j, dims in enumerate(DIMS[op]):
                case, dtype = Case(op, recipe, world_size, dims), OUT_DTYPES[j % 3]
                got, want = case.call(rank, PAIRS[(i + j) % 3], dtype, j % 2 == 0), case.expected(rank, dtype)
                assert got.dtype == dtype
                # backends add in the payload's dtype, and the bias once more
                rtol, atol = (3 * torch.finfo(dtype).eps, 4) if algorithm == "unfused" and "reduce" in op else (0, 0)
                torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=f"{recipe}, {dims}")


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["unfused", "chunked", "pipelined"])
@pytest.mark.parametrize("op", GATHERS)
def test_x_alone(rank: int, algorithm: str, op: str) -> None:
    """Scales of the gathered x, which the caller has, are not sent; float8 travels as in the plain ops."""
    group = fusedcomm.memory.group.resolve(None)
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        for recipe, dims in itertools.product(RECIPES, DIMS[op]):
            case = Case(op, recipe, 2, dims)
            w, parts = case.ws[rank], [x.values for x in case.xs]
            if len(dims) > 1:
                parts = [x.chunk(2, dims[1])[rank] for x in parts]
            gathered = torch.cat(parts, dims[0])
            scales = operand(77, recipe, gathered.shape[:1], *gathered.shape[1:], 1)
            want = (gathered * scales.of_each) @ w.exact.mT
            lists = len(dims) == 1
            w8, scale_w = w.values.to(E5M2).mT, w.scale.mT if w.scale.ndim > 1 else w.scale
            tensors = [[each] if lists else each for each in (w8, None, scale_w)]
            where = (dims[0], True, None, None) if lists else (*dims, True, None, None, None, None)
            x8 = case.xs[rank].values.to(E4M3)
            y, got = getattr(torch.ops.fusedcomm, op)(
                x8, *tensors[:2], scales.scale, tensors[2], torch.float32, False, *where, None, *group
            )
            assert got.dtype == E4M3 and torch.equal(got.double(), gathered)
            torch.testing.assert_close(y[0] if lists else y, want.float(), rtol=0, atol=0)
            plain = fusedcomm.all_gather(x8, *dims) if lists else fusedcomm.all_to_all(x8, *dims)
            assert torch.equal(plain.double(), gathered)
