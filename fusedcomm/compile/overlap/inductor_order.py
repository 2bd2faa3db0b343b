"""Inductor's generated code keeps the order of a scheduled graph: collectives, waits, matmuls and other whole kernels.

Where nothing is in flight, Inductor finds the order of least memory as it would without this pass. Starts depend on
their data alone: Inductor keeps their order, and reduces in place. Pointwise kernels and reductions fuse, and move, as
far as the others leave them room. Importing this imports Inductor, which takes a second.
"""

import operator

import torch
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.fx import Graph, Node
from torch.utils._ordered_set import OrderedSet

from fusedcomm.compile.graph.views import WAIT
from fusedcomm.compile.overlap.node_work import Work, work_of
from fusedcomm.compile.overlap.program import starts_of

_MARK = "fusedcomm_order"
_WHOLE = (Work.MATMUL, Work.FLOPS, Work.START, Work.FUSED)


def mark(graph: Graph) -> None:
    """Let `is_marked` find the graph, whatever Inductor's passes do to some of its nodes."""
    for node in graph.nodes:
        node.meta[_MARK] = True


def is_marked(graph: Graph) -> bool:
    return any(_MARK in node.meta for node in graph.nodes)


def keep(graph: Graph) -> None:
    """Let the graph's order be kept as it is now, from each start to its last wait."""
    nodes = list(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    last_wait = {start: i for i, node in enumerate(nodes) for start in starts_of(node, index)}
    after: dict[Node, OrderedSet[Node]] = {}
    before: list[Node] = []  # the last one that depends on others, and starts since
    until = 0
    for node in filter(_is_whole, nodes):
        if before and index[before[-1]] < until and work_of(node) is not Work.START:  # something is in flight
            after[node] = OrderedSet(each for first in before for each in _results(first))
        before = [*before, node] if work_of(node) is Work.START else [node]
        until = max(until, last_wait.get(index[node], 0))
    preserve_node_ordering(graph, after)


def _is_whole(node: Node) -> bool:
    """Whether node is one call or template, no part of a kernel of Inductor's; but for unread waits, which torch 2.11
    would leave out if they depended on others.
    """
    if node.target is WAIT:
        return bool(node.users)
    return work_of(node) in _WHOLE and isinstance(node.target, torch._ops.OpOverload)


def _results(node: Node) -> list[Node]:
    """The parts of a result of several tensors, on which nothing can depend as a whole in torch 2.11; else the node."""
    return [user for user in node.users if user.target is operator.getitem] or [node]
