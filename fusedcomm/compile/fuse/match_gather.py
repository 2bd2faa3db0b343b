"""all_gather or all_to_all_single -> views -> matmuls becomes one fusedcomm::all_gather_matmul or all_to_all_matmul.

One all_gather serves several matmuls, an all_to_all one. Other readers of the result get the op's by-product.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import wire
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout, Size, refuse, size_of
from fusedcomm.compile.graph.matmuls import MATMULS, SCALED, Product, matmul, name_of
from fusedcomm.compile.graph.rewrite import Rewriter, group_factors, sizes, stand_for
from fusedcomm.compile.graph.views import advance, along, derived, is_cast, is_one_cast, path_back, value, viewed_bytes
from fusedcomm.plan.geometry.cut import EVEN
from fusedcomm.plan.scaling import BYTES

aten = torch.ops.aten


@dataclass
class Reader:
    """The result, perhaps rearranged or cast, and the users that compute with it."""

    node: Node
    layout: Layout
    dtypes: tuple[torch.dtype, ...]  # of what arrives, perhaps viewed, and of the casts up to here
    users: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class SentDims:
    """The dims of x as the op takes it."""

    dims: list[list[Factor]]
    batch: list[list[Factor]]  # batch dims of a batched w
    gather_dim: int
    scatter_dim: int | None
    received: Layout  # of the op's gathered x


@dataclass(frozen=True)
class Gathered:
    """One collective, its operand, and all readers of its result."""

    collective: Collective
    x: Node  # the operand, before any node that only rearranges it
    x_layout: Layout
    sent_layout: Layout  # of what the collective sends
    blocks: Factor  # the same as ``sources`` in an all_gather
    sources: Factor
    readers: list[Reader]

    def consumers(self) -> list[tuple[Reader, Product]]:
        """The matmuls with the result as their left operand."""
        found, reasons = [], []
        for reader in self.readers:
            for user in reader.users:
                try:
                    found.append((reader, self._consumer(reader, user)))
                except CannotFuse as reason:
                    if user.target in MATMULS | SCALED:
                        reasons.append(str(reason))
        if not found:
            users = [name_of(user) for reader in self.readers for user in reader.users]
            goes_to = ", ".join(users[:3]) or "nothing"
            raise CannotFuse(reasons[0] if reasons else f"what arrives goes to {goes_to}, not to a matmul")
        return found

    def _consumer(self, reader: Reader, user: Node) -> Product:
        found = matmul(user)
        refuse(found.xs[0] is not reader.node, "what arrives is the right operand of the matmul, or a scale")
        nodes = {each.node for each in self.readers}
        refuse(depends_on(found.operands, nodes), "the weight is computed from what arrives")
        before, after = reader.dtypes[0], reader.dtypes[-1]
        refuse(after.itemsize > before.itemsize, "what arrives is cast to a larger dtype before the matmul")
        read = {(each.dtypes[0], each.dtypes[-1]) for each in self.readers if each.users}
        refuse(after != before and read != {(before, after)}, "what arrives is read both before and after a cast")
        k = reader.layout.dims[-1]
        order, sent = reader.layout.order, self.x_layout.order
        refuse(self.sources not in order, "what arrives is rearranged across ranks")
        refuse(self.blocks is self.sources and self.sources in k[1:], "the gathered dim is in the middle of K")
        if [f for f in order if f is not self.sources][-1:] != [f for f in sent if f is not self.blocks][-1:]:
            raise CannotFuse("what arrives is transposed before the matmul")
        return found

    def sent_dims(self, received: Layout, batched: bool) -> SentDims:
        """The op's view of x such that the gathered x is ``received``, [rows, K] or [batch, rows, K].

        Rows of a batched matmul that would be exchanged in parts are reordered.
        """
        order = received.order
        before = dict(pairwise(order)).get(self.sources)
        first_k = next((f for f in received.dims[-1] if f is not self.sources), None)
        if before is None or first_k is None:
            raise CannotFuse("the gathered dim is the innermost one")
        found = self._sent_dims(received, before, first_k, batched)
        if not batched or [f for dim in found.batch for f in dim] == list(received.dims[0]):
            return found
        refuse(self.sources in received.dims[-1][1:], "the rows of a batched matmul are exchanged in parts")
        dims = [sorted(dim, key=lambda f: f is not self.sources) for dim in received.dims]
        gather_dim = next(i for i, dim in enumerate(dims) if self.sources in dim)
        sent = [[f for f in dim if f is not self.sources] for dim in dims]
        moved = Layout(tuple(map(tuple, dims)))
        if self.blocks is self.sources:
            return SentDims(sent, dims[:1], gather_dim, None, moved)
        return SentDims([[self.blocks], *sent], [[], *dims[:1]], gather_dim + 1, 0, moved)

    def _sent_dims(self, received: Layout, before: Factor, first_k: Factor, batched: bool) -> SentDims:
        sent = self._sent_order(received.order)
        breaks = [self.blocks, before]
        if first_k is sent[0] or sent[sent.index(first_k) - 1] is not self.blocks:
            breaks.append(first_k)
        if batched:
            breaks += [f for f in received.dims[-2] if f is not self.sources][:1]
        dims = group_factors(sent, breaks)
        num_lead = next(i for i, dim in enumerate(dims) if first_k in dim)
        last_of_rows = before is first_k and self.sources not in received.dims[-1]
        if num_lead == 0 or last_of_rows:
            dims.insert(num_lead, [])  # it has size 1: there must be a row, and a dim along which the sources come
            num_lead += 1
        batch = [[f for f in dim if f is not self.blocks] for dim in dims[: num_lead - 1]]
        firsts = [dim[0] if dim else None for dim in dims]
        gather_dim = firsts.index(None if last_of_rows else before)
        scatter_dim = firsts.index(self.blocks) if self.blocks is not self.sources else None
        return SentDims(dims, batch, gather_dim, scatter_dim, received)

    def result(self, rewriter: Rewriter, y: Node, sent: SentDims, received: Layout) -> Node:
        """An op's result in the form of the matmul of ``received``."""
        n = Factor(size_of(value(y).shape[-1]))
        order = [f for dim in (*sent.received.dims[:-1], (n,)) for f in dim]
        return rewriter.arrange(y, order, Layout((*received.dims[:-1], (n,))))

    def sent(self, rewriter: Rewriter, dims: list[list[Factor]], dtypes: Sequence[torch.dtype]) -> Node:
        x = rewriter.arrange(self.x, self.x_layout.order, Layout(tuple(map(tuple, dims))))
        return rewriter.cast(rewriter.viewed(x, dtypes[0]), dtypes[-1])

    def rows(self, sent: SentDims, gathered: bool) -> list[Size]:
        """The dims of the op's rows: of its gathered x, or of x."""
        dims = [[f for f in dim if f is not self.blocks or not gathered] for dim in sent.dims]
        if gathered:
            dims[sent.gather_dim].insert(0, self.sources)
        return sizes(dims[: len(sent.batch) + 1])

    def copies(self, received: Layout) -> bool:
        """Whether x must be rearranged to arrive in the order of ``received``."""
        return self._sent_order(received.order) != self.x_layout.order

    def _sent_order(self, received: list[Factor]) -> list[Factor]:
        rest = [f for f in received if f is not self.sources]
        order = self.x_layout.order
        if self.blocks is self.sources:
            return rest
        if [f for f in order if f is not self.blocks] == rest:
            return order
        following = dict(pairwise(order)).get(self.blocks)
        at = len(rest) if following is None else rest.index(following)
        return [*rest[:at], self.blocks, *rest[at:]]

    def others(self, fused: Iterable[Node]) -> list[Reader]:
        """The other readers: they get the op's by-product."""
        fused = set(fused)
        readers = [dataclasses.replace(r, users=[u for u in r.users if u not in fused]) for r in self.readers]
        return [reader for reader in readers if reader.users]


def read(start: Node) -> Gathered:
    """The collective that starts here, with its readers. Raises CannotFuse."""
    collective = collectives.read(start)
    path = path_back(collective.sent, through_casts=False)
    viewed = viewed_bytes(path[0])
    before = path[:1] if viewed is None else path_back(viewed, through_casts=False)
    x_layout = Layout.of(value(before[0]).shape)
    sent = along(path, along(before, x_layout))
    received, blocks, sources = collective.received(sent)
    return Gathered(collective, before[0], x_layout, sent, blocks, sources, _readers(collective.wait, received))


@dataclass(frozen=True)
class GatherMatch:
    gathered: Gathered
    reader: Reader  # x of the first matmul
    products: list[Product]  # all multiply the same rows; there is one behind an all_to_all
    scales: tuple[Gathered, Reader] | None = None  # the gather of these rows' scales, which travel behind them

    @property
    def collectives(self) -> list[Collective]:
        return [each.collective for each in (self.gathered, *(self.scales or ())[:1])]

    @property
    def alone(self) -> GatherMatch:
        """The match of x alone: the program's scales stay, and so does their gather."""
        return dataclasses.replace(self, scales=None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the payload; float8 values are the bytes that the collective may send."""
        own, dtypes = value(self.gathered.collective.sent).dtype, self.reader.dtypes
        return own if own in BYTES and dtypes[0] == dtypes[-1] else dtypes[-1]

    @property
    def sent(self) -> SentDims:
        return self.gathered.sent_dims(self.reader.layout, self.products[0].batched)

    @property
    def keeps_order(self) -> bool:
        order = [f for dim in self.sent.dims for f in dim]
        return wire.keeps_order(order, self.gathered.sent_layout.order, self.gathered.blocks)

    def scaling(self, rewriter: Rewriter) -> list[Any]:
        """The arguments of the sibling for float8 operands, with a list of the scales of w."""
        first, *others = self.products
        if first.scales is None:
            return []
        rows = self.gathered.rows(self.sent, gathered=self.scales is None)
        if self.scales is not None:
            own, place = self.scales
            order = tuple(f for f in place.layout.order if f is not own.sources)
            x = rewriter.arrange(own.x, own.x_layout.order, Layout((order,)))
            first = dataclasses.replace(first, scales=first.scales._replace(x=x))
        of_x, of_w, dtype, fast = first.scaling(rewriter, rows)
        fast &= all(each.scales.fast for each in others if each.scales is not None)
        of_ws = [of_w, *(each.scaling(rewriter, rows)[1] for each in others)]
        return [of_x, of_ws, dtype, fast, self.scales is not None]


def match(start: Node) -> GatherMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    found = read(start)
    (reader, first), *more = sorted(found.consumers(), key=lambda each: found.copies(each[0].layout))
    if found.collective.kind != "all_gather":
        return GatherMatch(found, reader, [first])
    products = [first]
    for other, product in more:
        shares = other.layout.order == reader.layout.order and other.layout.shape == reader.layout.shape
        shares &= product.batched == first.batched and value(other.node).dtype == value(reader.node).dtype
        shares &= value(product.node).dtype == value(first.node).dtype
        shares &= (product.scales or ())[::2] == (first.scales or ())[::2]  # one scale of x
        nodes = {each.node for each in products}
        if shares and not depends_on(product.operands, nodes):
            products.append(product)
    return GatherMatch(found, reader, products, attempt("fuse", _scales_beside, found, reader, products))


def _scales_beside(found: Gathered, reader: Reader, products: list[Product]) -> tuple[Gathered, Reader] | None:
    """The gather of the scales of x's rows, and what these products read of it, if nothing else reads either gather."""
    scales = products[0].scales
    start = None if scales is None else next(iter(path_back(scales.x, through_casts=False)[0].all_input_nodes), None)
    if scales is None or not scales.by_row or start is None or collectives.kind_of(start) != "all_gather":
        return None
    own = read(start)
    place = next((each for each in own.readers if each.node is scales.x), None)
    users = {user for each in (*found.readers, *own.readers) for user in each.users}
    if place is None or users != {each.node for each in products} or len(place.dtypes) > 1:
        return None
    rows, of_scales = ([*each.layout.dims[0]] for each in (reader, place))
    if found.sources not in rows or found.collective.group_name != own.collective.group_name:
        return None
    before = rows[: rows.index(found.sources)], of_scales[: of_scales.index(own.sources)]
    return (own, place) if sizes(before[:1]) == sizes(before[1:]) else None


def rewrite(rewriter: Rewriter, match: GatherMatch) -> Node:
    """Write the op of the collective's kind: behind an all_gather, with lists of w, bias, scale of w and result."""
    found, products, reader, sent = match.gathered, match.products, match.reader, match.sent
    nodes, collective = [product.node for product in products], found.collective
    others, gathers = found.others(nodes), sent.scatter_dim is None
    operands = [operand for product in products for operand in product.operands]
    if match.scales is not None:
        operands = [match.scales[0].x, *(each for each in operands if each is not match.scales[1].node)]
    collectives.hoist(operands, collective.start)
    with rewriter.before(collective.start, like=min(nodes)):
        x = found.sent(rewriter, sent.dims, reader.dtypes)
        ws = [product.w(rewriter, sent.batch, reader.layout.dims[0]) for product in products]
        biases = [product.per_column(rewriter, product.bias) for product in products]
        arguments = [ws, biases, *match.scaling(rewriter)]
        if not gathers:
            arguments = [each[0] if isinstance(each, list) else each for each in arguments]
        call = rewriter.call(
            products[0].op(f"{collective.kind}_matmul"),
            x,
            *arguments,
            sent.gather_dim,
            *([] if gathers else [sent.scatter_dim]),
            bool(others),
            *(EVEN.to_gather if gathers else EVEN),
            collective.group_size,
            collective.group_name,
            wire.of(collective.start),
        )
        y = rewriter.call(operator.getitem, call, 0)
        ys = [rewriter.call(operator.getitem, y, i) for i in range(len(products))] if gathers else [y]
        results = [found.result(rewriter, each, sent, reader.layout) for each in ys]
        by_products = []
        for other in others:
            seen = rewriter.call(operator.getitem, call, 1)
            if reader.dtypes[0] == reader.dtypes[-1]:
                seen = rewriter.viewed(seen, other.dtypes[0])
            by_products.append(rewriter.result(rewriter.arrange(seen, sent.received.order, other.layout), other.node))
    for other, seen in zip(others, by_products, strict=True):
        for user in other.users:
            stand_for(other.node, seen)
            user.replace_input_with(other.node, seen)
    for node, result in zip(nodes, results, strict=True):
        rewriter.replace(node, result)
    for each in reversed(found.readers):
        rewriter.erase_unused(each.node)
    return call


def depends_on(operands: Sequence[Node], nodes: set[Node]) -> bool:
    """Whether any of ``operands`` is, or is computed from, one of ``nodes``."""
    late = collectives.late_inputs(operands, min(nodes))
    return not nodes.isdisjoint({*operands, *(each for node in late for each in node.all_input_nodes)})


def _readers(wait: Node, received: Layout) -> list[Reader]:
    readers = [Reader(wait, received, (value(wait).dtype,))]
    for reader in readers:  # the list grows meanwhile
        for user, following in derived(reader.node):
            if viewed_bytes(user) is not None and len({*reader.dtypes}) == 1:
                readers.append(Reader(user, reader.layout, (value(user).dtype,)))
                continue
            try:
                if following is None:
                    raise CannotFuse("it computes")
                dtypes = (*reader.dtypes, value(following).dtype) if is_cast(following) else reader.dtypes
                refuse(not is_one_cast(dtypes), "it is rounded between")
                readers.append(Reader(following, advance(following, reader.layout), dtypes))
            except CannotFuse:
                reader.users.append(user)
    return readers
