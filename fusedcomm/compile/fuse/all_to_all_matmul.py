"""all_to_all_single -> views -> matmul becomes fusedcomm::all_to_all_matmul; other readers get its by-product."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import match_gather, wire
from fusedcomm.compile.fuse.match_gather import Gathered, Reader, SentDims
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.matmuls import Product
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.plan.geometry.cut import EVEN

OP = "all_to_all_matmul"
KIND = "all_to_all"


@dataclass(frozen=True)
class AllToAllMatmulMatch:
    gathered: Gathered
    reader: Reader  # x of the matmul
    product: Product

    @property
    def collectives(self) -> list[Collective]:
        return [self.gathered.collective]

    @property
    def products(self) -> list[Product]:
        return [self.product]

    @property
    def dtype(self) -> torch.dtype:
        return self.gathered.dtype_sent_for(self.reader)

    @property
    def sent(self) -> SentDims:
        return self.gathered.sent_dims(self.reader.layout, self.product.batched)

    @property
    def keeps_order(self) -> bool:
        return self.gathered.keeps_order(self.sent)


def match(start: Node) -> AllToAllMatmulMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    found = match_gather.read(start)
    matches = [AllToAllMatmulMatch(found, reader, product) for reader, product in found.consumers()]
    uncopied = [each for each in matches if not found.copies(each.reader.layout)]
    return (uncopied or matches)[0]


def rewrite(rewriter: Rewriter, match: AllToAllMatmulMatch) -> Node:
    found, product, reader, sent = match.gathered, match.product, match.reader, match.sent
    others = found.others([product.node])
    start = found.collective.start
    collectives.hoist(product.operands, start)
    with rewriter.before(start, like=product.node):
        call = rewriter.call(
            product.op(OP),
            found.sent(rewriter, sent.dims, reader.dtypes),
            product.w(rewriter, sent.batch, reader.layout.dims[0]),
            product.per_column(rewriter, product.bias),
            *([] if product.scales is None else [*product.scaling(rewriter, found.rows(sent, gathered=True)), False]),
            sent.gather_dim,
            sent.scatter_dim,
            bool(others),
            *EVEN,
            found.collective.group_size,
            found.collective.group_name,
            wire.of(start),
        )
        y = found.result(rewriter, rewriter.call(operator.getitem, call, 0), sent, reader.layout)
        rearranged = found.rearranged(rewriter, call, sent.received.order, others, reader)
    match_gather.replace(found, [(product.node, y)], rearranged)
    return call
