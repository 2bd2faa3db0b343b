"""Programs with one exchange and something between it and its matmul: what moves, and the values of every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

import fusedcomm.compile
from fusedcomm.compile.fuse import cut_results
from fusedcomm.compile.graph.attempt import _warn_once
from tests.helpers.block_checks import interpreted, no_latency, saved_tensors
from tests.helpers.graphs import recorded_graphs
from tests.helpers.model_blocks import all_to_all
from tests.helpers.on_ranks import on_ranks

TOKENS, HEADS, HEAD_DIM = 4, 4, 4
DIM = HEADS * HEAD_DIM
Values = dict[str, Tensor]
Program = Callable[[Values], Any]
BEFORE: dict[
    str, Callable[[Tensor, Values], Tensor]
] = {  # between a matmul's result [t, heads, head_dim] and an exchange
    "softmax": lambda y, v: y.softmax(-1),
    "variance of a head": lambda y, v: y / (1 + y.var(-1, keepdim=True)),
    "where": lambda y, v: torch.where(v["token"] > 0, y, 0.0),
    "masked_fill": lambda y, v: y.sin().masked_fill(v["token"] > 0, -1.0),
    "comparison": lambda y, v: (y > v["token"]) * y,
    "in place into a smaller dtype": lambda y, v: torch.empty_like(y, dtype=torch.bfloat16).copy_(y * v["token"]),
    "in place": lambda y, v: y.mul(2).add_(v["token"]).mul_(v["token"]),
    "number of its own": lambda y, v: torch.tanh(y) * v["number"],
    "number of a larger dtype": lambda y, v: y.bfloat16() * v["number"],
    "tensor per head": lambda y, v: y.sin() * v["head"] + v["all"],
    "positions": lambda y, v: y * (torch.arange(TOKENS) + dist.get_rank() * TOKENS)[:, None, None].float().cos(),
    **{
        f"table in {dtype}": lambda y, v, dtype=dtype: y * v["token"].detach().abs().to(dtype).to(y.dtype)
        for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn)  # which gloo does not send
    },
    "sum of rounded numbers": lambda y, v: y.sin() * y.sin().sum(1, True, dtype=torch.bfloat16),
    "mean of heads and tokens": lambda y, v: y - y.mean(dim=(0, 1), keepdim=True),
    "sum over everything": lambda y, v: y / (1 + y.square().sum()),
    "residual": lambda y, v: y.sin() + v["x"].unflatten(1, (HEADS, HEAD_DIM)),
    "norm across heads": lambda y, v: F.rms_norm(y.flatten(1), (DIM,), v["feature"]).unflatten(1, (HEADS, HEAD_DIM)),
    "dropout of a mask": lambda y, v: y * F.dropout(torch.ones_like(y), 0.0) * v["token"],
}
STAYS = {  # with what stands in its way
    "softmax over heads": (lambda y, v: y.softmax(1), "a move would cost what it saves"),
    "running sum": (lambda y, v: y.cumsum(1), "cumsum stands between"),
    "layer norm across heads": (
        lambda y, v: F.layer_norm(y.flatten(1), (DIM,), v["feature"]).unflatten(1, (HEADS, HEAD_DIM)),
        "a move would cost what it saves",
    ),
    "turned heads": (lambda y, v: y.flip(1), "rev stands between"),
}
BEHIND: dict[str, Callable[[Tensor, Values], Tensor]] = {  # between an exchange and a matmul
    "norm": lambda y, v: F.rms_norm(y, (HEAD_DIM,), v["in head"]),
    "gate": lambda y, v: y * v["all"].sigmoid(),
    "number per token": lambda y, v: y * v["token"],
}


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_to_all(x, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return all_to_all(grad.contiguous(), dist.group.WORLD)


def to_heads(y: Tensor) -> Tensor:
    """[t, heads, head_dim] -> [R t, heads / R, head_dim]"""
    world_size = dist.get_world_size()
    y = y.unflatten(1, (world_size, -1)).transpose(0, 1).contiguous()
    return Exchange.apply(y).flatten(0, 1)


def to_tokens(y: Tensor) -> Tensor:
    world_size = dist.get_world_size()
    return Exchange.apply(y.unflatten(0, (world_size, -1)).contiguous()).transpose(0, 1).flatten(1, 2)


def inputs() -> Values:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    shapes = {
        "x": (TOKENS, DIM),
        "w": (DIM, DIM),
        "token": (TOKENS, 1, 1),
        "head": (HEADS, 1),
        "in head": (HEAD_DIM,),
        "feature": (DIM,),
        "all": (TOKENS, HEADS, HEAD_DIM),
        "number": (),
        "y": (TOKENS * world_size, HEADS // world_size, HEAD_DIM),
        "wide": (DIM, 3 * DIM),
    }
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def results(program: Program, values: Values) -> list[Tensor | None]:
    outs = program(values)
    outs = outs if isinstance(outs, tuple) else (outs,)
    loss = sum((out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in outs)
    return [*outs, *torch.autograd.grad(loss, list(values.values()), allow_unused=True)]


def check(program: Program, commute: bool = True) -> fusedcomm.compile.CompileReport:
    torch._dynamo.reset()  # all programs come from few lines
    values = inputs()
    want = results(program, values)
    with no_latency(), fusedcomm.compile.enabled(commute=commute) as report:
        got = results(torch.compile(program, fullgraph=True, backend=interpreted), values)
    for a, b in zip(got, want, strict=True):
        if a is None or b is None:  # a gradient that is 0 everywhere may be left out
            assert all(each is None or not each.any() for each in (a, b))
        else:
            torch.testing.assert_close(a, b, rtol=1e-4 if b.dtype == torch.float32 else 2e-2, atol=1e-4)
    return report


def product(v: Values) -> Tensor:
    return (v["x"] @ v["w"]).unflatten(1, (HEADS, HEAD_DIM))


@pytest.mark.filterwarnings("error:fusedcomm.compile")
@on_ranks(2)
@pytest.mark.parametrize("name", BEFORE)
def test_ops_between_a_matmul_and_an_exchange(rank: int, name: str) -> None:
    check(lambda v: to_heads(BEFORE[name](product(v), v)))


@on_ranks(2)
@pytest.mark.parametrize("name", BEHIND)
def test_ops_between_an_exchange_and_a_matmul(rank: int, name: str) -> None:
    check(lambda v: BEHIND[name](to_tokens(v["y"]), v).flatten(1) @ v["w"])


@on_ranks(2)
@pytest.mark.parametrize("name", STAYS)
def test_what_mixes_blocks_stays(rank: int, name: str) -> None:
    op, reason = STAYS[name]
    report = check(lambda v: to_heads(op(product(v), v)))
    assert report.collectives[0].reason.endswith(f"commute: {reason}"), report.collectives[0].reason


@on_ranks(2)
def test_a_norm_across_heads_keeps_no_more_for_the_backward(rank: int) -> None:
    """Its input is kept, the normed tensor computed again; a weight and a number per token are of all ranks."""
    kept = {}
    for commute in (True, False):
        torch._dynamo.reset()
        values = inputs()
        program = torch.compile(
            lambda v: to_heads(BEFORE["norm across heads"](product(v), v)), fullgraph=True, backend=interpreted
        )
        with no_latency(), fusedcomm.compile.enabled(commute=commute), saved_tensors(values.values()) as saved:
            program(values)
        kept[commute] = sum(saved.values())
    assert kept[False] < kept[True] <= kept[False] + 4 * (DIM + dist.get_world_size() * TOKENS)


@on_ranks(2)
def test_sums_that_the_forward_returns_wait_for_no_gradient(rank: int) -> None:
    def program(v: Values) -> Any:
        y = product(v)
        squares = y.square().mean((1, 2), keepdim=True)
        return to_heads(y * torch.rsqrt(squares + 1)), squares

    check(program)


@on_ranks(2)
@pytest.mark.parametrize("bias", [1, 3 * DIM])
def test_a_wide_matmul_with_a_bias_is_cut(rank: int, bias: int) -> None:
    def program(v: Values) -> Any:
        y = torch.addmm(v["wide"][0, :bias], v["x"], v["wide"])
        return to_heads(y[:, :DIM].unflatten(1, (HEADS, HEAD_DIM)).sin()), y[:, DIM:].sin()

    check(program)


@on_ranks(2)
def test_rows_that_are_one_are_not_cut_as_several(rank: int) -> None:
    def program(v: Values) -> Any:
        y = (v["x"][:1] @ v["wide"]).expand(TOKENS, -1)
        return to_heads(y[:, :DIM].unflatten(1, (HEADS, HEAD_DIM)).sin()), y[:, DIM:].sin()

    check(program)


def part_of_a_wide_matmul(v: Values, op: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    part, rest = (v["x"] @ v["wide"]).split([DIM, 2 * DIM], dim=1)
    return to_heads(op(part.unflatten(1, (HEADS, HEAD_DIM)))), rest.cos()


@on_ranks(2)
@pytest.mark.parametrize("moves", [True, False])
def test_a_matmul_is_cut_where_its_own_exchange_moves(rank: int, moves: bool) -> None:
    def program(v: Values) -> Any:
        op = torch.sin if moves else lambda y: y.cumsum(1)
        return *part_of_a_wide_matmul(v, op), to_heads(product(v).sin())

    with recorded_graphs() as graphs:
        report = check(program)
    assert [line.status == "fused" for line in report.collectives if line.graph == "forward"] == [moves, True]
    wide = [n for n in graphs[0].find_nodes(op="call_function", target=torch.ops.aten.mm.default) if is_wide(n)]
    assert len(wide) == (0 if moves else 1)


def is_wide(node: Node) -> bool:
    return node.meta["val"].shape[1] == 3 * DIM


@on_ranks(2)
def test_where_cutting_a_matmul_fails_the_other_exchanges_move(rank: int) -> None:
    def program(v: Values) -> Any:
        return *part_of_a_wide_matmul(v, torch.sin), to_heads(product(v).sin())

    _warn_once.cache_clear()
    broken = mock.patch.object(cut_results, "cut", lambda *args, cut=cut_results.cut: cut(*args) and 1 / 0)
    with broken, pytest.warns(UserWarning, match="commute failed.*division by zero"):
        report = check(program)
    assert [line.status == "fused" for line in report.collectives if line.graph == "forward"] == [False, True]


def square(v: Values) -> Any:
    joined = torch.cat([to_tokens(v["y"].repeat(8, 1, 1)).flatten(1), v["x"].repeat(8, 1)], 1)
    w = torch.cat([v["w"], v["w"]])
    return joined @ w, joined.permute(0, 1) @ w.cos()


def of_an_integer(v: Values) -> Any:
    joined = torch.cat([torch.full((len(v["x"]), DIM), 257), v["x"].bfloat16(), to_tokens(v["y"]).flatten(1)], 1)
    return joined @ torch.cat([v["w"]] * 3)


def of_two_dtypes(v: Values) -> Any:
    joined = torch.cat([to_tokens(v["y"]).bfloat16().flatten(1), v["x"]], 1)
    return joined @ torch.cat([v["w"], v["w"]])


def scaled_by_amax(v: Values) -> Tensor:
    y = to_tokens(v["y"]).flatten(1)
    return (y / y.abs().amax().clamp(min=0.1)) @ v["w"]


def turned(v: Values) -> Tensor:
    table = torch.polar(torch.ones(TOKENS, HEAD_DIM // 2), v["token"].detach().flatten(1).expand(-1, HEAD_DIM // 2))
    k = torch.view_as_complex((product(v) * 1.5).contiguous().unflatten(-1, (-1, 2))) * table[:, None]
    q, k = (to_heads(each).transpose(0, 1) for each in (product(v), torch.view_as_real(k).flatten(-2)))
    return q @ k.transpose(-1, -2)


BROKE = [of_an_integer, of_two_dtypes, square, scaled_by_amax, turned]


@on_ranks(2)
@pytest.mark.thorough
@pytest.mark.parametrize("commute", [True, False])
@pytest.mark.parametrize("program", BROKE)
def test_programs_that_broke_a_pass(rank: int, program: Program, commute: bool) -> None:
    """Two dtypes, a permute that is no transpose, an amax without a dim, one of two equal products turned."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusedcomm.compile")  # a pass that fails says so
        check(program, commute)
