"""The hint that a graph break stands between a collective and its matmul."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedcomm.compile.graph import breaks
from tests.helpers.merge_world import MESHES, Calls, fake_world, traced


def ends(c: Calls, x: Tensor) -> Any:
    arrived = c.ar(x.view(4, 6), 0)
    return arrived.relu(), c.ar(x.relu(), 0).view(3, 8), c.ar(x.sin(), 0).cos(), c.ar(x.cos(), 1)[:1]


def test_a_collective_at_an_end_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    counters: dict[str, dict[str, int]] = {"graph_break": {}}
    monkeypatch.setattr(torch._dynamo.utils, "counters", counters)
    with fake_world(MESHES["2x3"]) as world:
        graph = traced(lambda x: ends(Calls(world), x), (8, 3)).graph
        assert breaks.hints(graph) == {}
        counters["graph_break"] |= {"an older one": 1, "call of print\nExplanation": 2}
        want = [
            "; what it sends is an input of the graph, and dynamo has broken graphs, last for: call of print",
            "; the graph ends with it, and dynamo has broken graphs, last for: call of print",
        ]
        assert list(breaks.hints(graph).values()) == want


def test_dynamo_counts_why_it_broke_a_graph() -> None:
    """The counter is private: this fails where another release of torch has none."""

    def program(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    torch._dynamo.reset()
    before = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch.compile(program, backend="eager")(torch.ones(2))
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) > before
