"""Where a graph break may keep a collective from its matmul: it then stands at an end of its graph."""

import torch
from torch.fx import Graph, Node

from fusedcomm.compile.graph.collectives import kind_of
from fusedcomm.compile.graph.views import WAIT, path_back, source


def hints(graph: Graph) -> dict[str, str]:
    """By the name of a collective's start: that a graph may be broken there, if dynamo has broken any, and why."""
    breaks = torch._dynamo.utils.counters["graph_break"]  # by reason, of the whole process, the first one first
    if not breaks:
        return {}
    why = next(reversed(breaks)).splitlines()[0]
    ends = {node.name: _end(node) for node in graph.nodes if kind_of(node)}
    return {name: f"; {end}, and dynamo has broken graphs, last for: {why}" for name, end in ends.items() if end}


def _end(start: Node) -> str | None:
    sent = start.all_input_nodes[:1]
    if sent and path_back(sent[0], through_casts=True)[0].op == "placeholder":
        return "what it sends is an input of the graph"
    readers = list(start.users)
    for node in readers:  # the list grows meanwhile
        if node.target is WAIT or source(node) is not None:
            readers += node.users
    ends = [node for node in readers if node.target is not WAIT and source(node) is None]
    return "the graph ends with it" if ends and all(node.op == "output" for node in ends) else None
