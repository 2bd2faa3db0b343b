"""All that is computed in exchanged layouts, as a digest that ranks compare when the graph first runs.

An exchange moves over an op only if that op, and every number in it, is the same on all ranks: the tensors of each rank
meet the ops of another. A rank sees its own graph alone when it compiles, so the graphs call `same_moves` in front.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fusedcomm.compile.commute.places import is_fill
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.views import WAIT, value

MOVED = "fusedcomm_moved"  # in the metadata of what is computed in the exchanged layout: the group's name
_DIGEST = "fusedcomm_digest"  # in the metadata of every collective of a group whose exchanges were moved


def note(graph: Graph) -> None:
    """Keep the digests with the graph's collectives, through the partitioner, for `check_first`."""
    groups = {node.meta[MOVED] for node in graph.nodes if MOVED in node.meta}
    found = {group_name: _digest(graph, group_name) for group_name in groups}
    for node in graph.nodes:
        if digest := found.get(_group_of(node)):
            node.meta[_DIGEST] = digest


def find(graph: Graph) -> dict[tuple[str, str, str], None]:
    """(digest, device type, group name) of the collectives that were noted, in order."""
    return {
        (node.meta[_DIGEST], value(node).device.type, _group_of(node)): None  # type: ignore[misc]
        for node in graph.nodes
        if _DIGEST in node.meta
    }


def check_first(graph: Graph, found: dict[tuple[str, str, str], None]) -> None:
    """Let the graph compare its digests with those of the other ranks before all else."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    rewriter = Rewriter(graph)
    with rewriter.before(first, like=first):
        for digest, device_type, group_name in found:
            group_size = collectives.size_of_group(group_name)
            check = rewriter.call(torch.ops.fusedcomm.same_moves.default, digest, device_type, group_size, group_name)
            rewriter.call(WAIT, check)  # keeps it: Inductor drops what is not read


def _group_of(node: Node) -> str | None:
    at = collectives.STARTS.get(node.target, (None, None))[1]  # type: ignore[call-overload]
    return None if at is None else node.args[at]  # type: ignore[return-value]


def _digest(graph: Graph, group_name: str) -> str:
    """Nodes by their order, what they are computed from by the order in which it is first read."""
    numbers: dict[Node, int] = {}

    def text(arg: Any) -> Any:
        if isinstance(arg, Node):
            if is_fill(arg):
                return call(arg)
            return f"%{numbers.setdefault(arg, len(numbers))}"
        if isinstance(arg, torch.device):
            return arg.type
        return "group" if arg == group_name else repr(arg)

    def call(node: Node) -> str:
        return f"{node.target}{pytree.tree_map(text, (node.args, node.kwargs))}"

    found = hashlib.sha256()
    for node in graph.nodes:
        if node.meta.get(MOVED) == group_name:
            found.update(f"{text(node)} = {call(node)}\n".encode())
    return found.hexdigest()[:16]
