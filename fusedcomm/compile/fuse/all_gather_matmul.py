"""all_gather -> views -> matmuls becomes one fusedcomm::all_gather_matmul; other readers get its by-product."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import match_gather, wire
from fusedcomm.compile.fuse.match_gather import Gathered, Reader, SentDims
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.layout import CannotFuse, Layout
from fusedcomm.compile.graph.matmuls import MATMULS, SCALED, Product
from fusedcomm.compile.graph.rewrite import Rewriter, sizes
from fusedcomm.compile.graph.views import path_back, value
from fusedcomm.plan.geometry.cut import EVEN

OP = "all_gather_matmul"
KIND = "all_gather"


@dataclass(frozen=True)
class AllGatherMatmulMatch:
    gathered: Gathered
    reader: Reader  # x of the first matmul
    products: list[Product]  # all multiply the same rows
    scales: tuple[Gathered, Reader] | None = None  # the gather of these rows' scales, which travel behind them

    @property
    def collectives(self) -> list[Collective]:
        return [each.collective for each in (self.gathered, *(self.scales or ())[:1])]

    @property
    def alone(self) -> AllGatherMatmulMatch:
        """The match of x alone: the program's scales stay, and so does their gather."""
        return replace(self, scales=None)

    @property
    def dtype(self) -> torch.dtype:
        return self.gathered.dtype_sent_for(self.reader)

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
        shares &= value(product.node).dtype == value(first.node).dtype
        shares &= (product.scales or ())[::2] == (first.scales or ())[::2]  # one scale of x
        independent = not any(match_gather.depends_on(operand, nodes) for operand in product.operands)
        if shares and independent and value(other.node).dtype == value(reader.node).dtype:
            products.append(product)
    return AllGatherMatmulMatch(found, reader, products, attempt(OP, _scales_beside, found, reader, products))


def _scales_beside(found: Gathered, reader: Reader, products: list[Product]) -> tuple[Gathered, Reader] | None:
    """The gather of the scales of x's rows, and what these products read of it, if nothing else reads either gather."""
    scales = products[0].scales
    start = None if scales is None else next(iter(path_back(scales.x, through_casts=False)[0].all_input_nodes), None)
    if scales is None or not scales.by_row or start is None or start not in collectives.find(start.graph, KIND):
        return None
    own = match_gather.read(start)
    place = next((each for each in own.readers if each.node is scales.x), None)
    users = {user for each in (*found.readers, *own.readers) for user in each.users}
    if place is None or users != {each.node for each in products} or len(place.dtypes) > 1:
        return None
    rows, of_scales = ([*each.layout.dims[0]] for each in (reader, place))
    if found.sources not in rows or found.collective.group_name != own.collective.group_name:
        return None
    before = rows[: rows.index(found.sources)], of_scales[: of_scales.index(own.sources)]
    return (own, place) if sizes(before[:1]) == sizes(before[1:]) else None


def _scaling(rewriter: Rewriter, match: AllGatherMatmulMatch, sent: SentDims) -> list[Any]:
    first, *others = match.products
    if first.scales is None:
        return []
    rows = match.gathered.rows(sent, gathered=match.scales is None)
    if match.scales is not None:
        own, place = match.scales
        order = tuple(f for f in place.layout.order if f is not own.sources)
        x = rewriter.arrange(own.x, own.x_layout.order, Layout((order,)))
        first = replace(first, scales=first.scales._replace(x=x))
    of_x, of_w, dtype, fast = first.scaling(rewriter, rows)
    fast &= all(each.scales.fast for each in others if each.scales is not None)
    scale_ws = [of_w, *(each.scaling(rewriter, rows)[1] for each in others)]
    return [of_x, scale_ws, dtype, fast, match.scales is not None]


def _consumers(found: Gathered) -> list[tuple[Reader, Product]]:
    try:
        return found.consumers()
    except CannotFuse:
        if found.x.target in MATMULS | SCALED:  # as the gather of logits
            raise CannotFuse("the gathered tensor is the result of a matmul: no op fuses that order") from None
        raise


def rewrite(rewriter: Rewriter, match: AllGatherMatmulMatch) -> Node:
    found, products, reader, sent = match.gathered, match.products, match.reader, match.sent
    nodes, start = [product.node for product in products], found.collective.start
    others = found.others(nodes)
    operands = [operand for product in products for operand in product.operands]
    if match.scales is not None:
        operands = [match.scales[0].x, *(each for each in operands if each is not match.scales[1].node)]
    collectives.hoist(operands, start)
    with rewriter.before(start, like=min(nodes)):
        call = rewriter.call(
            products[0].op(OP),
            found.sent(rewriter, sent.dims, reader.dtypes),
            [product.w(rewriter, sent.batch, reader.layout.dims[0]) for product in products],
            [product.per_column(rewriter, product.bias) for product in products],
            *_scaling(rewriter, match, sent),
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
        rearranged = found.rearranged(rewriter, call, sent.received.order, others, reader)
    match_gather.replace(found, results, rearranged)
    return call
