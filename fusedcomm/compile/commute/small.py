"""Small exchanges that moves need, joined: one of constants and one of partial gradients per graph, if nothing forbids.

A collective of a few kilobytes takes its latency, so several cost several times as much as one.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch.fx import Graph, Node

from fusedcomm.compile.commute.mover import PURPOSES, SMALL
from fusedcomm.compile.commute.places import shape
from fusedcomm.compile.graph.layout import product
from fusedcomm.compile.graph.rewrite import Rewriter, replace_node
from fusedcomm.compile.graph.sort import sort
from fusedcomm.compile.graph.views import WAIT, value

aten = torch.ops.aten


def join(graph: Graph) -> None:
    """Join collectives of one purpose, group and dtype that do not depend on each other."""
    rewriter = Rewriter(graph)
    for purpose in PURPOSES:
        for starts in alike(graph, purpose):
            if len(starts) > 1:
                _join(rewriter, starts)
        sort(graph)


def alike(graph: Graph, purpose: str) -> list[list[Node]]:
    """The small collectives of this purpose, those together that can be one: none of them depends on another."""
    found: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    level: dict[Node, int] = {}  # how many of these collectives a node depends on, one behind the other
    for node in graph.nodes:
        level[node] = max((level[each] for each in node.all_input_nodes), default=0)
        if node.meta.get(SMALL) == purpose:
            sent, *others = node.args
            found[node.target, str(others), value(sent).dtype, level[node]].append(node)  # type: ignore[arg-type]
            level[node] += 1
    return list(found.values())


def _join(rewriter: Rewriter, starts: list[Node]) -> None:
    """[R, ...] of each, side by side as [R, all elements]."""
    last = starts[-1]
    sents: list[Node] = [start.args[0] for start in starts]  # type: ignore[misc]
    with rewriter.before(last, like=last):
        widths = [product(shape(sent)[1:]) for sent in sents]
        group_size = shape(sents[0])[0]
        rows = [rewriter.reshape(sent, [group_size, width]) for sent, width in zip(sents, widths, strict=True)]
        start = rewriter.call(last.target, rewriter.call(aten.cat.default, rows, 1), *last.args[1:])
        start.meta[SMALL] = last.meta[SMALL]
        received = rewriter.call(aten.split_with_sizes.default, rewriter.call(WAIT, start), widths, 1)
        parts = [rewriter.call(operator.getitem, received, i) for i in range(len(starts))]
        parts = [
            rewriter.contiguous(rewriter.reshape(part, shape(sent))) for part, sent in zip(parts, sents, strict=True)
        ]
    for old, part in zip(starts, parts, strict=True):
        (wait,) = old.users
        replace_node(wait, part)
