"""Tensors in the exchanged layout, computed from operands in that layout.

``exchanged(t)`` has t's shape: block p of every rank s is on rank p, in the place of block s, as an all_to_all along
the blocks' dim leaves it. A second all_to_all gives t back. For an op that acts on each block alone,
``exchanged(op(t)) = op(exchanged(t))``, with the op's own arguments.

A tensor without blocks, as a table of angles per token, is needed from every rank: ``of_all(t)`` is [R, *t.shape], in
rank order, and is then broadcast along the blocks.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fusedcomm.compile.commute.digests import MOVED
from fusedcomm.compile.commute.places import (
    COMPLEX,
    REDUCTIONS,
    SUMS,
    VIEWS,
    Place,
    dims_argument,
    is_elementwise,
    permuted,
    rule,
    shape,
    tensors,
)
from fusedcomm.compile.graph.collectives import functional
from fusedcomm.compile.graph.layout import CannotFuse, Size, assumed, product, quotient, refuse
from fusedcomm.compile.graph.matmuls import name_of
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.sequence import is_fill
from fusedcomm.compile.graph.split_cat import args_of
from fusedcomm.compile.graph.views import CASTS, PERMUTES, SAME, WAIT, value

aten = torch.ops.aten
SMALL = "fusedcomm_small"  # in the metadata of an exchange that may be joined with others
NORMED = "fusedcomm_normed"  # in the metadata of nodes computed from blocks and from a sum over all blocks
PURPOSES = CONSTANTS, NORMS, GRADIENTS = "constants", "sums of norms", "gradients of weights"
SENT = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
REARRANGES = VIEWS | PERMUTES | SAME | CASTS | {aten.expand.default}


class Mover:
    """Adds nodes in the exchanged layout of one group to a graph, each behind its original."""

    def __init__(self, graph: Graph, group_name: str, group_size: int, device: torch.device) -> None:
        self.graph, self.group_name, self.group_size, self.device = graph, group_name, group_size, device
        self.rewriter = Rewriter(graph)
        self.places: dict[Node, Place | None] = {}  # of the blocks; None: computed from blocks, has none
        self.seeds: dict[Node, Place] = {}  # results of matmuls: exchanged as they are
        self.given: dict[Node, Node] = {}  # result of an exchange -> its operand
        self.created: dict[Node, None] = {}
        self._last: dict[Node, Node] = {}
        # each is written once
        self.exchanged, self.of_all = cache(self._exchange), cache(self._gather)
        self.part_of_sum, self._along_blocks = cache(self._part_of_sum), cache(self._spread)

    # the two layouts

    def _exchange(self, node: Node, place: Place) -> Node:
        """``node`` exchanged; its blocks lie at ``place``."""
        if node in self.given and self.places[node] == place:
            return self.given[node]
        if is_fill(node):
            return node  # equal numbers
        refuse(self.places.get(node, place) not in (place, None), f"{name_of(node)} is exchanged along two dims")
        if (node in self.places and node not in self.seeds) or self._may_be_passed(node, place):
            return self._repeated(node, place)
        small = None if node in self.seeds else CONSTANTS
        return self._write(node, lambda: self._all_to_all(node, place, small))

    def _may_be_passed(self, node: Node, place: Place | None = None) -> bool:
        """Whether node's only operand may be exchanged in its stead: it is no larger.

        Numbers in node's arguments may be this rank's own, as the first of its positions is.
        """
        is_plain = is_elementwise(node) and len(node.args) == 1 and not node.kwargs
        if node in self.places or not (node.target in REARRANGES or is_plain):
            return False
        (operand,) = tensors(node)
        if place is not None:
            try:
                rule(node, operand).back(place, self.group_size, node)
            except CannotFuse:
                return False
        return num_bytes(operand) <= num_bytes(node)

    def _repeated(self, node: Node, place: Place) -> Node:
        """The op of node once more, with exchanged operands."""
        operands: dict[Node, Node] = {}
        for operand in tensors(node):
            back = rule(node, operand).back(place, self.group_size, node)
            if is_fill(operand):
                operands[operand] = operand
            elif back is not None:
                operands[operand] = self.exchanged(operand, back)
            else:
                operands[operand] = self._along_blocks(operand, place, shape(node)[place.dim])
        repeated = self._write(node, lambda: self._call(node, operands))
        if any(each in self.places and self.places[each] is None for each in operands):
            repeated.meta[NORMED] = True
        return repeated

    def _spread(self, node: Node, place: Place, size: Size) -> Node:
        """A tensor without blocks, broadcast: each rank's part at its places along a dim of ``size``."""
        of_all, own, group_size, rewriter = self.of_all(node), shape(node), self.group_size, self.rewriter
        own = [1] * (-place.dim - len(own)) + own
        at = len(own) + place.dim
        before, behind = own[:at], own[at + 1 :]
        outer = _known_quotient(size, place.inner * group_size)

        def write() -> Node:
            parts = rewriter.reshape(of_all, [group_size, *own])
            dims = [*range(1, at + 1), 0, *range(at + 1, len(own) + 1)]
            parts = rewriter.call(aten.permute.default, parts, dims)
            parts = rewriter.reshape(parts, [*before, 1, group_size, 1, *behind])
            parts = rewriter.call(aten.expand.default, parts, [*before, outer, group_size, place.inner, *behind])
            return rewriter.reshape(parts, [*before, size, *behind])

        return self._write(node, write)

    def _gather(self, node: Node) -> Node:
        """[R, *shape]: ``node`` of every rank."""
        size = [self.group_size, *shape(node)]
        if is_fill(node):
            return self._write(node, lambda: self.rewriter.call(aten.expand.default, node, size))
        if node in self.places and node not in self.seeds:
            if self.is_sum_over_blocks(node):
                part = self.part_of_sum(node)
                return self._write(node, lambda: self.rewriter.cast(self._all_reduce(part), value(node).dtype))
            return self._batched(node)
        if self._may_be_passed(node):
            return self._batched(node)

        def write() -> Node:
            parts = self.rewriter.call(aten.expand.default, node, size)
            return self._start_and_wait(parts, CONSTANTS)

        return self._write(node, write)

    def _batched(self, node: Node) -> Node:
        """The op of node for the parts of all ranks at once: dims are counted from the last, sizes have R in front."""
        operands = {operand: self.of_all(operand) for operand in tensors(node)}
        ndim, size = len(shape(node)), [self.group_size, *shape(node)]

        def write() -> Node:
            call, args = self.rewriter.call, args_of(node)
            if node.target in VIEWS:
                return self.rewriter.reshape(operands[args[0]], size)
            if node.target in PERMUTES:
                along = permuted(node, args[0]).along
                return call(aten.permute.default, operands[args[0]], [0, *(d % ndim + 1 for d in along if d)])
            for operand, of_all in operands.items():  # the parts in front of all dims
                own = shape(operand)
                if len(own) < ndim:
                    new_dims: list[Size] = [1] * (ndim - len(own))
                    operands[operand] = self.rewriter.reshape(of_all, [self.group_size, *new_dims, *own])
            if node.target is aten.expand.default:
                return call(aten.expand.default, operands[args[0]], size)
            if node.target in REDUCTIONS:
                dims = dims_argument(node)
                return call(_WITH_DIMS.get(node.target, node.target), operands[args[0]], dims, *args[2:], **node.kwargs)
            return self._call(node, operands)

        return self._write(node, write)

    # sums over blocks

    def is_sum_over_blocks(self, node: Node) -> bool:
        if node.target not in SUMS:
            return False
        (operand,) = tensors(node)
        place = self.places.get(operand)
        return place is not None and place.dim in dims_argument(node)

    def _part_of_sum(self, node: Node) -> Node:
        """[R, *shape]: of a sum over blocks, the part of this rank's blocks, for every rank."""
        (operand,) = tensors(node)
        place = self.places[operand]
        assert place is not None
        exchanged = self.exchanged(operand, place)
        return self._write(node, lambda: self._sum(node, exchanged, place))

    def _sum(self, node: Node, exchanged: Node, place: Place) -> Node:
        size, rewriter, dtype = shape(exchanged), self.rewriter, value(node).dtype
        at, dims = len(size) + place.dim, [d % len(size) for d in dims_argument(node)]
        parts = self._by_block(
            rewriter.cast(exchanged, dtype), place
        )  # cast as sum(x, dtype=dtype) does before it adds
        summed = [d + 1 if d < at else d + 2 for d in dims if d != at] + [at + 1, at + 2]
        if dtype.is_floating_point:
            dtype = torch.promote_types(dtype, torch.float32)  # rounded once, when all parts are added
        total = rewriter.call(aten.sum.dim_IntList, parts, sorted(summed), False, dtype=dtype)
        total = rewriter.reshape(total, [self.group_size, *shape(node)])
        if node.target in (aten.mean.dim, aten.mean.default):
            total = rewriter.call(aten.div.Tensor, total, rewriter.size(product(size[d] for d in dims)))
        return total

    # back to the program's layout

    def local(self, node: Node, feeds_matmul: bool) -> Node:
        """``node`` in the program's layout, recomputed from the exchanged one."""
        is_small = max(map(num_bytes, self.given.values())) >= 4 * num_bytes(node)
        small = GRADIENTS if is_small and not feeds_matmul else None
        if self.is_sum_over_blocks(node):
            part = self.part_of_sum(node)
            return self._write(node, lambda: self._sum_of_parts(node, part))
        place = self.places[node]
        if place is None:
            raise CannotFuse(f"{name_of(node)} is read in the layout of the program too")
        exchanged = self.exchanged(node, place)
        return self._write(node, lambda: self._all_to_all(exchanged, place, small))

    def _sum_of_parts(self, node: Node, part: Node) -> Node:
        received = self._start_and_wait(part, GRADIENTS)
        return self.rewriter.cast(self.rewriter.call(aten.sum.dim_IntList, received, [0]), value(node).dtype)

    # writing

    def _all_to_all(self, node: Node, place: Place, small: str | None) -> Node:
        size = shape(node)
        at = len(size) + place.dim
        received = self._start_and_wait(self._by_block(node, place), small)
        back = [*range(1, at + 2), 0, *range(at + 2, len(size) + 2)]
        return self.rewriter.reshape(self.rewriter.call(aten.permute.default, received, back), size)

    def _by_block(self, node: Node, place: Place) -> Node:
        """[R, ..., outer, inner, ...]: all that one rank gets is together."""
        size = shape(node)
        at = len(size) + place.dim
        outer = _known_quotient(size[at], place.inner * self.group_size)
        cut = self.rewriter.reshape(node, [*size[:at], outer, self.group_size, place.inner, *size[at + 1 :]])
        dims = [at + 1, *(d for d in range(len(size) + 2) if d != at + 1)]
        return self.rewriter.call(aten.permute.default, cut, dims)

    def _start_and_wait(self, sent: Node, small: str | None) -> Node:
        call, splits, size, dtype = self.rewriter.call, [1] * self.group_size, shape(sent), value(sent).dtype
        refuse(value(sent).device != self.device, f"a tensor of {value(sent).device} stands between")
        sent = self.rewriter.contiguous(sent)
        if dtype.is_complex:
            sent = call(aten.view_as_real.default, sent)
        elif dtype not in SENT:
            sent = call(aten.view.dtype, self.rewriter.reshape(sent, [size[0], product(size[1:])]), torch.uint8)
        start = call(functional.all_to_all_single.default, sent, splits, splits, self.group_name)
        if small is not None:
            start.meta[SMALL] = small
        received = call(WAIT, start)
        if dtype.is_complex:
            return call(aten.view_as_complex.default, received)
        return received if dtype in SENT else self.rewriter.reshape(call(aten.view.dtype, received, dtype), size)

    def _all_reduce(self, part: Node) -> Node:
        part = self.rewriter.contiguous(part)
        if value(part).dtype not in SENT:
            raise CannotFuse(f"a sum in {value(part).dtype} over the blocks that are exchanged stands between")
        start = self.rewriter.call(functional.all_reduce.default, part, "sum", self.group_name)
        start.meta[SMALL] = NORMS
        return self.rewriter.call(WAIT, start)

    def _call(self, node: Node, operands: dict[Node, Node]) -> Node:
        target = aten.reshape.default if node.target in VIEWS else node.target
        args: Any = map_arg(node.args, lambda each: operands.get(each, each))
        kwargs: Any = map_arg(node.kwargs, lambda each: operands.get(each, each))
        if node.target in VIEWS:
            return self.rewriter.reshape(args[0], shape(node))
        if target in COMPLEX:  # strides must be those of pairs
            args = (self.rewriter.contiguous(args[0]),)
        result = self.rewriter.call(target, *args, **kwargs)
        # a number that became a tensor with dims decides on the dtype
        return self.rewriter.cast(result, value(node).dtype) if is_elementwise(node) else result

    def _write(self, node: Node, write: Callable[[], Node]) -> Node:
        """Run ``write`` behind ``node`` and behind nodes inserted there before; returns its result."""
        anchor = node
        if node.op == "placeholder":
            anchor = self.graph.find_nodes(op="placeholder")[-1]
        before = self._last.get(anchor, anchor).next
        with self.rewriter.before(before, like=node):
            result = write()
        if self.rewriter.created:
            self._last[anchor] = self.rewriter.created[-1]
            self.created.update(dict.fromkeys(self.rewriter.created))
            for each in self.rewriter.created:
                each.meta[MOVED] = self.group_name
        return result


_WITH_DIMS = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}


def _known_quotient(a: Size, b: Size) -> Size:
    found = quotient(a, b)
    if found is None:  # b is 0
        raise CannotFuse("it has no elements")
    return found


def num_bytes(node: Node) -> int:
    """About: symbols are as long as `assumed` says, which is equal on all ranks."""
    return math.prod(map(assumed, shape(node))) * value(node).dtype.itemsize
