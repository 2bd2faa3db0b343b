"""A graph as lists by index, for the simulator and the passes: costs, memory and dependencies of each node."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fusedcomm.compile.graph.collectives import WAITS, kind_of
from fusedcomm.compile.overlap import dependencies
from fusedcomm.compile.overlap.memory import Memory
from fusedcomm.compile.overlap.node_work import NodeCost


class Program:
    """Nodes by their index in the graph's order."""

    def __init__(self, graph: Graph, cost_of: Callable[[Node], NodeCost]) -> None:
        self.graph = graph
        self.nodes: list[Node] = list(graph.nodes)
        index = {node: i for i, node in enumerate(self.nodes)}
        self.costs = [cost_of(node) for node in self.nodes]
        self.kinds = [kind_of(node) or getattr(node.target, "_opname", "") for node in self.nodes]
        self.waits_for: list[list[int]] = [starts_of(node, index) for node in self.nodes]  # starts that it waits for
        self.memory = Memory(graph, self.nodes, self.waits_for)
        self.before = dependencies.predecessors(self.nodes, self.waits_for, self.memory)
        self.after: list[list[int]] = [[] for _ in self.nodes]
        for i, each in enumerate(self.before):
            for j in each:
                self.after[j].append(i)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def starts(self) -> list[int]:
        """The collectives that run beside the compute stream."""
        waited = {start for starts in self.waits_for for start in starts}
        return [i for i, cost in enumerate(self.costs) if i in waited and cost.fused_ms is None]


def starts_of(node: Node, index: dict[Node, int]) -> list[int]:
    """The starts of collectives that node waits for, also through the getitem of a coalesced one."""
    if not _waits(node):
        return []
    found = []
    for each in pytree.tree_leaves(node.args):
        start = each
        while isinstance(start, Node) and kind_of(start) is None and start.all_input_nodes and not _waits(start):
            start = start.all_input_nodes[0]
        if isinstance(start, Node) and kind_of(start) is not None and index[start] not in found:
            found.append(index[start])
    return found


def _waits(node: Node) -> bool:
    return getattr(node.target, "_opname", None) in WAITS
