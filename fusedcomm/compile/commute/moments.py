"""Mean and variance over an exchanged dim, written as sums: sums can move."""

import operator
from typing import Any

import torch
from torch.fx import Node

from fusedcomm.compile.commute.mover import Mover
from fusedcomm.compile.commute.places import dims_argument, keeps_dims, shape
from fusedcomm.compile.graph.layout import product
from fusedcomm.compile.graph.rewrite import Rewriter, replace_node

aten = torch.ops.aten


def as_sums(mover: Mover, node: Node) -> list[Node]:
    """Replace a ``var_mean`` over blocks; returns the new nodes, none for any other node.

    The variance is the mean of squared differences, as a difference of two sums would lose digits.
    """
    if node.target is not aten.var_mean.correction:
        return []
    operand: Node = node.args[0]  # type: ignore[assignment]
    place, dims = mover.places.get(operand), dims_argument(node)
    count = product(shape(operand)[dim] for dim in dims)
    asked: Any = node.kwargs.get("correction")
    correction = 1 if asked is None else asked
    if place is None or place.dim not in dims or not isinstance(count, int) or count <= correction:
        return []
    rewriter = Rewriter(mover.graph)
    with rewriter.before(node, like=node):
        mean = rewriter.call(aten.mean.dim, operand, dims, True)
        apart = rewriter.call(aten.sub.Tensor, operand, mean)
        squares = rewriter.call(aten.mul.Tensor, apart, apart)
        variance = rewriter.call(aten.mean.dim, squares, dims, True)
        if correction:
            variance = rewriter.call(aten.mul.Tensor, variance, count / (count - correction))
        results = [variance, mean]
        if not keeps_dims(node):
            results = [rewriter.call(aten.squeeze.dims, each, dims) for each in results]
    for user in list(node.users):
        assert user.target is operator.getitem
        replace_node(user, results[user.args[1]])  # type: ignore[index]
    return rewriter.created
