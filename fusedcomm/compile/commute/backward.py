"""The backward part of a joint graph, and recomputation in it."""

from __future__ import annotations

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fusedcomm.compile.commute.mover import NORMED


def depends_on_gradients(graph: Graph) -> set[Node]:
    """The gradients of the outputs, and all that is computed from them."""
    found = {node for node in graph.find_nodes(op="placeholder") if "tangents_" in node.name}
    for node in graph.nodes:
        if any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def recompute_normed(graph: Graph) -> None:
    """Let the backward compute ``x / rms(x)`` again from x, as it does where no norm has moved.

    The partitioner would save both: where a collective stands between two readers of x, as the sum of the norm does
    now, it does not compute the later one again.
    """
    backward = depends_on_gradients(graph)
    for node in graph.nodes:
        if NORMED in node.meta and any(
            user in backward for each in (node, *node.all_input_nodes) for user in each.users
        ):
            node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
