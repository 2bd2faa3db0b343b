"""A reduce_scatter or all_reduce of a matmul's result, or of the sum of several."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import wire
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout
from fusedcomm.compile.graph.matmuls import Product, check_single_use, producer
from fusedcomm.compile.graph.views import along, follow, is_cast, path_back, sizes_of, value

aten = torch.ops.aten
REDUCE_OPS = ("sum", "avg")
MASKS = {aten.where.self, aten.mul.Tensor, aten.masked_fill.Scalar, aten.index_put.default}


@dataclass(frozen=True)
class Reduced:
    collective: Collective
    product: Product
    sent: Layout  # of what the collective sends
    blocks: Factor

    def keeps_order(self, y: Layout) -> bool:
        return wire.keeps_order(y.order, self.sent.order, self.blocks)


def read(start: Node) -> tuple[Reduced, list[tuple[Node, Layout]]]:
    """Returns (reduction, its result and rearrangements of it with their layouts)."""
    collective = collectives.read(start)
    if collective.reduce_op not in REDUCE_OPS:
        raise CannotFuse(f"reduce_op must be sum or avg, got {collective.reduce_op}")
    path = path_back(collective.sent, through_casts=True)
    if _is_looked_up(path[0]):
        raise CannotFuse("what is reduced is looked up in a table, as a parallel embedding does: no op fuses that")
    product = producer(path[0], sums=True)
    if any(is_cast(node) for node in path[1:]):
        raise CannotFuse("the matmul's result is cast before it is reduced")
    check_single_use(path, start)
    sent = along(path, product.layout)
    received, blocks = sent, Factor(1)
    if collective.kind == "reduce_scatter":
        received, blocks, _ = collective.received(sent)
    return Reduced(collective, product, sent, blocks), follow(collective.wait, received)


def _is_looked_up(node: Node) -> bool:
    """Whether node is a lookup's result, perhaps masked."""
    while node.target in MASKS:
        tensors = [each for each in node.args if isinstance(each, Node) and value(each).dtype.is_floating_point]
        wide = [each for each in tensors if sizes_of(value(each)) == sizes_of(value(node))]
        if not wide:
            return False
        node = path_back(wide[-1], through_casts=True)[0]  # where(mask, 0, looked up)
    return node.target is aten.embedding.default
