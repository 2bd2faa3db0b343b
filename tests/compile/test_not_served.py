"""Programs of ranks that cannot understand each other end within the time-out, on every rank, and say why."""

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
from torch.fx import Graph
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

import fusedcomm.compile
from fusedcomm.compile.commute.commuter import erase_copies
from fusedcomm.compile.commute.digests import MOVED
from fusedcomm.compile.graph import breaks, collectives
from fusedcomm.compile.graph.collectives import functional
from fusedcomm.compile.reports import CompileReport
from fusedcomm.memory.errors import PeerTimeoutError
from tests.helpers.block_checks import interpreted, no_latency
from tests.helpers.graphs import collectives_of, run_passes, targets
from tests.helpers.merge_world import MESHES, WAIT, Calls, fake_world, traced
from tests.helpers.on_ranks import on_ranks
from tests.helpers.program_parts import world

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
@pytest.mark.parametrize("matmul", [pytest.param(False, marks=pytest.mark.thorough), True])
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


# What one rank sends and does not read: its peers may read theirs, so that it takes part in the ops all the same.
Collective = Callable[[Tensor], Tensor]


def name() -> str:
    return world().group_name  # type: ignore[no-any-return]


def all_to_all(t: Tensor) -> Tensor:
    return WAIT(functional.all_to_all_single(t, [2, 2], [2, 2], name()))  # type: ignore[no-any-return]


BEHIND_A_MATMUL: dict[str, Collective] = {
    "matmul_all_to_all": all_to_all,
    "matmul_reduce_scatter": lambda y: WAIT(functional.reduce_scatter_tensor(y, "sum", 2, name())),
    "matmul_all_reduce": lambda y: WAIT(functional.all_reduce(y, "sum", name())),
}
BEFORE_A_MATMUL: dict[str, Collective] = {
    "all_to_all_matmul": all_to_all,
    "all_gather_matmul": lambda x: WAIT(functional.all_gather_into_tensor(x, 2, name())),
}


def passed(program: Callable[..., Any]) -> tuple[Graph, CompileReport]:
    with fake_world([0, 1]):
        graph = traced(program, (4, 6), (6, 8)).graph
        report = run_passes(graph)
    graph.eliminate_dead_code()
    return graph, report


def calls(graph: Graph) -> list[tuple[Any, ...]]:
    found = (node for node in graph.nodes if getattr(node.target, "namespace", "") == "fusedcomm")
    return [(node.target, *map_arg(node.args, lambda each: each.meta["val"].shape)) for node in found]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("op", BEHIND_A_MATMUL)
def test_the_op_is_called_as_on_a_rank_that_reads_it(op: str, times: int) -> None:
    def program(read: bool) -> Callable[[Tensor, Tensor], Tensor]:
        def run(x: Tensor, w: Tensor) -> Tensor:
            y = BEHIND_A_MATMUL[op](x @ w)
            for _ in range(times - 1):  # torch's functional collectives wait, and users wait for their results
                y = WAIT(y)
            return y if read else x + 1

        return run

    (graph, report), (other, _) = (passed(program(read)) for read in (False, True))
    assert [line.op for line in report.collectives] == [op]
    assert calls(graph) == calls(other) and len(calls(graph)) == 1
    assert not collectives_of(graph)


@pytest.mark.parametrize("op", BEFORE_A_MATMUL)
def test_what_peers_multiply_is_not_known(op: str) -> None:
    graph, report = passed(lambda x, w: (BEFORE_A_MATMUL[op](x), x + 1)[1])
    assert not collectives_of(graph) and targets(graph, "fusedcomm") == [op.removesuffix("_matmul")]
    assert f"{op}: what arrives goes to nothing, not to a matmul" in report.collectives[0].reason


@on_ranks(2)
@pytest.mark.thorough
def test_one_rank_reads_it(rank: int) -> None:
    """Inductor's code keeps the call: without it the reader would wait for its peer."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        y = all_to_all(x @ w)
        return y if rank == 0 else (x @ w).relu() @ w.mT

    x, w = torch.randn(4, 6) + rank, torch.randn(6, 8)
    want = program(x, w)
    with fusedcomm.compile.enabled(overlap=True, commute=True):
        got = torch.compile(program, fullgraph=True)(x, w)
    torch.testing.assert_close(got, want)


FORWARD, RECOMPUTE = {"partitioner_tag": "is_forward"}, {"recompute": CheckpointPolicy.MUST_RECOMPUTE}


@pytest.mark.parametrize("of_backward", [False, True])
@pytest.mark.parametrize(
    ("meta", "goes"),
    [
        ({}, (False, False)),  # the program's own
        (FORWARD, (False, True)),
        (FORWARD | RECOMPUTE, (False, False)),
        (FORWARD | RECOMPUTE | {MOVED: "0"}, (True, True)),
    ],
    ids=["own", "forward", "checkpointed", "moved"],
)
def test_copies_of_what_the_other_graph_sends(meta: dict[str, Any], goes: tuple[bool, bool], of_backward: bool) -> None:
    """Nothing reads the first, whose wait is waited for again; the second has a reader."""
    with fake_world([0, 1]):
        graph = traced(lambda x, w: (WAIT(all_to_all(x)), all_to_all(x + w))[1], (4, 6), (4, 6)).graph
        for start in collectives.find(graph, "all_to_all"):
            start.meta.update(meta)
        erase_copies(graph, of_backward)
    graph.lint()
    assert len(collectives_of(graph)) == 2 - goes[of_backward]
    assert len(graph.find_nodes(op="call_function", target=WAIT)) == 3 - 2 * goes[of_backward]
