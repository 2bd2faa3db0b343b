"""(x @ w).split(...), with a collective for each part, becomes a matmul for each part."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from fusedcomm.compile.graph.layout import CannotFuse, product, refuse
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.split_cat import SPLITS, UNBIND, part, shape_of
from fusedcomm.compile.graph.views import RESHAPES, path_back

aten = torch.ops.aten
Columns: TypeAlias = "tuple[Any, Any]"  # begin and end
PLAIN = {aten.mm.default, aten.addmm.default}


def find(starts: Iterable[Node]) -> dict[Node, list[Node]]:
    """Matmul -> starts that send a part of its result."""
    found: dict[Node, list[Node]] = {}
    for start in starts:
        sent = path_back(start.args[0], through_casts=False)[0]  # type: ignore[arg-type]
        place = part(sent)
        matmul = None if place is None else path_back(place.origin, through_casts=False)[0]
        if matmul is not None and matmul.target in PLAIN:
            found.setdefault(matmul, []).append(start)
    return found


def rewrite(rewriter: Rewriter, starts: list[Node], can_fuse: Callable[[Node], object], matmul: Node) -> None:
    """Cut ``matmul`` if any of the collectives of ``starts`` can then be fused. Raises CannotFuse."""
    parts = columns_read(matmul)
    with rewriter.before(matmul, like=matmul):
        new = cut(rewriter, matmul, [{columns: nodes} for columns, nodes in parts.items()])
        for node, y in new.items():
            node.replace_all_uses_with(y)
        if not any(map(can_fuse, starts)):
            for node, y in new.items():
                y.replace_all_uses_with(node, delete_user_cb=lambda user: user not in rewriter.created)
            raise CannotFuse("a part of the matmul's result is exchanged, which cannot be fused alone")
    for node in new:
        rewriter.erase_unused(node)


def cut(rewriter: Rewriter, matmul: Node, groups: Iterable[Mapping[Columns, Sequence[Node]]]) -> dict[Node, Node]:
    """Write a matmul per group of neighbouring columns; returns the parts of results by the nodes that they replace."""
    *bias, x, w = matmul.args
    new: dict[Node, Node] = {}
    for parts in groups:
        first, last = min(parts)[0], max(parts)[1]
        of_bias = [rewriter.call(aten.slice.Tensor, each, 0, first, last) for each in bias]
        y = rewriter.call(matmul.target, *of_bias, x, rewriter.call(aten.slice.Tensor, w, 1, first, last))
        for (begin, end), nodes in parts.items():
            own = y if len(parts) == 1 else rewriter.call(aten.slice.Tensor, y, 1, begin - first, end - first)
            new.update({node: rewriter.reshape(own, shape_of(node)) for node in nodes})
    return new


def columns_read(matmul: Node) -> dict[Columns, list[Node]]:
    """The columns that are read together, with the nodes that are these. Raises CannotFuse where no cut is possible."""
    columns = shape_of(matmul)[1]
    if matmul.kwargs or any(shape_of(each) != [columns] for each in matmul.args[:-2]):
        raise CannotFuse("the matmul scales its operands, or adds what is not one number per column")
    parts: dict[Columns, list[Node]] = {}
    stack = [(matmul, user) for user in matmul.users]
    while stack:
        node, user = stack.pop()
        place = part(user)
        if place is not None:
            shape = shape_of(place.origin)
            inner = product(shape[place.dim + 1 :])
            begin, end = place.begin * inner, (place.begin + place.size) * inner
            if shape[place.dim] * inner != columns or not isinstance(begin, int) or not isinstance(end, int):
                raise CannotFuse("a part of the matmul's rows is exchanged")
            parts.setdefault((begin, end), []).append(user)
        elif user.target in RESHAPES | SPLITS | {UNBIND} and user.args[0] is node:
            stack += [(user, each) for each in user.users]
        else:
            raise CannotFuse("a part of the matmul's result is exchanged, and all of it is read")
    ordered = dict(sorted(parts.items()))
    refuse(any(a[1] > b[0] for a, b in pairwise(ordered)), "parts of the matmul's result that overlap are exchanged")
    return ordered
