"""A copy of a graph to move exchanges in: equal nodes are one, and obstacles are rewritten."""

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import Graph, Node

from fusedcomm.compile.fuse.fuser import Fuser
from fusedcomm.compile.graph.rewrite import Rewriter, held_outputs
from fusedcomm.compile.graph.split_cat import args_of
from fusedcomm.compile.graph.views import sizes_of, value

aten = torch.ops.aten


def prepared(graph: Graph) -> Graph:
    """A copy with equal nodes joined, exchanges as all_to_alls, and copies of equal size as casts."""
    new = fx_graph_cse(graph)
    new.output_node().meta = dict(graph.output_node().meta)
    Fuser(new).normalize(gathers=True)
    rewriter = Rewriter(new)
    with held_outputs(new):
        for node in new.find_nodes(op="call_function", target=aten.copy.default):
            source = args_of(node)[1]
            if isinstance(source, Node) and sizes_of(value(source)) == sizes_of(value(node)):
                with rewriter.before(node, like=node):
                    result = rewriter.cast(source, value(node).dtype)
                rewriter.replace(node, result)
    return new


def restore(graph: Graph, copy: Graph) -> None:
    """Give ``graph`` the nodes, and their names, that it had when ``copy`` was made."""
    replace_nodes(graph, copy, {node.name for node in copy.nodes})


def replace_nodes(graph: Graph, new: Graph, names: set[str]) -> None:
    """Give ``graph`` the nodes of ``new``. ``names``, of nodes that it has or had, stay. Its inputs are the same."""
    copies = dict(zip(new.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder"), strict=True))
    output = graph.output_node()
    meta = dict(output.meta)
    for node in reversed(list(graph.nodes)):
        if node.op != "placeholder":
            graph.erase_node(node)
    result = graph.graph_copy(new, copies)
    graph.output(result).meta = meta
    for node, copy in copies.items():
        if node.name in names:  # by which the report knows it
            copy.name = node.name
