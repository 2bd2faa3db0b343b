"""Small exchanges that moves need, joined: one of constants and one of partial gradients per graph, if nothing forbids.

A collective of a few kilobytes takes its latency, so several cost several times as much as one.
"""

import operator
from collections import defaultdict

import torch
from torch.fx import Graph, Node

from fusedcomm.compile.commute.digests import MOVED
from fusedcomm.compile.commute.mover import CONSTANTS, GRADIENTS, PURPOSES, SMALL
from fusedcomm.compile.commute.places import shape
from fusedcomm.compile.graph.effects import sort
from fusedcomm.compile.graph.layout import product
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.views import WAIT, value

aten = torch.ops.aten
SENT_AS_BYTES = (CONSTANTS, GRADIENTS)  # a sum needs its dtype


def join(graph: Graph) -> None:
    """Join collectives of one purpose and group that do not depend on each other."""
    rewriter = Rewriter(graph)
    for purpose in PURPOSES:
        for starts in alike(graph, purpose):
            if len(starts) > 1:
                _join(rewriter, starts)
        sort(graph)


def alike(graph: Graph, purpose: str) -> list[list[Node]]:
    """The small collectives of this purpose, in lists to join: none depends on another.

    Collectives that the forward needs must not wait for the gradients of the outputs.
    """
    found: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    backward = depends_on_gradients(graph)
    level: dict[Node, int] = {}  # how many of these collectives a node depends on, one behind the other
    for node in graph.nodes:
        level[node] = max((level[each] for each in node.all_input_nodes), default=0)
        if node.meta.get(SMALL) == purpose:
            sent, *others = node.args
            dtype = None if purpose in SENT_AS_BYTES else value(sent).dtype  # type: ignore[arg-type]
            found[node.target, str(others), dtype, level[node], node in backward].append(node)
            level[node] += 1
    return list(found.values())


def depends_on_gradients(graph: Graph) -> set[Node]:
    found = {node for node in graph.find_nodes(op="placeholder") if "tangents_" in node.name}
    for node in graph.nodes:
        if any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def _join(rewriter: Rewriter, starts: list[Node]) -> None:
    """[R, ...] of each, side by side as [R, all elements]; as [R, all bytes] if they have different dtypes."""
    last, call = starts[-1], rewriter.call
    sents: list[Node] = [start.args[0] for start in starts]  # type: ignore[misc]
    group_size = shape(sents[0])[0]
    are_bytes = len({value(sent).dtype for sent in sents}) > 1
    with rewriter.before(last, like=last):
        rows = [rewriter.reshape(sent, [group_size, product(shape(sent)[1:])]) for sent in sents]
        if are_bytes:
            rows = [call(aten.view.dtype, row, torch.uint8) for row in rows]
        widths = [shape(row)[1] for row in rows]
        start = call(last.target, call(aten.cat.default, rows, 1), *last.args[1:])
        start.meta[SMALL] = last.meta[SMALL]
        received = call(aten.split_with_sizes.default, call(WAIT, start), widths, 1)
        parts = [rewriter.contiguous(call(operator.getitem, received, i)) for i in range(len(starts))]
        if are_bytes:
            parts = [call(aten.view.dtype, part, value(sent).dtype) for part, sent in zip(parts, sents, strict=True)]
        parts = [rewriter.reshape(part, shape(sent)) for part, sent in zip(parts, sents, strict=True)]
    for each in rewriter.created:
        each.meta[MOVED] = last.args[-1]
    for old, part in zip(starts, parts, strict=True):
        (wait,) = old.users
        rewriter.replace(wait, part)
