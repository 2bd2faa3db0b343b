"""``all_reduce(a) + all_reduce(b)`` becomes ``all_reduce(a + b)``, which sends half as much; so does reduce_scatter."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fusedcomm.compile.fuse.fuser import products_beside
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.graph.collectives import Collective, functional
from fusedcomm.compile.graph.effects import sort
from fusedcomm.compile.graph.layout import CannotFuse, Layout, size_of
from fusedcomm.compile.graph.matmuls import check_single_use
from fusedcomm.compile.graph.rewrite import Rewriter, held_outputs, hidden_from
from fusedcomm.compile.graph.views import WAIT, along, path_back, value
from fusedcomm.compile.merge.merger import obstacle
from fusedcomm.plan.geometry.shapes import REDUCE_OPS

aten = torch.ops.aten


@dataclass(frozen=True)
class Term:
    """A reduction, rearranged, that only a sum reads."""

    node: Node
    collective: Collective
    x: Node  # the operand, before any node that only rearranges it
    x_layout: Layout
    target: Layout  # of x such that its reduction has the shape of the sum

    @property
    def key(self) -> tuple[object, ...]:
        """Terms with equal keys can be reduced together."""
        return (self.collective.kind, self.collective.group_name, self.collective.reduce_op, *_form(self.node))

    @property
    def order(self) -> tuple[object, ...]:
        """How the target rearranges x."""
        order = self.x_layout.order
        return [factor.size for factor in order], [[order.index(factor) for factor in dim] for dim in self.target.dims]


class SumMerger:
    """Merges reductions that are terms of one sum. ``into``: name of a gone reduction -> name of the merged one.

    ``plain``: also merge reductions that no op fuses. An op detects a peer that runs another graph, as after one rank
    recompiles its function; a plain reduction would take the peer's numbers.
    """

    def __init__(self, graph: Graph, fuse_ops: Sequence[str] = (), plain: bool = True) -> None:
        self.graph, self.fuse_ops, self.plain = graph, fuse_ops, plain
        self.rewriter = Rewriter(graph)
        self.into: dict[str, str] = {}

    def merge(self) -> None:
        if obstacle(self.graph) is not None:
            return
        with held_outputs(self.graph):
            for root in self.graph.find_nodes(op="call_function", target=aten.add.Tensor):
                if not root._erased and _is_sum(root) and not any(map(_is_sum, _only(root.users))):
                    self._merge_terms(root)
        if self.into:
            sort(self.graph)

    def _merge_terms(self, root: Node) -> None:
        first: dict[tuple[object, ...], Term] = {}
        for term in [attempt("merge", _read, *each) for each in _terms(root)]:
            if term is not None and term.key in first:
                first[term.key] = attempt("merge", self._merge, first[term.key], term) or first[term.key]
            elif term is not None:
                first[term.key] = term

    def _merge(self, a: Term, b: Term) -> Term:
        """Make a's term the reduction of both, and b's go."""
        starts = [a.collective.start, b.collective.start]
        all_fused = all(products_beside(start, self.fuse_ops) for start in starts)
        with self.rewriter.before(max(starts), like=starts[0]):
            x, start = self._emit(a, b)
            wait = self.rewriter.call(functional.wait_tensor.default, start)
            if all_fused or not self.plain:
                self._check_fused(wait, a, b)
        (parent,) = b.node.users
        (other,) = (each for each in parent.args if each is not b.node)
        parent.replace_all_uses_with(other)  # type: ignore[arg-type]
        self.rewriter.erase_unused(parent)
        a.node.replace_all_uses_with(wait)
        self.rewriter.erase_unused(a.node)
        self.into |= {each.name: start.name for each in starts}
        return Term(wait, collectives.read(start), x, a.x_layout if a.order == b.order else a.target, a.target)

    def _emit(self, a: Term, b: Term) -> tuple[Node, Node]:
        """Returns (sum of both operands, start of its reduction)."""
        call, arrange = self.rewriter.call, self.rewriter.arrange
        if a.order == b.order:  # added before it is rearranged, as an op for a sum of matmuls wants it
            x = call(aten.add.Tensor, a.x, self.rewriter.reshape(b.x, a.x_layout.shape))
            sent = arrange(x, a.x_layout.order, a.target)
        else:
            parts = [arrange(each.x, each.x_layout.order, each.target) for each in (a, b)]
            x = sent = call(aten.add.Tensor, *parts)
        start = a.collective.start
        return x, call(start.target, self.rewriter.contiguous(sent), *start.args[1:])

    def _check_fused(self, wait: Node, a: Term, b: Term) -> None:
        """Raises CannotFuse if no op can fuse the merged reduction of ``wait`` in the place of a and b."""
        with ExitStack() as stack:
            a.node.replace_all_uses_with(wait)
            stack.callback(wait.replace_all_uses_with, a.node)
            for term in {a.x: a, b.x: b}.values():
                readers = [user for user in term.x.users if user not in self.rewriter.created]
                stack.enter_context(hidden_from(term.x, readers))
            if not products_beside(wait.args[0], self.fuse_ops):  # type: ignore[arg-type]
                raise CannotFuse("merged, fewer could be fused with matmuls")


def _has_room(collective: Collective) -> bool:
    """Whether adding before the reduction is safe: a narrow dtype overflows where the results do not."""
    dtype = value(collective.sent).dtype
    if dtype.is_floating_point or dtype.is_complex:
        return torch.finfo(dtype).max > torch.finfo(torch.float16).max
    return collective.reduce_op == "sum" and dtype != torch.bool  # averages are rounded; integers wrap around


def _terms(root: Node) -> Iterator[tuple[Node, Node]]:
    """The terms of a sum, from left to right, each with the addition that reads it."""
    stack: list[tuple[Any, Node]] = [(operand, root) for operand in reversed(root.args)]
    while stack:
        node, user = stack.pop()
        if _is_sum(node) and _only(node.users) == [user]:
            stack += [(operand, node) for operand in reversed(node.args)]
        else:
            yield node, user


def _is_sum(node: object) -> bool:
    """Whether node adds two tensors that are like it in all respects, so that it can go and leave one of them."""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return False
    a, b = node.args
    if not isinstance(a, Node) or not isinstance(b, Node) or a is b:
        return False
    return _form(a) == _form(b) == _form(node) and all(value(each).is_contiguous() for each in (a, b, node))


def _form(node: Node) -> tuple[object, ...]:
    like = value(node)
    return like.dtype, like.device, *map(size_of, like.shape)


def _only(users: dict[Node, None]) -> list[Node]:
    return list(users) if len(users) == 1 else []


def _read(node: Node, user: Node) -> Term | None:
    """node as a reduction, or None if it is another term. Raises CannotFuse."""
    path = path_back(node, through_casts=False)
    start = path[0].args[0] if path[0].target is WAIT else None
    if not isinstance(start, Node) or collectives.kind_of(start) not in ("all_reduce", "reduce_scatter"):
        return None
    collective = collectives.read(start)
    if collective.reduce_op not in REDUCE_OPS or value(node).ndim == 0 or not _has_room(collective):
        return None
    check_single_use(path, user)
    sent_path = path_back(collective.sent, through_casts=False)
    x_layout = Layout.of(value(sent_path[0]).shape)
    sent = along(sent_path, x_layout)
    if collective.kind == "all_reduce":
        return Term(node, collective, sent_path[0], x_layout, along(path, sent))
    received, blocks, _ = collective.received(sent)
    return Term(node, collective, sent_path[0], x_layout, along(path, received).insert(0, blocks))
