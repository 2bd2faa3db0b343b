"""all_gather -> views -> matmuls becomes one fusedcomm::all_gather_matmul; other readers get its by-product."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import match_gather, wire
from fusedcomm.compile.fuse.match_gather import Gathered, Reader, SentDims
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.layout import CannotFuse
from fusedcomm.compile.graph.matmuls import MATMULS, Product
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.views import value
from fusedcomm.plan.geometry.cut import EVEN

OP = "all_gather_matmul"
KIND = "all_gather"


@dataclass(frozen=True)
class AllGatherMatmulMatch:
    gathered: Gathered
    reader: Reader  # x of the first matmul
    products: list[Product]  # all multiply the same rows

    @property
    def collectives(self) -> list[Collective]:
        return [self.gathered.collective]

    @property
    def dtype(self) -> torch.dtype:
        return value(self.reader.node).dtype

    @property
    def sent(self) -> SentDims:
        return self.gathered.sent_dims(self.reader.layout, self.products[0].batched)

    @property
    def keeps_order(self) -> bool:
        return self.gathered.keeps_order(self.sent)


def match(start: Node) -> AllGatherMatmulMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    found = match_gather.read(start)
    (reader, first), *more = sorted(_consumers(found), key=lambda each: found.copies(each[0].layout))
    products = [first]
    for other, product in more:
        shares = [f for dim in other.layout.dims for f in dim] == reader.layout.order
        shares &= other.layout.shape == reader.layout.shape and product.batched == first.batched
        nodes = {each.node for each in products}
        independent = not any(match_gather.depends_on(operand, nodes) for operand in product.operands)
        if shares and independent and value(other.node).dtype == value(reader.node).dtype:
            products.append(product)
    return AllGatherMatmulMatch(found, reader, products)


def _consumers(found: Gathered) -> list[tuple[Reader, Product]]:
    try:
        return found.consumers()
    except CannotFuse:
        if found.x.target in MATMULS:  # as the gather of logits
            raise CannotFuse("the gathered tensor is the result of a matmul: no op fuses that order") from None
        raise


def rewrite(rewriter: Rewriter, match: AllGatherMatmulMatch) -> Node:
    found, products, reader, sent = match.gathered, match.products, match.reader, match.sent
    nodes, start = [product.node for product in products], found.collective.start
    others = found.others(nodes)
    collectives.hoist([operand for product in products for operand in product.operands], start)
    with rewriter.before(start, like=min(nodes)):
        call = rewriter.call(
            torch.ops.fusedcomm.all_gather_matmul.default,
            found.sent(rewriter, sent.dims, value(reader.node).dtype),
            [product.w(rewriter, sent.batch, reader.layout.dims[0]) for product in products],
            [product.per_column(rewriter, product.bias) for product in products],
            sent.gather_dim,
            bool(others),
            *EVEN.to_gather,
            found.collective.group_size,
            found.collective.group_name,
            wire.of(start),
        )
        ys = rewriter.call(operator.getitem, call, 0)
        results = [
            (product.node, found.result(rewriter, rewriter.call(operator.getitem, ys, i), sent, reader.layout))
            for i, product in enumerate(products)
        ]
        rearranged = found.rearranged(rewriter, call, sent.received.order, others)
    match_gather.replace(found, results, rearranged)
    return call
