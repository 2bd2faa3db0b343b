"""A digest of all ops in exchanged layouts; ranks compare it when the graph first runs.

A moved op runs on peers' data: valid only if the op, its numbers, and the shapes and dtypes of its operands are the
same on all ranks.
"""

from typing import NamedTuple

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node

from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.layout import refuse, size_of
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.sequence import Digest
from fusedcomm.compile.graph.views import WAIT, value

MOVED = "fusedcomm_moved"  # in the metadata of nodes in the exchanged layout: the group's name
_AGREED = "fusedcomm_agreed"  # in the metadata of a graph's collectives: the agreed digest, and the group


class Check(NamedTuple):
    """Arguments of one `same_moves`."""

    digest: Digest
    device_type: str
    group_name: str


def note(graph: Graph, digest: Digest, group_name: str) -> None:
    """Keep the digest with the graph's collectives, through the partitioner, for `check_first`. Raises CannotFuse."""
    inputs = _symbols_of_inputs(graph)
    for name in digest.symbols:
        refuse(name not in inputs, f"the size {name} is known too late to be compared between ranks")
    for node in graph.nodes:
        if collectives.kind_of(node):
            node.meta[_AGREED] = digest, group_name


def find(graph: Graph) -> list[Check]:
    found = {node.meta[_AGREED]: value(node).device.type for node in graph.nodes if _AGREED in node.meta}
    return [Check(digest, device_type, group_name) for (digest, group_name), device_type in found.items()]


def check_first(graph: Graph, checks: list[Check]) -> None:
    """Make the graph compare its digests with its peers' first."""
    if not checks:
        return
    first = next(node for node in graph.nodes if node.op != "placeholder")
    inputs = _symbols_of_inputs(graph)
    rewriter = Rewriter(graph)
    with rewriter.before(first, like=first):
        for digest, device_type, group_name in checks:
            # a backward has the symbols that its forward has saved; the forward has compared them all
            sizes = [_size(rewriter, *inputs[name]) for name in digest.symbols if name in inputs]
            group_size = collectives.size_of_group(group_name)
            args = digest.text, sizes, device_type, group_size, group_name
            check = rewriter.call(torch.ops.fusedcomm.same_moves.default, *args)
            rewriter.call(WAIT, check)  # keeps it: Inductor drops unread nodes


def _symbols_of_inputs(graph: Graph) -> dict[str, tuple[Node, int | None]]:
    """Symbols that inputs of the graph are, or have as their size in a dim."""
    found: dict[str, tuple[Node, int | None]] = {}
    for node in graph.find_nodes(op="placeholder"):
        val = node.meta.get("val") if "tangents_" not in node.name else None  # no inputs of the forward
        if isinstance(val, SymInt):
            found[str(size_of(val))] = node, None
        elif isinstance(val, Tensor):
            for dim, size in enumerate(val.shape):
                found.setdefault(str(size_of(size)), (node, dim))
    return found


def _size(rewriter: Rewriter, node: Node, dim: int | None) -> Node:
    return node if dim is None else rewriter.call(torch.ops.aten.sym_size.int, node, dim)
