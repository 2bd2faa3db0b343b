"""matmul -> views -> all_reduce becomes fusedcomm::matmul_all_reduce; a sum of matmuls becomes one over a longer K."""

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import match_reduce, wire
from fusedcomm.compile.fuse.match_reduce import Reduced
from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.layout import CannotFuse, Layout, size_of
from fusedcomm.compile.graph.matmuls import Product
from fusedcomm.compile.graph.rewrite import Rewriter, replace_node, sizes
from fusedcomm.compile.graph.views import value
from fusedcomm.plan.geometry import payloads, shapes

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

    @property
    def keeps_order(self) -> bool:
        return self.reduced.keeps_order(self.reduced.product.y)


def match(start: Node) -> MatmulAllReduceMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    found, received = match_reduce.read(start)
    _check_blocks(found)
    return MatmulAllReduceMatch(found, received[0][1])


def _check_blocks(found: Reduced) -> None:
    """Raises CannotFuse where peers without the matmul may cut what is sent into other blocks."""
    product, size = found.product, found.collective.group_size
    sent, y = [size_of(each) for each in value(found.collective.sent).shape] or [1], sizes(product.y.dims)
    lead = y[:-1] if product.batched else [math.prod(y[:-1])]
    if sent[-1] == y[-1] and (not product.batched or lead[0] == 1 or lead[0] % size == 0):
        return
    if not all(isinstance(each, int) for each in (*sent, *y)):
        raise CannotFuse("what is sent is not known to be cut as the matmul's result")
    theirs = payloads.all_reduce(sent, "sum", size)
    ours = shapes.matmul_all_reduce((*lead, 1), (*lead[:-1], 1, y[-1]), "sum", size)
    if ours.chunk_facts(with_dims=False) != theirs.chunk_facts(with_dims=False):
        raise CannotFuse(f"{sent} is sent, which is cut into other blocks than the matmul's {y}")


def rewrite(rewriter: Rewriter, match: MatmulAllReduceMatch) -> Node:
    product, collective = match.reduced.product, match.reduced.collective
    with rewriter.before(collective.start, like=product.node):
        y = rewriter.call(
            product.op(OP),
            *product.joined(rewriter),
            None,
            *product.scaling(rewriter, sizes(product.y.dims[:-1])),
            collective.reduce_op,
            collective.group_size,
            collective.group_name,
            wire.of(collective.start),
            product.per_column(rewriter, product.bias),
        )
        out = rewriter.result(rewriter.arrange(y, product.y.order, match.layout), collective.wait)
    replace_node(collective.wait, out)
    return y
