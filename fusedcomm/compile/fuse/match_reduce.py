"""matmul -> views -> reduce_scatter or all_reduce becomes fusedcomm::matmul_reduce_scatter or matmul_all_reduce.

A sum of matmuls becomes one with a longer K. With a `tail` behind the reduction, the op with ``_norm`` behind its name
has all of it. An all_reduce has one for few rows alone: they go whole to all ranks, so that each adds its own residual,
as nothing proves that residuals are equal. More rows, whose sums have owners, become `matmul_all_reduce`, and the rest
stays a kernel of the compiler's.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import tail, wire
from fusedcomm.compile.fuse.tail import NO_TAIL, Tail
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout, refuse, size_of
from fusedcomm.compile.graph.matmuls import Product, check_single_use, producer
from fusedcomm.compile.graph.rewrite import Rewriter, group_factors, sizes
from fusedcomm.compile.graph.views import along, follow, is_cast, path_back, value
from fusedcomm.plan.geometry import payloads, shapes
from fusedcomm.plan.geometry.cut import EVEN
from fusedcomm.plan.geometry.norm import goes_at_once

aten = torch.ops.aten


@dataclass(frozen=True)
class ReduceMatch:
    collective: Collective
    product: Product
    sent: Layout  # of what the collective sends
    blocks: Factor  # in no dim behind an all_reduce
    received: Layout  # of the collective's result
    target: Node  # the last node that only rearranges the result
    layout: Layout  # target's layout
    tail: Tail | None = None

    @property
    def collectives(self) -> list[Collective]:
        return [self.collective]

    @property
    def products(self) -> list[Product]:
        return [self.product]

    @property
    def dtype(self) -> torch.dtype:
        return value(self.product.node).dtype

    @property
    def y(self) -> Layout:
        """The product as the op sends it."""
        return self.product.cut([self.blocks])[0]

    @property
    def order(self) -> list[Factor]:
        """The order of factors in the op's result."""
        return [f for f in self.y.order if f is not self.blocks]

    @property
    def keeps_order(self) -> bool:
        """Never with a tail: of few rows whole terms are sent, in place of parts and their sums or of pieces."""
        return self.tail is None and wire.keeps_order(self.y.order, self.sent.order, self.blocks)


def match(start: Node) -> ReduceMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    collective = collectives.read(start)
    refuse(collective.reduce_op not in shapes.REDUCE_OPS, f"reduce_op must be sum or avg, got {collective.reduce_op}")
    path = path_back(collective.sent, through_casts=True)
    product = producer(path[0], sums=True)
    refuse(any(is_cast(node) for node in path[1:]), "the matmul's result is cast before it is reduced")
    check_single_use(path, start)
    sent = along(path, product.layout)
    if collective.kind == "all_reduce":
        _check_blocks(collective, product)
        return ReduceMatch(collective, product, sent, Factor(1), sent, collective.wait, sent)
    received, blocks, _ = collective.received(sent)
    results = follow(collective.wait, received)
    refuse(blocks in product.y.dims[-1][1:], "what is scattered is in the middle of N")
    rest = [f for f in product.y.order if f is not blocks]
    written = [each for each in results if each[1].order == rest]  # no copy after the op
    return ReduceMatch(collective, product, sent, blocks, received, *(written or results)[-1])


def match_norm(start: Node) -> ReduceMatch:
    """The match with its tail. Raises CannotFuse."""
    found = match(start)
    collective = found.collective
    shape = [_most(size) for size in value(start).shape]
    refuse(collective.kind == "all_reduce" and not goes_at_once(shape, collective.group_size), NO_TAIL)
    is_plain = (found.product.bias, found.product.scales, collective.reduce_op) == (None, None, "sum")
    y, layout = follow(collective.wait, found.received)[-1]
    columns = found.y.dims[-1]
    if not is_plain or found.blocks in columns or layout.order != found.order or layout.dims[-1] != columns:
        raise CannotFuse(NO_TAIL)
    return dataclasses.replace(found, tail=tail.find(collective, y))


def rewrite(rewriter: Rewriter, match: ReduceMatch) -> Node:
    product, collective, blocks = match.product, match.collective, match.blocks
    name = f"matmul_{collective.kind}"
    with rewriter.before(collective.start, like=product.node):
        y, rows = product.cut([blocks])
        batch = [dim for each in y.dims[:-2] for dim in group_factors(each, [blocks])]
        rows = [*batch, *rows]
        dims = [*rows, list(y.dims[-1])]
        x, w = product.x(rewriter, rows), product.w(rewriter, batch)
        about = [collective.group_size, collective.group_name, wire.of(collective.start)]
        if collective.kind == "reduce_scatter":
            about = [next(i for i, dim in enumerate(dims) if blocks in dim), *EVEN.to_scatter, *about]
        if match.tail is None:
            before = [None, *product.scaling(rewriter, sizes(rows)), collective.reduce_op]
            call = rewriter.call(product.op(name), x, w, *before, *about, product.per_column(rewriter, product.bias))
            new = {match.target: rewriter.result(rewriter.arrange(call, match.order, match.layout), match.target)}
        else:
            operands = match.tail.operands(rewriter, sizes([[f for f in dim if f is not blocks] for dim in dims]))
            call = rewriter.call(product.op(f"{name}_norm"), x, w, *operands, *about)
            new = match.tail.results(rewriter, call)
    for old, result in new.items():
        if not old._erased:  # as a sum that the norm alone has read
            rewriter.replace(old, result)
    return call


def _check_blocks(collective: Collective, product: Product) -> None:
    """Raises CannotFuse where peers without the matmul may cut what is all-reduced into other blocks."""
    size = collective.group_size
    sent, y = [size_of(each) for each in value(collective.sent).shape] or [1], sizes(product.y.dims)
    lead = y[:-1] if product.batched else [math.prod(y[:-1])]
    if sent[-1] == y[-1] and (not product.batched or lead[0] == 1 or lead[0] % size == 0):
        return
    if not all(isinstance(each, int) for each in (*sent, *y)):
        raise CannotFuse("what is sent is not known to be cut as the matmul's result")
    theirs = payloads.all_reduce(sent, "sum", size)
    ours = shapes.matmul_all_reduce((*lead, 1), (*lead[:-1], 1, y[-1]), "sum", size)
    if ours.chunk_facts(with_dims=False) != theirs.chunk_facts(with_dims=False):
        raise CannotFuse(f"{sent} is sent, which is cut into other blocks than the matmul's {y}")


def _most(size: int | torch.SymInt) -> int:
    """The largest value that size can have, at most 2^62."""
    if isinstance(size, int):
        return size
    most = size.node.shape_env.bound_sympy(size_of(size)).upper
    return int(most) if most.is_Integer else 1 << 62
