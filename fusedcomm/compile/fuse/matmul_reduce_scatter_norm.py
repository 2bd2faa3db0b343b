"""matmul_reduce_scatter and a tail become fusedcomm::matmul_reduce_scatter_norm."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import matmul_reduce_scatter, tail, wire
from fusedcomm.compile.fuse.matmul_reduce_scatter import MatmulReduceScatterMatch
from fusedcomm.compile.fuse.tail import Tail
from fusedcomm.compile.graph.rewrite import Rewriter, sizes
from fusedcomm.plan.geometry.cut import EVEN

OP = "matmul_reduce_scatter_norm"
KIND = "reduce_scatter"


@dataclass(frozen=True)
class MatmulReduceScatterNormMatch(MatmulReduceScatterMatch):
    tail: Tail

    @property
    def keeps_order(self) -> bool:
        return False  # without a workspace it sends all at once, and the op without a norm pieces


def match(start: Node) -> MatmulReduceScatterNormMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    found = matmul_reduce_scatter.match(start)
    received, blocks, _ = found.reduced.collective.received(found.reduced.sent)
    behind = tail.find(found.reduced, received, found.reduced.product.cut([blocks])[0])
    return MatmulReduceScatterNormMatch(found.reduced, found.target, found.layout, behind)


def rewrite(rewriter: Rewriter, match: MatmulReduceScatterNormMatch) -> Node:
    product, collective, blocks = match.reduced.product, match.reduced.collective, match.reduced.blocks
    with rewriter.before(collective.start, like=product.node):
        x, w, dims = matmul_reduce_scatter.operands(rewriter, match)
        shape = sizes([[f for f in dim if f is not blocks] for dim in dims])
        bias, *others = match.tail.operands(rewriter, shape)
        call = rewriter.call(
            torch.ops.fusedcomm.matmul_reduce_scatter_norm.default,
            x,
            w,
            bias,
            *others,
            next(i for i, dim in enumerate(dims) if blocks in dim),
            *EVEN.to_scatter,
            collective.group_size,
            collective.group_name,
            wire.of(collective.start),
        )
        results = match.tail.results(rewriter, call)
    match.tail.replace(*results)
    return call
