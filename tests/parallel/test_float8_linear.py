"""A linear layer in float8, forward and backward, against one process. tests/models has torchao's own, beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedcomm
from fusedcomm.memory.group import resolve
from fusedcomm.parallel.float8_linear import GATHER, HELD, REDUCE, SCATTER, Casts, Move, scaled_linear
from tests.helpers.groups import empty_is_nan
from tests.helpers.on_ranks import on_ranks

K, N, TOKENS = 24, 48, 7
CASTS = Casts(torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2, False, (True, False, False))
DIMS = {GATHER: (1, 0, 2), SCATTER: (2, 1, 1), REDUCE: (2, 1, None), HELD: (None, 0, 2)}  # sharded, of x, weight and y


def random(seed: int, *shape: int) -> Tensor:
    """The last element is by far the largest, on the last rank alone; 448 and 57344 are powers of two times it."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    made.view(-1)[-1] = 7
    return made


def exact(t: Tensor, dtype: torch.dtype) -> Tensor:
    values, scale = fusedcomm.quantize(t, "TensorWise", dtype)
    return values.double() * scale


@on_ranks(3)
@pytest.mark.parametrize("op", DIMS)
def test_a_layer(rank: int, op: str) -> None:
    """Result and gradients are products of the operands cast as wholes; parts of tokens differ in size, and a second
    derivative is an error."""

    def part(t: Tensor, dim: int | None) -> Tensor:
        return t if dim is None else t.chunk(3, dim)[rank]

    whole_x, whole_weight, whole_grad = random(1, 2, TOKENS, K), random(2, N, K), random(3, 2, TOKENS, N)
    x8, weight8 = exact(whole_x, CASTS.x), exact(whole_weight, CASTS.weight)
    grad8 = exact(whole_grad, CASTS.grad)
    of_x, of_weight, of_y = DIMS[op]
    wants = [
        part(x8 @ weight8.mT, of_y),
        part(grad8 @ weight8, of_x),
        part(grad8.flatten(0, 1).mT @ x8.flatten(0, 1), of_weight),
    ]
    for frozen in (None, "x", "weight"):
        x = part(whole_x, of_x).clone().requires_grad_(frozen != "x")
        weight = part(whole_weight, of_weight).clone().requires_grad_(frozen != "weight")
        with empty_is_nan():
            y = scaled_linear(x, weight, Move(op, 1, TOKENS, *resolve(None)), CASTS)
            y.backward(part(whole_grad, of_y))
        for found, want in zip((y.detach(), x.grad, weight.grad), wants, strict=True):
            if found is not None:
                torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
        assert (x.grad is None, weight.grad is None) == (frozen == "x", frozen == "weight")
    x.requires_grad_()
    y = scaled_linear(x, weight.detach(), Move(op, 1, TOKENS, *resolve(None)), CASTS)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
