"""Cuts matmuls if only a part of their operand or result is exchanged.

    cat([a, b], features) @ w      ->  a @ w[:k] + b @ w[k:]
    x @ cat([a, b], features)      ->  cat([x @ a, x @ b])             the same for rows
    (x @ w)[..., :n], the rest     ->  x @ w[:, :n], x @ w[:, n:]

Parts that are exchanged alike, as equally wide q, k and v, stay one matmul.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from fusedcomm.compile.commute.places import VIEWS, shape
from fusedcomm.compile.fuse import cut_results
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.graph.layout import Size
from fusedcomm.compile.graph.matmuls import MATMULS
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.split_cat import SLICE, args_of
from fusedcomm.compile.graph.views import value

aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """Some features of a tensor."""

    nodes: tuple[Node, ...]
    begin: Size
    width: Size


def cut(graph: Graph, earlier: set[Node], later: set[Node]) -> None:
    """Cut matmuls behind exchanges that move later, and matmuls before exchanges that move earlier.

    ``earlier`` and ``later`` are starts of exchanges. The graph's results are held.
    """
    rewriter = Rewriter(graph)
    towards, behind = _towards(graph, earlier), _behind(graph, later)
    for node in list(graph.nodes):
        if node.target is aten.cat.default:
            attempt("commute", _cut_readers, rewriter, node, behind)
    for node in list(graph.nodes):
        if node.target in cut_results.PLAIN:
            attempt("commute", _cut_result, rewriter, node, towards)


def _behind(graph: Graph, starts: set[Node]) -> set[Node]:
    """Nodes computed from these exchanges, up to the next matmul or exchange."""
    found = set()
    for node in graph.nodes:
        if node in starts or (not _is_end(node) and any(each in found for each in node.all_input_nodes)):
            found.add(node)
    return found


def _towards(graph: Graph, starts: set[Node]) -> set[Node]:
    """Nodes that these exchanges are computed from, back to the next matmul or exchange."""
    found = set()
    for node in reversed(graph.nodes):
        if node in starts or any(each in found and (each in starts or not _is_end(each)) for each in node.users):
            found.add(node)
    return found


def _is_end(node: Node) -> bool:
    return node.target in MATMULS or collectives.kind_of(node) == "all_to_all"


def _groups(parts: Iterable[Part], exchanged: set[Node]) -> list[list[Part]]:
    """Neighbours that are equally wide and exchanged, or not exchanged; none if there is only one such group."""

    def kind(part: Part) -> Size | None:
        return part.width if any(node in exchanged for node in part.nodes) else None

    found = [list(group) for _, group in groupby(parts, kind)]
    return found if len(found) > 1 else []


def _joined(parts: Sequence[Part]) -> Part:
    nodes = tuple(node for part in parts for node in part.nodes)
    return Part(nodes, parts[0].begin, sum(part.width for part in parts))


def _keeps_features(node: Node, like: Node) -> bool:
    return node.target in VIEWS and shape(node)[-1:] == shape(like)[-1:] and node.args[0] is like


# cat, then matmul


def _cut_readers(rewriter: Rewriter, cat: Node, behind: set[Node]) -> None:
    """Cut the matmuls that read ``cat``."""
    joined, dim, *_ = (*args_of(cat), 0)
    groups = [_joined(each) for each in _groups([Part((part,), 0, shape(part)[-1]) for part in joined], behind)]
    if not groups or dim not in (-1, len(shape(cat)) - 1):
        return
    views = [cat, *(user for user in cat.users if _keeps_features(user, cat))]
    turned = [user for view in views for user in view.users if _is_transpose(user)]
    for view in [*views, *turned]:
        if len(shape(view)) == 2:
            for user in list(view.users):
                if user.target in cut_results.PLAIN:
                    attempt("commute", _cut_reader, rewriter, user, view, groups, view in turned)


def _is_transpose(node: Node) -> bool:
    return node.target is aten.permute.default and [dim % 2 for dim in args_of(node)[1]] == [1, 0]


def _cut_reader(rewriter: Rewriter, matmul: Node, view: Node, groups: Sequence[Part], is_turned: bool) -> None:
    *bias, a, b = matmul.args
    is_left = a is view
    if (bias and not (is_left and not is_turned)) or a is b or matmul.kwargs:
        return
    call = rewriter.call
    with rewriter.before(matmul, like=matmul):
        rows = shape(view)[1 if is_turned else 0]
        parts = [_two_dims(rewriter, group, rows, value(view).dtype) for group in groups]
        if is_turned:
            parts = [call(aten.permute.default, part, [1, 0]) for part in parts]
        if is_left == is_turned:  # the features are rows or columns of the result
            results = [call(aten.mm.default, *((part, b) if is_left else (a, part))) for part in parts]
            result = call(aten.cat.default, results, 0 if is_left else 1)
        else:
            other = b if is_left else a
            dim = 0 if is_left else 1
            ends = list(accumulate(group.width for group in groups))
            others = [call(SLICE, other, dim, end - group.width, end) for group, end in zip(groups, ends, strict=True)]
            pairs = [(part, each) if is_left else (each, part) for part, each in zip(parts, others, strict=True)]
            result = call(aten.addmm.default, *bias, *pairs[-1]) if bias else call(aten.mm.default, *pairs[-1])
            for pair in pairs[:-1]:
                result = call(aten.add.Tensor, call(aten.mm.default, *pair), result)
    rewriter.replace(matmul, result)


def _two_dims(rewriter: Rewriter, group: Part, rows: Size, dtype: torch.dtype) -> Node:
    (first, *others) = [rewriter.cast(node, dtype) for node in group.nodes]
    joined = rewriter.call(aten.cat.default, [first, *others], -1) if others else first
    return rewriter.reshape(joined, [rows, group.width])


# matmul, then parts of its result


def _cut_result(rewriter: Rewriter, matmul: Node, towards: set[Node]) -> None:
    read = cut_results.columns_read(matmul)
    groups = _groups([Part(tuple(nodes), begin, end - begin) for (begin, end), nodes in read.items()], towards)
    if not groups or any(a[1] != b[0] for a, b in pairwise(read)):
        return
    columns: list[Any] = [{(part.begin, part.begin + part.width): part.nodes for part in group} for group in groups]
    with rewriter.before(matmul, like=matmul):
        new = cut_results.cut(rewriter, matmul, columns)
    for node, part in new.items():
        rewriter.replace(node, part)
