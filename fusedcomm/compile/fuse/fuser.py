"""Collectives that stand beside matmuls become ops of fusedcomm: find, match and rewrite, over one graph."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fusedcomm.compile.fuse import cut_results, match_gather, match_reduce, matmul_all_to_all, without_matmul
from fusedcomm.compile.fuse.time_saved import saving_us
from fusedcomm.compile.graph import collectives, normalize
from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.graph.effects import sort, writes_before_end
from fusedcomm.compile.graph.layout import CannotFuse
from fusedcomm.compile.graph.matmuls import Product
from fusedcomm.compile.graph.rewrite import Rewriter, held_outputs
from fusedcomm.compile.graph.views import WAIT, is_read, merge_views, value


class Fusion(NamedTuple):
    """An op, the kind of collective that it stands for, and how it is found and written."""

    op: str
    kind: str
    match: Callable[[Node], Any]
    rewrite: Callable[[Rewriter, Any], Any]


FUSIONS = (  # if two match one collective, the first takes it
    Fusion("matmul_all_to_all", "all_to_all", matmul_all_to_all.match, matmul_all_to_all.rewrite),
    Fusion("all_to_all_matmul", "all_to_all", match_gather.match, match_gather.rewrite),
    Fusion("all_gather_matmul", "all_gather", match_gather.match, match_gather.rewrite),
    Fusion("matmul_reduce_scatter_norm", "reduce_scatter", match_reduce.match_norm, match_reduce.rewrite),
    Fusion("matmul_reduce_scatter", "reduce_scatter", match_reduce.match, match_reduce.rewrite),
    Fusion("matmul_all_reduce_norm", "all_reduce", match_reduce.match_norm, match_reduce.rewrite),
    Fusion("matmul_all_reduce", "all_reduce", match_reduce.match, match_reduce.rewrite),
)
OPS = tuple(fusion.op for fusion in FUSIONS)


@dataclass(frozen=True)
class Fused:
    """One rewrite: an op of fusedcomm in place of one or more collectives and their matmuls."""

    op: str
    node: Node
    savings_us: dict[str, float]  # by the name of the collective's start
    erased: tuple[str, ...]  # names of the nodes that it removed
    created: tuple[Node, ...]


class Fuser:
    """Fuses, and never breaks a graph: a failure leaves it as it was, and ``reasons`` says why."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.rewriter = Rewriter(graph)
        self.reasons: dict[str, list[str]] = {}  # by the name of the collective's start
        self.written: dict[str, str] = {}  # name of a normalized node -> the start in its place

    def normalize(self, gathers: bool) -> None:
        """``gathers``: whether gathers may become exchanges; see `normalize.find`."""
        if not writes_before_end(self.graph):
            merge_views(self.graph)
        with held_outputs(self.graph):
            self._try("normalize", normalize.sizes_from_inputs, self.rewriter)
            found = self._try("normalize", normalize.find, self.graph, gathers) or []
            starts = {
                exchange.start.name: self._try("normalize", normalize.rewrite, self.rewriter, exchange)
                for exchange in found
            }
        self.written = {name: start.name for name, start in starts.items() if start is not None}

    def fuse(
        self,
        ops: Sequence[str],
        reject: Callable[[Node], str | None] = lambda start: None,
        changes: bool | None = None,
        changed: Collection[str] = (),
    ) -> list[Fused]:
        """Fuse what ``reject`` returns no reason for.

        ``changes``: True for the rewrites alone that all ranks must agree to, those of the collectives ``changed`` and
        what `_change` names; False for the others alone.
        """
        found = []
        if writes_before_end(self.graph):
            # An op reads its operands where the collective stands, and they may have been overwritten by then.
            reject = _writes_in_place
        with held_outputs(self.graph):
            self._cut_results(ops)
            for fusion in FUSIONS:
                if fusion.op in ops:
                    for start in collectives.find(self.graph, fusion.kind):
                        fused = self._try(fusion.op, self._fuse, fusion, reject, changes, changed, start)
                        found += [fused] if fused is not None else []
            if found:
                sort(self.graph)
                self.graph.lint()
        return found

    def plain(self, ops: Sequence[str], kept: Collection[str]) -> list[Fused]:
        """Make plain ops of the collectives that ``ops`` could stand for, where they found no matmul; some are kept."""
        found = []
        with held_outputs(self.graph):
            for kind in dict.fromkeys(fusion.kind for fusion in FUSIONS if fusion.op in ops):
                nodes = {
                    each.name: self._try("plain", without_matmul.rewrite, self.rewriter, each)
                    for each in collectives.find(self.graph, kind)
                    if each.name not in kept
                }
                found += [Fused(kind, node, {name: 0.0}, (name,), ()) for name, node in nodes.items() if node]
            if found:
                self.graph.lint()
        return found

    def _cut_results(self, ops: Sequence[str]) -> None:
        starts = [
            start
            for kind in ("all_to_all", "reduce_scatter", "all_reduce")
            for start in collectives.find(self.graph, kind)
        ]
        beside = partial(products_beside, ops=ops)
        for matmul, found in cut_results.find(starts).items():
            attempt("fuse", cut_results.rewrite, self.rewriter, found, beside, matmul)

    def _fuse(
        self,
        fusion: Fusion,
        reject: Callable[[Node], str | None],
        changes: bool | None,
        changed: Collection[str],
        start: Node,
    ) -> Fused:
        match = fusion.match(start)
        if changes is False and len(match.collectives) > 1:
            match = match.alone
        if changes is not None and changes != bool(reason := _change(match, changed)):
            raise CannotFuse(f"{reason}, and not all ranks agreed to it" if reason else "each rank decides alone")
        for each in match.collectives:
            reason = reject(each.start)
            if reason is not None:
                raise CannotFuse(reason)
        savings = {each.start.name: saving_us(each, match.products) for each in match.collectives}
        is_unread = not any(is_read(each.wait) for each in match.collectives)
        node = fusion.rewrite(self.rewriter, match)
        created, erased = self.rewriter.created, self.rewriter.erased
        if is_unread:
            created = [*created, self._waited_for(node)]
        return Fused(node.target._opname, node, savings, tuple(erased), tuple(created))

    def _waited_for(self, op: Node) -> Node:
        """A wait keeps an unread op, as it keeps a collective: peers may read theirs, and wait for this rank."""
        with self.rewriter.before(op.next, like=op):
            return self.rewriter.call(WAIT, op)

    def _try(self, what: str, act: Callable[..., Any], *args: Any) -> Any:
        """``act(*args)``, or None if it cannot be done; the reason is noted for the collective that args end with."""
        reasons: list[str] = []
        result = attempt(what, act, *args, reasons=reasons)
        if reasons and isinstance(args[-1], Node) and not what.endswith("_norm"):  # the op without a norm is next
            self.reasons.setdefault(args[-1].name, []).append(*reasons)
        return result


def _change(match: Any, changed: Collection[str]) -> str | None:
    """The change of what ranks send, or of its order, that the op of this match makes; None if there is none.

    Without one each rank decides alone: peers with another matmul there, or none, understand it.
    """
    first, *others = match.collectives
    if others:
        return f"{len(others) + 1} exchanges of one x would be one"
    if first.start.name in changed:
        return "what all ranks have changed would be fused"  # else it stays with the group's backend
    if value(first.sent).device.type == "cuda" and any(product.scales for product in match.products):
        return "scaled matmuls have proofs of their own, which all ranks make together"
    if match.dtype != value(first.sent).dtype:
        return f"{match.dtype} would be sent in place of {value(first.sent).dtype}"
    if not match.keeps_order:
        return "it would send other chunks than the collective, or another order of them"
    operands = [operand for product in match.products for operand in product.operands]
    if any(map(collectives.communicates, collectives.late_inputs(operands, first.start))):
        return "its matmul waits for a later collective"
    return None


def products_beside(start: Node, ops: Sequence[str]) -> list[Product]:
    """The matmuls that one of the ops can replace with the collective started here, in the graph as it is."""
    for fusion in FUSIONS:
        if fusion.op in ops and fusion.kind == collectives.kind_of(start):
            match = attempt(fusion.op, fusion.match, start)
            if match is not None:
                return list(match.products)
    return []


def _writes_in_place(start: Node) -> str:
    return "the graph writes in place"
