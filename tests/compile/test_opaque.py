"""Custom ops of other packages that hold a collective: listed, and written out where their meaning is known."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import sympy
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusedcomm.compile
from fusedcomm.compile.graph import opaque
from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout, quotient
from fusedcomm.compile.graph.rewrite import consecutive
from fusedcomm.compile.passes import Settings
from tests.helpers.block_checks import interpreted
from tests.helpers.graphs import collectives_of, recorded_graphs, run_passes, targets
from tests.helpers.merge_world import MESHES, Calls, World, fake_world, traced
from tests.helpers.on_ranks import on_ranks

_lib = torch.library.Library("deepspeed", "FRAGMENT")
_others = torch.library.Library("somepackage", "FRAGMENT")


def define() -> None:
    """DeepSpeed's op with its fake and gradient, where DeepSpeed is not imported; and one that nobody knows."""
    if hasattr(torch.ops.deepspeed, "dim_zero_all_to_all"):
        return

    def exchange(x: Tensor, group_name: str) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=dist.distributed_c10d._resolve_process_group(group_name))
        return out

    def reduced(x: Tensor, group_name: str, scale: float = 1.0) -> Tensor:
        out = x * scale
        dist.all_reduce(out, group=dist.distributed_c10d._resolve_process_group(group_name))
        return out

    def keep(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.group_name = inputs[1]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.ops.deepspeed.dim_zero_all_to_all(grad.contiguous(), ctx.group_name), None

    _lib.define("dim_zero_all_to_all(Tensor input, str group_name) -> Tensor")
    _others.define("reduced(Tensor x, str group_name, float scale=1.0) -> Tensor")
    for lib, name, kernel in ((_lib, "dim_zero_all_to_all", exchange), (_others, "reduced", reduced)):
        lib.impl(name, kernel, "CPU")
        torch.library.register_fake(f"{lib.ns}::{name}", lambda x, *args: torch.empty_like(x), lib=lib)
    torch.library.register_autograd("deepspeed::dim_zero_all_to_all", backward, setup_context=keep, lib=_lib)


@pytest.fixture
def world() -> Iterator[World]:
    define()
    with patch.dict(opaque._programs), patch.dict(opaque._keys), fake_world(MESHES["2x3"]) as world:
        yield world


def reduce_scaled(x: Tensor, group_name: str, scale: float = 1.0) -> Tensor:
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_reduce(x * scale, "sum", group_name))


def test_an_unknown_op_is_listed_until_it_is_registered(world: World) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.somepackage.reduced(x @ w, world.name(0), scale=2.0) + Calls(world).ar(x @ w, 0)

    for _ in range(2):
        graph = traced(program, (4, 3), (3, 5)).graph
        report = run_passes(graph)
        found = {line.collective: line for line in report.collectives if line.node.startswith("reduced")}
        if found:
            assert found["somepackage::reduced"].status == "exposed"
            assert "register_collective" in found["somepackage::reduced"].reason
        else:
            assert not targets(graph, "somepackage")
        before = Settings().uuid()
        fusedcomm.compile.register_collective("somepackage::reduced", reduce_scaled)
        assert Settings().uuid() == Settings().uuid() != before  # the key of compiled graphs
    assert [line.status for line in report.collectives] == ["plain", "fused"]


def test_a_program_that_returns_something_else_is_not_put_in_place(world: World) -> None:
    fusedcomm.compile.register_collective("somepackage::reduced", lambda x, group_name: x.sum())
    graph = traced(lambda x: torch.ops.somepackage.reduced(x, world.name(0)), (4, 3)).graph
    before = str(graph)
    with pytest.warns(UserWarning, match="must return what the op does"):
        opaque.expand(graph)
    assert str(graph) == before


def test_a_name_that_is_no_group_is_none(world: World) -> None:
    graph = traced(lambda x: torch.ops.somepackage.reduced(x, "no group"), (4, 3)).graph
    assert not any(map(opaque.name_of, graph.nodes))


@pytest.mark.parametrize("name", ["reduced", "::reduced", "aten::add", "fusedcomm::matmul_all_reduce"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match='name must be "namespace::op" of a custom op'):
        fusedcomm.compile.register_collective(name, reduce_scaled)


def test_only_callables_are_taken() -> None:
    with pytest.raises(TypeError, match="program must be callable"):
        fusedcomm.compile.register_collective("somepackage::reduced", None)  # type: ignore[arg-type]


@on_ranks(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_deepspeeds_exchange(rank: int, dynamic: bool) -> None:
    """As its Ulysses for Hugging Face models writes it, both ways, forward and backward: values, and all is fused."""
    define()
    group_name = dist.group.WORLD.group_name
    exchange = torch.ops.deepspeed.dim_zero_all_to_all

    def program(x: Tensor, w: Tensor, wo: Tensor) -> Tensor:  # x: [tokens / 2, batch, K]
        tokens, batch, _ = x.shape
        heads = (x @ w).reshape(tokens, batch, 2, 2, 4).permute(2, 0, 1, 3, 4).contiguous()
        mine = exchange(heads, group_name).reshape(2 * tokens, batch, 2, 4).contiguous()
        out = (mine.sigmoid() * mine).reshape(2, tokens, batch, 8).contiguous()
        back = exchange(out, group_name).permute(1, 2, 0, 3)
        return back.reshape(tokens, batch, 16).contiguous() @ wo

    torch.manual_seed(rank)
    args = [torch.randn(shape, requires_grad=True) for shape in ((6, 2, 8), (8, 16), (16, 8))]
    if dynamic:
        torch._dynamo.mark_dynamic(args[0], 0)
    answers = []
    with recorded_graphs() as graphs, fusedcomm.compile.enabled() as report:
        for run in (program, torch.compile(program, fullgraph=True, backend=interpreted)):
            out = run(*args)
            answers.append([out, *torch.autograd.grad((out * torch.arange(8)).sum(), args)])
    torch.testing.assert_close(*answers)
    text = str(report)
    assert [targets(graph, "deepspeed") + collectives_of(graph) for graph in graphs] == [[], []], text
    assert [sorted(targets(graph, "fusedcomm")) for graph in graphs] == [
        ["all_to_all_matmul", "matmul_all_to_all"],
        ["all_to_all_matmul", "matmul_all_to_all"],
    ], text


# Layouts against the elements themselves: chains of views, permutes and exchanges of a tensor of indices.
SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@st.composite
def reshapes(draw: Any, shape: list[int]) -> list[int]:
    primes = [p for p, n in sympy.factorint(math.prod(shape)).items() for _ in range(n)]
    dims = [1] * draw(st.integers(1, 5))
    for prime in draw(st.permutations(primes)):
        dims[draw(st.integers(0, len(dims) - 1))] *= prime
    return dims


def elements(order: list[Factor], first: list[Factor]) -> Tensor:
    """Indices into a tensor that has the factors in the order of ``first``, arranged in that of ``order``."""
    t = torch.arange(math.prod(f.size for f in first)).view([f.size for f in first] or [1])  # type: ignore[arg-type]
    return t.permute([first.index(f) for f in order]).flatten() if order else t


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_chain_of_views_and_permutes(data: Any) -> None:
    shape = data.draw(SHAPES)
    t, layout = torch.arange(math.prod(shape)).view(shape), Layout.of(shape)
    first = layout
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            dims = data.draw(st.permutations(range(t.ndim)))
            t, layout = t.permute(dims), layout.permute(dims)
        else:
            new = data.draw(reshapes(list(t.shape)))
            try:
                layout = layout.reshape(new)
            except CannotFuse:
                return
            t = t.reshape(new)
        assert layout.shape == list(t.shape)
    assert elements(layout.order, first.order).equal(t.flatten())
    assert sorted(map(id, layout.order)) == sorted(map(id, first.order))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_runs_of_factors_are_as_long_as_can_be(data: Any) -> None:
    order = [Factor(2) for _ in range(data.draw(st.integers(1, 6)))]
    wanted = data.draw(st.permutations(order))
    runs = consecutive(order, wanted)
    assert [factor for run in runs for factor in run] == wanted
    position = {factor: i for i, factor in enumerate(order)}
    assert all(position[b] == position[a] + 1 for run in runs for a, b in pairwise(run))
    assert all(position[b[0]] != position[a[-1]] + 1 for a, b in pairwise(runs))


@pytest.mark.parametrize(
    ("shape", "new", "message"),
    [
        ([4, 6], [6, 4], "a dim of 6 ends inside a block of 4"),
        ([0, 6], [6, 0], "it has no elements"),
        ([4, 6], [4, 3], "its elements do not fill"),
    ],
)
def test_what_cannot_be_said_in_factors(shape: list[int], new: list[int], message: str) -> None:
    with pytest.raises(CannotFuse, match=message):
        Layout.of(shape).reshape(new)


def test_symbolic_sizes_divide_where_they_must() -> None:
    a, b = sympy.symbols("a b", integer=True, positive=True)
    assert quotient(6 * a * b, 2 * b) == 3 * a
    assert quotient(6 * a, 2 * a) == 3
    assert quotient(a, 2) is None and quotient(a, b) is None and quotient(5, 2) is None
