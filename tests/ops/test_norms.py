"""An all_reduce with a residual and an RMSNorm behind it: values, gradients, graphs, errors, calls without Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import fusedcomm
from fusedcomm.plan.geometry import norm
from tests.helpers.groups import empty_is_nan, fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared import CALLS, IN_PYTHON, python_calls, started_group
from tests.helpers.spies import Dispatched, pushed

SHAPES = [(4, 8), (5, 7), (2, 3, 16), (33, 97), (1, 1), (0, 8), (4, 0)]  # of the sum
K, EPS = 6, 1e-5
ALGORITHMS = ["unfused", "chunked"]


@contextmanager
def way(name: str) -> Iterator[None]:
    """How payloads of any size go."""
    with mock.patch.object(norm, "goes_at_once", lambda *args: name == "one_shot"):
        yield


def integers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


class Case:
    """The inputs of all ranks, in float64. Sums are exact; `expected` is the program of one process."""

    def __init__(self, shape: tuple[int, ...], num_ranks: int, has_bias: bool = True, has_weight: bool = True) -> None:
        n = shape[-1]
        self.xs = [integers(r, *shape[:-1], K) for r in range(num_ranks)]
        self.ws = [integers(10 + r, K, n) for r in range(num_ranks)]
        self.residual = integers(20, *shape)
        self.bias = integers(21, n) if has_bias else None
        self.weight = integers(22, n).abs() + 1 if has_weight else None

    def expected(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        terms = sum((x @ w for x, w in zip(self.xs, self.ws, strict=True)), torch.zeros(()))
        out = (terms + self.residual + (0 if self.bias is None else self.bias)).to(dtype)
        return F.rms_norm(out.double(), out.shape[-1:], self.weight, EPS), out

    def call(self, rank: int, dtype: torch.dtype, group: Any = None, with_matmul: bool = True) -> tuple[Tensor, Tensor]:
        x, w, residual, bias, weight = (
            None if t is None else t.to(dtype)
            for t in (self.xs[rank], self.ws[rank], self.residual, self.bias, self.weight)
        )
        if with_matmul:
            return fusedcomm.matmul_all_reduce_norm(x, w, residual, weight, group, bias=bias, eps=EPS)
        return fusedcomm.all_reduce_norm(x @ w, residual, weight, group, bias=bias, eps=EPS)


def check(got: tuple[Tensor, Tensor], case: Case, dtype: torch.dtype) -> None:
    (normed, out), (want, sums) = got, case.expected(dtype)
    assert torch.equal(out, sums) and normed.is_contiguous() and out.is_contiguous()
    rtol = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(normed.double(), want, rtol=rtol, atol=0)
    ours = torch.stack([normed, out]).view(torch.uint8).int()
    everyones = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, ours)
    assert all(torch.equal(each, ours) for each in everyones), "ranks must have the same bits"


@on_ranks()
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values(rank: int, world_size: int, algorithm: str) -> None:
    for name in ("one_shot", "two_shot"):
        with way(name), fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
            for i, shape in enumerate(SHAPES):
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    case = Case(shape, world_size, has_bias=i % 2 == 0, has_weight=i % 3 != 1)
                    for with_matmul in (True, False):
                        check(case.call(rank, dtype, with_matmul=with_matmul), case, dtype)


@on_ranks(2)
def test_values_in_several_rounds(rank: int) -> None:
    case = Case((67, 64), 2)
    for name in ("one_shot", "two_shot"):
        forced = fusedcomm.force_algorithm("chunked", strict=True)
        with way(name), fresh_group(WORKSPACE_BYTES="8192") as group, forced:
            check(case.call(rank, torch.float32, group), case, torch.float32)


@on_ranks(2)
def test_batches_and_strides(rank: int) -> None:
    xs = [integers(r, 3, 4, K, dtype=torch.float32) for r in range(2)]
    ws = [integers(9 + r, 3, K, 8, dtype=torch.float32) for r in range(2)]
    residual = integers(5, 8, 4, 3, dtype=torch.float32).permute(2, 1, 0)
    weight = torch.arange(16.0)[::2]
    for name in ("one_shot", "two_shot"):
        with way(name), fusedcomm.force_algorithm("chunked", strict=True):
            normed, out = fusedcomm.matmul_all_reduce_norm(xs[rank], ws[rank], residual, weight, eps=EPS)
        want = xs[0] @ ws[0] + xs[1] @ ws[1] + residual
        assert torch.equal(out, want)
        torch.testing.assert_close(normed, F.rms_norm(want, (8,), weight, EPS))


@on_ranks(2)
@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
def test_no_python_runs_from_the_third_call_on(rank: int, name: str) -> None:
    case = Case((6, 32), 2)
    with way(name), started_group("chunked") as group, python_calls() as calls:
        found = [case.call(rank, torch.float32, group) for _ in range(CALLS)]
    assert len(calls) == IN_PYTHON, calls
    assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(found[0], each, strict=True))


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients(rank: int, algorithm: str) -> None:
    for has_bias, has_weight in ((True, True), (False, False)):
        case = Case((2, 3, 8), 2, has_bias, has_weight)
        leaves = {"x": case.xs, "w": case.ws, "residual": case.residual, "bias": case.bias, "weight": case.weight}
        mine = {name: each[rank] if isinstance(each, list) else each for name, each in leaves.items()}
        given = [t.requires_grad_() for t in mine.values() if t is not None]
        weights = [torch.arange(1.0, 49.0).view(2, 3, 8), torch.arange(48.0, 0.0, -1).view(2, 3, 8)]
        want = torch.autograd.grad(case.expected(), given, [t.double() for t in weights])
        own = {name: None if t is None else t.detach().float().requires_grad_() for name, t in mine.items()}
        with fusedcomm.force_algorithm(algorithm, strict=True):
            x, w, residual, bias, weight = own.values()
            results = fusedcomm.matmul_all_reduce_norm(x, w, residual, weight, bias=bias, eps=EPS)
            got = torch.autograd.grad(results, [t for t in own.values() if t is not None], weights)
        torch.testing.assert_close([t.double() for t in got], [*want], rtol=1e-4, atol=1e-4)
        y = (mine["x"] @ mine["w"]).detach().float().requires_grad_()
        with fusedcomm.force_algorithm(algorithm, strict=True):
            normed, _ = fusedcomm.all_reduce_norm(y, residual, weight, bias=bias, eps=EPS)
            of_y, of_residual = torch.autograd.grad(normed.sum(), [y, residual])
        assert torch.equal(of_y, of_residual)


@on_ranks(2)
def test_k_of_nothing(rank: int) -> None:
    residual = torch.arange(16.0).view(2, 8)
    for name in ("one_shot", "two_shot"):
        with way(name), fusedcomm.force_algorithm("chunked", strict=True):
            _, out = fusedcomm.matmul_all_reduce_norm(torch.ones(2, 0), torch.ones(0, 8), residual, None)
        assert torch.equal(out, residual)


@on_ranks(2)
def test_second_derivatives(rank: int) -> None:
    """Of a group of one rank: finite differences. What ranks add up is as in `matmul_all_reduce`."""
    alone = [dist.new_group([each]) for each in range(2)][rank]
    shapes = (3, 4), (4, 5), (3, 5), (5,), (5,)
    x, w, residual, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)

    def call(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return fusedcomm.matmul_all_reduce_norm(x, w, residual, weight, alone, bias=bias)

    torch.autograd.gradgradcheck(call, (x, w, residual, weight, bias))


@on_ranks(2)
def test_in_graphs(rank: int) -> None:
    case = Case((4, 8), 2)
    x, w, residual = case.xs[rank].float(), case.ws[rank].float(), case.residual.float()
    with Dispatched() as dispatched:
        want = fusedcomm.matmul_all_reduce_norm(x, w, residual, None)
    op = torch.ops.fusedcomm.matmul_all_reduce_norm.default
    torch.library.opcheck(op, tuple(dispatched.arguments("fusedcomm::matmul_all_reduce_norm")))
    compiled = torch.compile(lambda *args: fusedcomm.matmul_all_reduce_norm(*args, None), fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(x, w, residual), want, strict=True))


@on_ranks(2)
def test_a_plan_is_explained(rank: int) -> None:
    y = torch.ones(4, 4096)
    plan = fusedcomm.explain("all_reduce_norm", y, y, None)
    assert plan.algorithm == "chunked"
    fusedcomm.all_reduce_norm(y, y, None)
    assert "Norm" in str(fusedcomm.explain("all_reduce_norm", y, y, None).schedule)


@on_ranks(2)
@pytest.mark.parametrize("other", ["the plain op", "eps"])
def test_peers_that_call_something_else_are_told(rank: int, other: str) -> None:
    y = torch.ones(8, 8)
    with started_group("chunked", TIMEOUT_S="5") as group, way("two_shot"), pytest.raises(fusedcomm.PeerMismatchError):
        if rank == 0 or other == "eps":
            fusedcomm.all_reduce_norm(y, y, None, group, eps=rank)
        else:
            fusedcomm.all_reduce(y, group)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"residual": torch.ones(3, 8)}, ValueError, r"residual must have the shape of the sum, \[4, 8\], got \[3, 8\]"),
    ({"residual": torch.ones(4, 8).double()}, ValueError, "residual must have x's dtype"),
    ({"norm_weight": torch.ones(4)}, ValueError, r"norm_weight must have shape \[N\] = \[8\], got \[4\]"),
    ({"bias": torch.ones(4)}, ValueError, r"bias must have shape \[N\] = \[8\], got \[4\]"),
    ({"eps": -1.0}, ValueError, "eps must be at least 0, got -1.0"),
    ({"residual": None}, TypeError, "residual must be a tensor, got None"),
    ({"norm_weight": 1.0}, TypeError, "norm_weight must be a tensor, got 1.0"),
    ({"eps": "small"}, TypeError, "eps must be a float, got 'small'"),
]


@on_ranks(2)
def test_bad_input_is_an_error_before_anything_is_sent(rank: int) -> None:
    for change, error, text in BAD:
        given: dict[str, Any] = {"residual": torch.ones(4, 8), "norm_weight": None, **change}
        for call in (fusedcomm.all_reduce_norm, partial(fusedcomm.matmul_all_reduce_norm, torch.ones(4, 3))):
            with pushed() as sent, pytest.raises(error, match=text):
                call(torch.ones((3 if isinstance(call, partial) else 4), 8), **given)
            assert not sent.chunks
