"""What one rank sends and does not read: its peers may read theirs, so that it takes part in the ops all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

import fusedcomm.compile
from fusedcomm.compile.commute.commuter import erase_copies
from fusedcomm.compile.commute.digests import MOVED
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.collectives import functional
from fusedcomm.compile.passes import FusedcommPass, Settings
from fusedcomm.compile.reports import CompileReport
from tests.helpers.graphs import collectives_of, targets
from tests.helpers.merge_world import WAIT, fake_world, traced
from tests.helpers.on_ranks import on_ranks
from tests.helpers.program_parts import world

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
    report = CompileReport()
    with fake_world([0, 1]):
        graph = traced(program, (4, 6), (6, 8)).graph
        FusedcommPass(Settings(), report)(graph)
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
    assert f"{op}: nothing reads what arrives" in report.collectives[0].reason


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
