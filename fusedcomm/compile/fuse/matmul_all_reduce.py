"""matmul -> views -> all_reduce becomes fusedcomm::matmul_all_reduce; a sum of matmuls becomes one over a longer K."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import match_reduce
from fusedcomm.compile.fuse.match_reduce import Reduced
from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.layout import Layout
from fusedcomm.compile.graph.matmuls import Product
from fusedcomm.compile.graph.rewrite import Rewriter, replace_node
from fusedcomm.compile.graph.views import value

OP = "matmul_all_reduce"
KIND = "all_reduce"


@dataclass(frozen=True)
class MatmulAllReduceMatch:
    reduced: Reduced
    layout: Layout  # layout of the collective's result

    @property
    def collectives(self) -> list[Collective]:
        return [self.reduced.collective]

    @property
    def products(self) -> list[Product]:
        return [self.reduced.product]

    @property
    def dtype(self) -> torch.dtype:
        return value(self.reduced.product.node).dtype


def match(start: Node) -> MatmulAllReduceMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    found, received = match_reduce.read(start)
    return MatmulAllReduceMatch(found, received[0][1])


def rewrite(rewriter: Rewriter, match: MatmulAllReduceMatch) -> Node:
    product, collective = match.reduced.product, match.reduced.collective
    with rewriter.before(collective.start, like=product.node):
        x = product.xs[0] if len(product.xs) == 1 else rewriter.call(torch.ops.aten.cat.default, list(product.xs), -1)
        w = product.ws[0] if len(product.ws) == 1 else rewriter.call(torch.ops.aten.cat.default, list(product.ws), -2)
        y = rewriter.call(
            torch.ops.fusedcomm.matmul_all_reduce.default,
            x,
            w,
            None,
            collective.reduce_op,
            collective.group_size,
            collective.group_name,
            match.reduced.wire(product.y.order),
            product.per_column(rewriter, product.bias),
        )
        out = rewriter.result(rewriter.arrange(y, product.y.order, match.layout), collective.wait)
    replace_node(collective.wait, out)
    return y
