"""Residual and RMSNorm behind a sum of unchanged programs join its op: of few rows, or of scattered ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

import fusedcomm.compile
from fusedcomm.plan.geometry import norm
from tests.helpers.block_checks import interpreted
from tests.helpers.graphs import recorded_graphs, rewritten, targets
from tests.helpers.on_ranks import on_ranks
from tests.helpers.program_parts import all_gather, reduce_scatter, world

T, K, N = 4, 6, 8
Norm = Callable[[Tensor, Tensor], Tensor]


def inverse(h: Tensor) -> Tensor:
    return torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def llama(r: Tensor, weight: Tensor) -> Tensor:
    h = r.to(torch.float32)
    return weight * (h * inverse(h)).to(r.dtype)


def gemma(r: Tensor, weight: Tensor) -> Tensor:
    h = r.float()
    return (h * inverse(h) * (1.0 + weight.float())).type_as(r)


def power(r: Tensor, weight: Tensor) -> Tensor:
    h = r.float()
    return (h * torch.pow((h * h).mean(-1, keepdim=True) + 1e-6, -0.5) * weight.float()).type_as(r)


def permuted_weight(r: Tensor, weight: Tensor) -> Tensor:
    return llama(r, weight.view(2, -1).t().reshape(-1))


def without_weight(r: Tensor, weight: Tensor) -> Tensor:
    h = r.float()
    return (h * inverse(h)).to(r.dtype)


NORMS: dict[str, Norm] = {each.__name__: each for each in (llama, gemma, power, permuted_weight, without_weight)}


def reduced(y: Tensor, op: str = "sum") -> Tensor:
    return funcol.all_reduce(y, op, world())


def layer(n: Norm, bias: bool = True) -> Callable[..., Any]:
    def program(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, b: Tensor) -> Any:
        y = reduced(x @ w).view(2, -1, N)
        r = residual + (y + b if bias else y)
        return n(r, weight), r

    return program


def scattered(dim: int) -> Callable[..., Any]:
    def program(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, b: Tensor) -> Any:
        y = reduce_scatter((x @ w).view(2, -1, N), "sum", dim, world())
        r = residual.chunk(2, dim)[0] + (y + b)
        return llama(r, weight), r

    return program


PROGRAMS = {name: layer(n) for name, n in NORMS.items()} | {"no bias": layer(llama, False)}
PROGRAMS["one result"] = lambda x, w, r, g, b: llama(reduced(x @ w).view(2, -1, N) + r, g)
SCATTERED = {f"scattered {dim}": "matmul_reduce_scatter_norm" for dim in range(2)}
PROGRAMS |= {name: scattered(dim) for dim, name in enumerate(SCATTERED)}


def arguments(rank: int, dtype: torch.dtype, rows: int = T) -> list[Tensor]:
    """Each rank has its own residual."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (rows, K), (K, N), (2, rows // 2, N)
    own = [torch.randint(-3, 4, shape, generator=generator).to(dtype) for shape in shapes]
    return [*own, torch.linspace(0.5, 2, N).to(dtype), torch.arange(N).to(dtype)]


def passed(program: Callable[..., Any], args: list[Tensor]) -> tuple[Any, list[str]]:
    gm, report = rewritten(program, args)
    assert all(line.status in ("fused", "plain") for line in report.collectives), report
    return gm(*args), targets(gm.graph, "fusedcomm")


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_spelling(rank: int, dtype: torch.dtype) -> None:
    args = arguments(rank, dtype)
    for name, program in PROGRAMS.items():
        got, ops = passed(program, args)
        assert ops == [SCATTERED.get(name, "matmul_all_reduce_norm")], name
        rounding = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0}  # the program rounds twice, or once
        torch.testing.assert_close(got, program(*args), **rounding)


MISSES: dict[str, Callable[..., Any]] = {
    "average": lambda x, w, r, g, b: llama(reduced(x @ w, "avg").view(2, -1, N) + r, g),
    "sum read twice": lambda x, w, r, g, b: (lambda y: (llama(y + r, g), y))(reduced(x @ w).view(2, -1, N)),
    "added to itself": lambda x, w, r, g, b: (lambda y: llama(y + y, g))(reduced(x @ w)),
    "scaled": lambda x, w, r, g, b: llama(torch.add(r, reduced(x @ w).view(2, -1, N), alpha=2), g),
    "another dim": lambda x, w, r, g, b: (lambda h: h * torch.rsqrt(h.pow(2).mean(0, True) + 1e-6))(reduced(x @ w) + b),
    "layer norm": lambda x, w, r, g, b: F.layer_norm(reduced(x @ w).view(2, -1, N) + r, (N,), g),
    "transposed": lambda x, w, r, g, b: llama(reduced(x @ w).T.view(-1, T) + g[:, None].expand(N, T), g[:T]),
    "columns": lambda x, w, r, g, b: llama(
        reduce_scatter(x @ w, "sum", 1, world()) + r.flatten(0, 1)[:, : N // 2], g[: N // 2]
    ),
    "weight of the sum": lambda x, w, r, g, b: (lambda y: llama(y, y.amax((0, 1))))(reduced(x @ w).view(2, -1, N) + r),
    "later residual": lambda x, w, r, g, b: llama(reduced(x[:2] @ w) + all_gather(r[0, :1], 0, world()), g),
    "rows of a bias": lambda x, w, r, g, b: llama(reduced(x @ w) + g[:T, None], g),
    "residual in float64": lambda x, w, r, g, b: llama(reduced(x @ w).view(2, -1, N) + r.double(), g),
}


@on_ranks(2)
def test_near_misses(rank: int) -> None:
    args = arguments(rank, torch.float32)
    for name, program in MISSES.items():
        got, ops = passed(program, args)
        assert ops[0] in ("matmul_reduce_scatter", "matmul_all_reduce"), name
        torch.testing.assert_close(got, program(*args), msg=name)


@on_ranks(2)
def test_more_rows_have_owners(rank: int) -> None:
    """Their owners' residuals would be everyone's."""
    most = norm._MOST[2] // N
    with torch.no_grad():
        for rows in (most, most + 2):
            gm, _ = rewritten(PROGRAMS["no bias"], arguments(rank, torch.bfloat16, rows))
            norms = rows == most
            assert targets(gm.graph, "fusedcomm") == ["matmul_all_reduce_norm" if norms else "matmul_all_reduce"]


@on_ranks(2)
@pytest.mark.parametrize("most", [64, pytest.param(None, marks=pytest.mark.thorough)])
def test_layers_compiled_forward_and_backward(rank: int, most: int | None) -> None:
    """Two layers, so that a tail's residual is that of the one before; a number of tokens with a bound, or none."""

    def program(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, b: Tensor) -> Any:
        for _ in range(2):
            residual = residual + (reduced(x @ w) + b)
            normed = F.rms_norm(residual, (N,), weight)
            x = normed[:, :K]
        return normed, residual

    args = [each.requires_grad_() for each in arguments(rank, torch.float32, 16)]
    args[2] = args[2].detach().flatten(0, 1).requires_grad_()
    for each in (args[0], args[2]):
        torch._dynamo.mark_dynamic(each, 0, **({} if most is None else {"min": 4, "max": most}))

    def results(f: Callable[..., Any]) -> list[Tensor]:
        outs = f(*args)
        return [*outs, *torch.autograd.grad([each.square().sum() for each in outs], args)]

    with recorded_graphs() as graphs, fusedcomm.compile.enabled():
        got = results(torch.compile(program, fullgraph=True, backend=interpreted))
    op = "matmul_all_reduce" if most is None else "matmul_all_reduce_norm"
    assert targets(graphs[0], "fusedcomm") == [op] * 2, graphs[0]
    torch.testing.assert_close(got, results(program), rtol=1e-4, atol=1e-3)  # float32; gradients up to 100
