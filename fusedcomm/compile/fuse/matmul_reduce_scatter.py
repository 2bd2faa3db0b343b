"""matmul -> views -> reduce_scatter becomes fusedcomm::matmul_reduce_scatter; a sum of matmuls, one with a longer K."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import match_reduce, wire
from fusedcomm.compile.fuse.match_reduce import Reduced
from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout
from fusedcomm.compile.graph.matmuls import Product
from fusedcomm.compile.graph.rewrite import Rewriter, group_factors, replace_node, sizes
from fusedcomm.compile.graph.views import value
from fusedcomm.plan.geometry.cut import EVEN

OP = "matmul_reduce_scatter"
KIND = "reduce_scatter"


@dataclass(frozen=True)
class MatmulReduceScatterMatch:
    reduced: Reduced
    target: Node  # the last node that only rearranges the result
    layout: Layout  # target's layout

    @property
    def collectives(self) -> list[Collective]:
        return [self.reduced.collective]

    @property
    def products(self) -> list[Product]:
        return [self.reduced.product]

    @property
    def dtype(self) -> torch.dtype:
        return value(self.reduced.product.node).dtype

    @property
    def keeps_order(self) -> bool:
        return self.reduced.keeps_order(self.reduced.product.cut([self.reduced.blocks])[0])


def match(start: Node) -> MatmulReduceScatterMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    found, received = match_reduce.read(start)
    product, blocks = found.product, found.blocks
    columns = product.y.dims[-1]
    if blocks in columns[1:]:
        raise CannotFuse("what is scattered is in the middle of N")
    rest = [f for f in product.y.order if f is not blocks]
    written = [each for each in received if each[1].order == rest]  # no copy after the op
    return MatmulReduceScatterMatch(found, *(written or received)[-1])


def operands(rewriter: Rewriter, match: MatmulReduceScatterMatch) -> tuple[Node, Node, list[list[Factor]]]:
    """(x, w, dims of their product)."""
    product, blocks = match.reduced.product, match.reduced.blocks
    y, row_dims = product.cut([blocks])
    *batches, _, columns = y.dims
    lead = [dim for each in batches for dim in group_factors(each, [blocks])]
    return product.x(rewriter, [*lead, *row_dims]), product.w(rewriter, lead), [*lead, *row_dims, list(columns)]


def rewrite(rewriter: Rewriter, match: MatmulReduceScatterMatch) -> Node:
    product, collective, blocks = match.reduced.product, match.reduced.collective, match.reduced.blocks
    with rewriter.before(collective.start, like=product.node):
        x, w, dims = operands(rewriter, match)
        call = rewriter.call(
            product.op(OP),
            x,
            w,
            None,
            *product.scaling(rewriter, sizes(dims[:-1])),
            collective.reduce_op,
            next(i for i, dim in enumerate(dims) if blocks in dim),
            *EVEN.to_scatter,
            collective.group_size,
            collective.group_name,
            wire.of(collective.start),
            product.per_column(rewriter, product.bias),
        )
        order = [f for f in product.cut([blocks])[0].order if f is not blocks]
        out = rewriter.result(rewriter.arrange(call, order, match.layout), match.target)
    replace_node(match.target, out)
    return call
