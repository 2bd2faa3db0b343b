"""Reductions that are added become one: graphs, their values on simulated ranks, and what is fused then."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from fusedcomm.compile.merge.sums import SumMerger
from tests.helpers.graphs import collectives_of, run_passes, targets
from tests.helpers.merge_world import AR, MESHES, RS, Calls, World, fake_world, inputs, kinds, simulate, traced

SHAPE = (8, 4, 6)
Program = Callable[[Calls, Tensor, Tensor, Tensor], Any]
MERGED: dict[str, tuple[Program, list[tuple[Any, ...]]]] = {
    "all_reduce": (lambda c, a, b, d: c.ar(a, 0) + c.ar(b, 0), [(AR, 0)]),
    "avg": (lambda c, a, b, d: c.ar(a, 0, op="avg") + c.ar(b, 0, op="avg"), [(AR, 0)]),
    "of four, as a tree": (lambda c, a, b, d: (c.ar(a, 0) + c.ar(b, 0)) + (c.ar(d, 0) + c.ar(a * 2, 0)), [(AR, 0)]),
    "another term between": (lambda c, a, b, d: (a + c.ar(a, 0) + d + c.ar(b, 0)).relu(), [(AR, 0)]),
    "two groups": (lambda c, a, b, d: c.ar(a, 0) + c.ar(a, 1) + c.ar(b, 0) + c.ar(d, 1), [(AR, 0), (AR, 1)]),
    "views": (
        lambda c, a, b, d: (c.ar(a.view(32, 6), 0) + c.ar(b, 0).view(32, 6)).view(4, 48) + c.ar(d, 0).view(4, 48),
        [(AR, 0)],
    ),
    "permuted": (lambda c, a, b, d: c.ar(a.permute(1, 0, 2), 0) + c.ar(b, 0).permute(1, 0, 2).contiguous(), [(AR, 0)]),
    "reduce_scatter": (lambda c, a, b, d: c.rs(a, 0) + c.rs(b, 0), [(RS, 0)]),
    "scattered along different dims": (lambda c, a, b, d: c.rs(a, 0, dim=1).view(4, 4, 6) + c.rs(b, 0), [(RS, 0)]),
    "of one tensor": (lambda c, a, b, d: c.ar(a, 0) + c.ar(a, 0), [(AR, 0)]),
    "two sums": (lambda c, a, b, d: (c.ar(a, 0) + c.ar(b, 0), c.ar(a * 2, 0) + c.ar(d, 0)), [(AR, 0), (AR, 0)]),
}
LEFT: dict[str, Program] = {
    "read elsewhere": lambda c, a, b, d: (r := c.ar(a, 0), r + c.ar(b, 0)),
    "the sum is read between": lambda c, a, b, d: (s := c.ar(a, 0) + d, s + c.ar(b, 0)),
    "groups": lambda c, a, b, d: c.ar(a, 0) + c.ar(b, 1),
    "sum and avg": lambda c, a, b, d: c.ar(a, 0) + c.ar(b, 0, op="avg"),
    "max": lambda c, a, b, d: c.ar(a, 0, op="max") + c.ar(b, 0, op="max"),
    "broadcast": lambda c, a, b, d: c.ar(a, 0) + c.ar(b[:1], 0),
    "dtypes": lambda c, a, b, d: c.ar(a, 0) + c.ar(b.float(), 0),
    "alpha": lambda c, a, b, d: torch.add(c.ar(a, 0), c.ar(b, 0), alpha=2),
    "cast": lambda c, a, b, d: c.ar(a.float(), 0).double() + c.ar(b, 0),
    "kinds": lambda c, a, b, d: c.ar(a[:4], 0) + c.rs(b, 0),
    "float16": lambda c, a, b, d: c.ar(a.half() / 2**14, 0) + c.ar(b.half() / 2**14, 0),
    "averages of float16": lambda c, a, b, d: c.rs(a.half() / 2**14, 0, op="avg") + c.rs(b.half() / 2**14, 0, op="avg"),
    "filled by an empty part": lambda c, a, b, d: c.ar(a, 0) + torch.zeros_like(b).slice_scatter(b[:0], 0, 0, 0),
    "written in place": lambda c, a, b, d: (r := c.ar(a, 0), a.mul_(2), r + c.ar(b, 0))[2],
}


@pytest.fixture
def world() -> Any:
    with fake_world(MESHES["2x3"]) as world:
        yield world


def merged(world: World, program: Program) -> tuple[Graph, SumMerger]:
    plain, module = (traced(lambda *xs: program(Calls(world), *xs), *[SHAPE] * 3, dtype=torch.float64) for _ in "12")
    merger = SumMerger(module.graph)
    merger.merge()
    module.graph.lint()
    parts = [inputs(world, SHAPE, seed) for seed in range(3)]
    given = [[t for (t,) in of_rank] for of_rank in zip(*parts, strict=True)]
    copies = [[t.clone() for t in of_rank] for of_rank in given]
    want = simulate(plain.graph, world, given)
    torch.testing.assert_close(simulate(module.graph, world, copies), want, rtol=0, atol=0)
    return module.graph, merger


@pytest.mark.parametrize("name", MERGED)
def test_a_sum_becomes(world: World, name: str) -> None:
    program, want = MERGED[name]
    graph, merger = merged(world, program)
    assert sorted(kinds(graph, world)) == want
    assert {into for into in merger.into.values() if into not in merger.into} == {
        node.name for node in graph.nodes if node.name in merger.into.values()
    }


@pytest.mark.parametrize("name", LEFT)
def test_a_sum_stays(world: World, name: str) -> None:
    before = kinds(traced(lambda *xs: LEFT[name](Calls(world), *xs), *[SHAPE] * 3, dtype=torch.float64).graph, world)
    graph, merger = merged(world, LEFT[name])
    assert kinds(graph, world) == before and not merger.into


def test_averages_of_integers_are_rounded(world: World) -> None:
    calls = Calls(world)
    module = traced(lambda a, b: calls.ar(a, 0, op="avg") + calls.ar(b, 0, op="avg"), SHAPE, SHAPE, dtype=torch.int64)
    SumMerger(module.graph).merge()
    assert len(kinds(module.graph, world)) == 2


@pytest.mark.parametrize("kind", [AR, RS])
def test_a_layer_reduces_its_gradient_once(world: World, kind: str) -> None:
    """What q, k and v are made of: three matmuls and three reductions become one op, on rows of [batch, tokens]."""
    calls = Calls(world)

    def program(*args: Tensor) -> Tensor:
        parts = [(x.flatten(0, 1) @ w).view(2, 12, 5) for x, w in zip(args[::2], args[1::2], strict=True)]
        q, k, v = (calls.ar(part, 0) if kind == AR else calls.rs(part, 0, dim=1) for part in parts)
        return q + k + v

    graph = traced(program, (2, 12, 8), (8, 5), (2, 12, 4), (4, 5), (2, 12, 4), (4, 5)).graph
    report = run_passes(graph)
    assert targets(graph, "fusedcomm") == ["matmul_all_reduce" if kind == AR else "matmul_reduce_scatter"]
    assert not collectives_of(graph)
    assert [line.status for line in report.collectives] == ["merged"] * 3 + ["fused"]
    last = report.collectives[-1]
    assert {line.reason for line in report.collectives[:3]} == {f"into {last.node}"}


def test_what_can_be_fused_apart_only_stays_apart(world: World) -> None:
    """A matmul and a batched one have no common op."""
    calls = Calls(world)

    def program(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return calls.ar(x @ w, 0).view(2, 3, 5) + calls.ar(torch.bmm(y, v), 0)

    shapes = (6, 4), (4, 5), (2, 3, 4), (2, 4, 5)
    graph = traced(program, *shapes).graph
    run_passes(graph)
    assert targets(graph, "fusedcomm") == ["matmul_all_reduce"] * 2
    module = traced(program, *shapes)
    SumMerger(module.graph).merge()  # nothing is to be fused: half as much is sent
    assert kinds(module.graph, world) == [(AR, 0)]
