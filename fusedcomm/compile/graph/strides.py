"""Strides behind a rewrite: Inductor computes them again after our passes, and some ops cannot take others."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fusedcomm.compile.graph.layout import CannotFuse
from fusedcomm.compile.graph.rewrite import STANDS_FOR, Rewriter, computed

aten = torch.ops.aten
_READ_STRIDES = {  # copies first: others fail, or take other elements
    aten.view_as_complex.default,
    aten.view.dtype,
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
}


def settle(graph: Graph) -> None:
    """Recompute readers of rewritten nodes, and copy operands that need their former strides. Raises CannotFuse."""
    former: dict[Node, Any] = {}  # values as readers were traced with them, if strides have changed
    for node in list(graph.nodes):
        if STANDS_FOR in node.meta:
            former[node] = node.meta.pop(STANDS_FOR)
        if not _is_recomputed(node):
            continue
        rewritten = [each for each in node.all_input_nodes if each in former]
        moved = [each for each in rewritten if _strides(former[each]) != _strides(each.meta.get("val"))]
        if not moved:
            continue
        if node.target in _READ_STRIDES:
            result = _from_copies(graph, node, moved, former)
        else:
            try:
                result = _computed(node)
            except Exception:
                result = _from_copies(graph, node, moved, former)
        if _strides(result) != _strides(node.meta["val"]):
            former.setdefault(node, node.meta["val"])
        node.meta["val"] = result


def _is_recomputed(node: Node) -> bool:
    if node.op != "call_function" or "val" not in node.meta or "unbacked_bindings" in node.meta:
        return False
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable


def _strides(val: Any) -> list[Any]:
    return [(t.stride(), t.storage_offset()) for t in pytree.tree_leaves(val) if isinstance(t, Tensor)]


def _computed(node: Node) -> Any:
    # Inductor makes all views of a graph reshapes
    target = aten.reshape.default if node.target is aten.view.default else node.target
    return computed(target, node.args, node.kwargs)


def _from_copies(graph: Graph, node: Node, moved: list[Node], former: dict[Node, Any]) -> Any:
    rewriter = Rewriter(graph)
    for each in moved:
        like = former[each]
        if not isinstance(like, Tensor):
            raise CannotFuse(f"{node.name} needs other strides than the rewritten {each.name} has")
        with rewriter.before(node, like=node):
            copy = rewriter.strided(each, like)
        if _strides(copy.meta["val"]) != _strides(like):
            raise CannotFuse(f"{node.name} needs strides {like.stride()}, got {copy.meta['val'].stride()}")
        node.replace_input_with(each, copy)
    try:
        return _computed(node)
    except Exception as error:
        raise CannotFuse(f"{node.name} fails behind a rewrite: {error}") from error
