"""Where parts differ in size, ranks have other graphs: what communicates keeps its order, whatever pays on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from fusedcomm.compile.graph.collectives import UNEVEN
from fusedcomm.compile.overlap import buckets, dependencies, scheduler
from fusedcomm.compile.overlap.estimator import group_name_of
from fusedcomm.compile.overlap.scheduler import schedule
from tests.compile.test_overlap_cases import N, estimator
from tests.compile.test_overlap_properties import fake_world
from tests.helpers.random_graphs import Peers, aten, functional
from tests.helpers.traced import Traced

RANKS, K = 4, 512
TOKENS, OTHERS, EVEN = [8192, 16, 16, 16], [16, 16, 16, 8192], [16] * RANKS  # by rank


class Ours(Traced):
    def __init__(self, tp: Peers) -> None:
        super().__init__()
        self.tp, self.w = tp, self.input(K, K)

    def product(self, x: Node, w: Node | None = None) -> Node:
        return self.call(aten.mm.default, x, w or self.w)

    def exchanged(self, y: Node, tokens: list[int]) -> Node:
        """This rank's block of K / R columns, of all ranks' tokens."""
        blocks = self.call(aten.clone.default, self.call(aten.view.default, y, [-1, RANKS, K // RANKS]))
        rows, sent = self.call(aten.view.default, blocks, [-1, K // RANKS]), [tokens[self.tp.rank]] * RANKS
        return self.waited(functional.all_to_all_single.default, rows, tokens, sent, self.tp.name)

    def read(self, *arrived: Node) -> GraphModule:
        w = self.input(K // RANKS, K)
        return self.returns(*(self.product(self.call(aten.relu.default, each), w) for each in arrived))


def two_exchanges(t: Ours) -> GraphModule:
    """One rank computes long for the first, another for the second."""
    x, z = t.input(TOKENS[t.tp.rank], K), t.input(OTHERS[t.tp.rank], K)
    first = t.exchanged(t.call(aten.relu.default, t.product(x)), TOKENS)
    return t.read(first, t.exchanged(t.call(aten.relu.default, z), OTHERS))


def with_gradient(t: Ours, x: Node, first: Node) -> GraphModule:
    """What arrived first, and the sum of a gradient of weights, which takes long on one rank."""
    partial = t.product(t.call(aten.permute.default, x, [1, 0]), x)
    total = t.waited(functional.all_reduce.default, partial, "sum", t.tp.name)
    return t.returns(t.product(first, t.input(K // RANKS, K)), t.call(aten.relu.default, total))


def padded_shards(t: Ours) -> GraphModule:
    """As DTensor exchanges them: all send as many, and the pass has noted on every rank that the graphs differ."""
    x = t.input(TOKENS[t.tp.rank], K)
    first = t.exchanged(t.call(aten.slice.Tensor, t.product(x), 0, 0, 16), EVEN)
    first.all_input_nodes[0].meta[UNEVEN] = "DTensor's shards are uneven along dim 0"
    return with_gradient(t, x, first)


def call_of_an_op(t: Ours) -> GraphModule:
    x, op = t.input(TOKENS[t.tp.rank], K), torch.ops.fusedcomm.matmul_all_to_all.default
    y = t.call(op, x, t.w, None, None, 0, 1, TOKENS, None, None, None, t.tp.rank, RANKS, t.tp.name)
    return with_gradient(t, x, y)


def order_of(rank: int, program: Callable[[Ours], GraphModule], fuse: bool) -> list[str]:
    with fake_world(rank) as groups:
        gm = program(Ours(groups[1]))
        schedule(gm, estimator=estimator(), fuse=fuse)
        return [node.name for node in gm.graph.nodes if group_name_of(node) is not None]


@pytest.mark.parametrize("program", [two_exchanges, padded_shards, call_of_an_op])
@pytest.mark.parametrize("fuse", [False, True])
def test_ranks_keep_one_order(program: Any, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [order_of(rank, program, fuse) for rank in range(RANKS)]
    assert len(orders[0]) == 2 and all(each == orders[0] for each in orders)
    for module in (dependencies, buckets, scheduler):
        monkeypatch.setattr(module, "differs_by_rank", lambda nodes: False)
    orders = [order_of(rank, program, fuse) for rank in range(RANKS)]
    assert any(each != orders[0] for each in orders)  # what pays on one rank does not on another


def test_nothing_is_fused_where_ranks_differ() -> None:
    """A sum that is fused elsewhere, as that pays; whether it does could be otherwise on another rank."""
    for rank, differs in ((0, False), (0, True), (1, True)):
        with fake_world(rank) as groups:
            t = Ours(groups[1])
            total = t.waited(functional.all_reduce.default, t.product(t.input(N, N), t.input(N, N)), "sum", t.tp.name)
            results = [t.call(aten.relu.default, total)]
            if differs:
                results.append(t.exchanged(t.input(TOKENS[rank], K), TOKENS))
            report = schedule(t.returns(*results), estimator=estimator())
            assert [each.op for each in report.fused] == ([] if differs else ["matmul_all_reduce"])
            if differs:
                assert "matmul_all_reduce: graphs of ranks differ" in report.reasons["all_reduce_default"][0]
                (reason, *_) = report.reasons["all_to_all_single_default"]
                sent = [TOKENS[rank]] * RANKS
                assert reason.endswith(
                    f"its splits are not known to be even: it sends {sent} and receives {TOKENS} rows"
                )
