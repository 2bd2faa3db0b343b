"""Symbolic sizes: where a pass takes them from, and ranks of which some have static shapes."""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fusedcomm.compile
from fusedcomm.compile.graph.layout import CannotFuse, size_of
from fusedcomm.compile.graph.rewrite import Rewriter
from tests.helpers.block_checks import interpreted
from tests.helpers.graphs import run_passes, targets
from tests.helpers.merge_world import fake_world
from tests.helpers.on_ranks import on_ranks
from tests.helpers.program_parts import all_gather, reduce_scatter, world

K = 8
aten = torch.ops.aten


def exchanged(x: Tensor) -> Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single(x, None, None, world()))


def test_a_size_stands_before_its_reader_and_is_not_erased() -> None:
    graph = make_fx(lambda x: (x + 1).sum(0).sin(), tracing_mode="symbolic")(torch.ones(5, 6)).graph
    x, early, middle, late = (node for node in graph.nodes if node.op != "output")
    rewriter, made = Rewriter(graph), list[Any]()
    with rewriter.before(early, like=early):
        n = rewriter.call(aten.sym_size.int, x, 0)
    for place in (middle, early, late, late):
        if place is late and len(made) == 2:
            assert early < made[0] < middle and made[1] < early
            graph.erase_node(made[1])
        with rewriter.before(place, like=place):
            made.append(rewriter.size(size_of(2 * n.meta["val"] // 3)))
    assert middle < made[2] < late and made[2] is made[3]
    with pytest.raises(CannotFuse, match="no node of the graph has the size"), rewriter.before(x, like=x):
        rewriter.size(size_of(n.meta["val"]))
    graph.lint()


@on_ranks(2)
@pytest.mark.parametrize("by", ["gather", "exchange"])
def test_a_size_that_an_earlier_op_has_erased(rank: int, by: str) -> None:
    """The first op erases a reshape with its size, which the last one needs too."""

    def program(x: Tensor, w: Tensor) -> Any:
        b, s, _ = x.shape
        y = exchanged((x @ w).view(b, s, 2, K // 2).permute(2, 0, 1, 3).contiguous())
        y = all_gather(y.permute(1, 0, 2, 3).reshape(b * 2 * s, K // 2), 0, world())
        z = (y.view(2, b, 2 * s, K // 2).transpose(0, 1).reshape(b, 4 * s, K // 2) @ w[: K // 2]).relu()
        if by == "gather":
            return all_gather(z[:, : 2 * s].reshape(b * 2 * s, K), 0, world()) @ w, z
        return exchanged(z.view(b, 2, 2 * s, K).transpose(0, 1).reshape(2, b * 2 * s, K)).sin(), z

    x, w = torch.arange(3.0 * 4 * K).view(3, 4, K) / 99 + rank, torch.arange(1.0 * K * K).view(K, K) / 99
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(x, 0)
    with fusedcomm.compile.enabled() as report:
        got = torch.compile(program, fullgraph=True, backend=interpreted)(x, w)
    torch.testing.assert_close(got, program(x, w))
    last = "fused" if by == "gather" else "plain"
    assert [line.status for line in report.collectives] == ["fused", "fused", last], str(report)


# One rank's shapes are static, the other's are not: both take part in the same exchange.
def sharded(x: Tensor) -> Tensor:
    return torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, world().group_name)


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda x, w: exchanged(x.relu()).sin(),
    "behind a matmul": lambda x, w: exchanged(x @ w),
    "before a matmul": lambda x, w: exchanged(x.relu()) @ w,
    "halves of columns": lambda x, w: exchanged(x.relu().unflatten(1, (2, -1))).sin(),
    "shards": lambda x, w: sharded(x.relu()).sin(),
    "gathered": lambda x, w: all_gather(x.relu().unflatten(1, (2, -1)), 0, world()).sin(),
    "scattered": lambda x, w: reduce_scatter(x.relu().unflatten(1, (2, -1)), "sum", 0, world()).sin(),
}


@on_ranks(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rank_with_static_shapes_and_one_without(rank: int, name: str) -> None:
    program, x, w = PROGRAMS[name], torch.arange(6.0 * K).view(6, K) + rank, torch.ones(K, K)
    torch._dynamo.reset()
    with mock.patch.dict(os.environ, FUSEDCOMM_TIMEOUT_S="5"), fusedcomm.compile.enabled() as report:
        got = torch.compile(program, fullgraph=True, dynamic=rank == 1, backend=interpreted)(x, w)
    torch.testing.assert_close(got, program(x, w))
    assert report.collectives[0].status in ("plain", "fused"), str(report)


def test_a_plain_op_needs_no_node_with_a_size() -> None:
    with fake_world([0, 1]), mock.patch.object(Rewriter, "size", side_effect=CannotFuse):
        graph = make_fx(PROGRAMS["halves of columns"], tracing_mode="symbolic")(torch.ones(6, K), torch.ones(1)).graph
        run_passes(graph)
    assert targets(graph, "fusedcomm") == ["all_to_all"]


@on_ranks(2)
def test_an_odd_number_of_rows_is_torch_s_to_refuse(rank: int) -> None:
    torch._dynamo.reset()
    with fusedcomm.compile.enabled():
        compiled = torch.compile(exchanged, fullgraph=True, dynamic=True, backend=interpreted)
        assert compiled(torch.ones(6, 2)).equal(torch.ones(6, 2))
        with pytest.raises(RuntimeError, match="Split sizes"):
            compiled(torch.ones(7, 2))
    dist.barrier()
