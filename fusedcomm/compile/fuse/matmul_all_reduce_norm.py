"""matmul_all_reduce and a tail of few rows become fusedcomm::matmul_all_reduce_norm.

Few rows go whole to all ranks, so that each adds its own residual: nothing proves that residuals are equal. More rows,
whose sums have owners, become `matmul_all_reduce`, and the rest stays a kernel of the compiler's.
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import matmul_all_reduce, tail, wire
from fusedcomm.compile.fuse.matmul_all_reduce import MatmulAllReduceMatch
from fusedcomm.compile.fuse.tail import NO_TAIL, Tail
from fusedcomm.compile.graph.layout import CannotFuse, size_of
from fusedcomm.compile.graph.rewrite import Rewriter, sizes
from fusedcomm.compile.graph.views import value
from fusedcomm.plan.geometry.norm import goes_at_once

OP = "matmul_all_reduce_norm"
KIND = "all_reduce"


@dataclass(frozen=True)
class MatmulAllReduceNormMatch(MatmulAllReduceMatch):
    tail: Tail

    @property
    def keeps_order(self) -> bool:
        return False  # whole terms are sent, in place of parts and their sums


def match(start: Node) -> MatmulAllReduceNormMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    found = matmul_all_reduce.match(start)
    if not goes_at_once([_most(size) for size in value(start).shape], found.reduced.collective.group_size):
        raise CannotFuse(NO_TAIL)
    behind = tail.find(found.reduced, found.layout, found.reduced.product.y)
    return MatmulAllReduceNormMatch(found.reduced, found.layout, behind)


def rewrite(rewriter: Rewriter, match: MatmulAllReduceNormMatch) -> Node:
    product, collective = match.reduced.product, match.reduced.collective
    with rewriter.before(collective.start, like=product.node):
        x, w = product.joined(rewriter)
        bias, *others = match.tail.operands(rewriter, sizes(product.y.dims))
        about = collective.group_size, collective.group_name, wire.of(collective.start)
        call = rewriter.call(torch.ops.fusedcomm.matmul_all_reduce_norm.default, x, w, bias, *others, *about)
        results = match.tail.results(rewriter, call)
    match.tail.replace(*results)
    return call


def _most(size: int | torch.SymInt) -> int:
    """The largest value that size can have, at most 2^62."""
    if isinstance(size, int):
        return size
    most = size.node.shape_env.bound_sympy(size_of(size)).upper
    return int(most) if most.is_Integer else 1 << 62
