"""Programs of ranks that cannot understand each other end within the time-out, on every rank, and say why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import fusedcomm.compile
from fusedcomm.compile.graph import breaks
from fusedcomm.errors import PeerTimeoutError
from tests.helpers.block_checks import interpreted, no_latency
from tests.helpers.merge_world import MESHES, Calls, fake_world, traced
from tests.helpers.on_ranks import on_ranks

TIMEOUT_S, MARGIN_S = 3, 5
N = 8


@contextmanager
def short_group() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDCOMM_TIMEOUT_S", str(TIMEOUT_S))
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
        torch._dynamo.reset()
        yield group
    dist.barrier()
    dist.destroy_process_group(group)


def failure(call: Callable[[], Any]) -> Exception:
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(Exception) as caught:
        call()
    assert time.monotonic() - began < TIMEOUT_S + MARGIN_S
    return caught.value


@on_ranks(2)
@pytest.mark.parametrize("matmul", [False, True])
def test_an_eager_collective_against_a_compiled_one(rank: int, matmul: bool) -> None:
    x = torch.ones(N, N)

    def program(x: Tensor) -> Tensor:
        return funcol.all_reduce(x @ x if matmul else x + 1, "sum", group)

    with short_group() as group, torch.no_grad(), fusedcomm.compile.enabled():
        compiled = torch.compile(program, backend=interpreted)
        torch.testing.assert_close(compiled(x), 2 * (x @ x if matmul else x + 1))
        error = failure(lambda: (program if rank == 0 else compiled)(x).sum().item())
        if rank > 0:
            assert isinstance(error, PeerTimeoutError) and "ranks [0] did not signal" in str(error), error


@on_ranks(2)
def test_a_rank_that_compiles_again_alone_behind_a_change_that_all_agreed_to(rank: int) -> None:
    """The first graph has one sum of both terms."""

    def program(x: Tensor, logs: bool) -> Any:
        a, b = funcol.all_reduce(x.sin(), "sum", group), funcol.all_reduce(x.cos(), "sum", group)
        return a + b, a.norm() if logs else None

    x = torch.ones(N, N)
    with short_group() as group, torch.no_grad(), no_latency(), fusedcomm.compile.enabled(overlap=True) as report:
        compiled = torch.compile(program, backend=interpreted)
        compiled(x, False)
        assert any(line.status == "merged" for line in report.collectives)
        failure(lambda: compiled(x, rank == 0))


# The hint that a graph break stands between a collective and its matmul.
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
