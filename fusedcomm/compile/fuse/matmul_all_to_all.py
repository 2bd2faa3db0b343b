"""matmul -> views -> all_to_all_single -> views becomes fusedcomm::matmul_all_to_all.

Several chains with the same x, as for q, k and v, become one op over their concatenated weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import wire
from fusedcomm.compile.fuse.match_gather import depends_on
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout, Size, product, quotient, refuse, size_of
from fusedcomm.compile.graph.matmuls import MATMULS, SCALED, Product, check_single_use, producer
from fusedcomm.compile.graph.rewrite import Rewriter, group_factors, sizes
from fusedcomm.compile.graph.views import along, follow, is_one_cast, path_back, value
from fusedcomm.plan.geometry.cut import EVEN

aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """One matmul and its exchange."""

    collective: Collective
    product: Product
    sent: Layout  # of what the collective sends
    blocks: Factor
    sources: Factor
    target: Node  # the last node that only rearranges the result
    layout: Layout  # target's layout

    @property
    def before(self) -> Factor | None:
        """The factor behind the sources; None if they come last."""
        return dict(pairwise(self.layout.order)).get(self.sources)

    @property
    def cut(self) -> tuple[Layout, list[list[Factor]]]:
        return self.product.cut([f for f in (self.blocks, self.before) if f is not None])

    @property
    def result(self) -> list[Factor]:
        """The order of factors in the op's result."""
        return self.written(self.product.y, self.before)

    def written(self, y: Layout, before: Factor | None) -> list[Factor]:
        """y's order without the blocks, and with the sources in their place."""
        order = [f for f in y.order if f is not self.blocks]
        at = len(order) if before is None else order.index(before)
        return [*order[:at], self.sources, *order[at:]]

    @property
    def rows(self) -> list[Size]:
        return [f.size for f in self.product.y.dims[-2]]

    def like(self, other: Part) -> bool:
        """Whether both can be one op: whole columns are exchanged, for the same rows."""
        a, b = (
            (
                part.product.xs[0],
                part.collective.group_name,
                value(part.target).dtype,
                part.product.bias is None,
                part.rows,
                next((i for i, f in enumerate(part.product.y.dims[-2]) if f is part.before), None),
            )
            for part in (self, other)
        )
        return a == b and a[-1] is not None and other.product.y.dims[-1][:1] == (other.blocks,)


@dataclass(frozen=True)
class MatmulAllToAllMatch:
    parts: list[Part]

    @property
    def collectives(self) -> list[Collective]:
        return [part.collective for part in self.parts]

    @property
    def products(self) -> list[Product]:
        return [part.product for part in self.parts]

    @property
    def dtype(self) -> torch.dtype:
        return value(self.parts[0].product.node).dtype

    @property
    def keeps_order(self) -> bool:
        first = self.parts[0]
        return wire.keeps_order(first.cut[0].order, first.sent.order, first.blocks)

    @property
    def alone(self) -> MatmulAllToAllMatch:
        return MatmulAllToAllMatch(self.parts[:1])


def match(start: Node) -> MatmulAllToAllMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    first = _part(start)
    parts = [first]
    if not first.product.batched and first.product.scales is None and first.like(first):
        for node in first.product.xs[0].users:
            other = _start_after(node)
            if other is None or other is start:
                continue
            try:
                part = _part(other)
            except CannotFuse:
                continue
            nodes = {each.product.node for each in parts}
            if first.like(part) and not depends_on(part.product.operands, nodes):
                parts.append(part)
    return MatmulAllToAllMatch(parts)


def rewrite(rewriter: Rewriter, match: MatmulAllToAllMatch) -> Node:
    if len(match.parts) > 1:
        return _rewrite_several(rewriter, match.parts)
    (part,) = match.parts
    product, before, (y, rows) = part.product, part.before, part.cut
    breaks = [f for f in (part.blocks, before) if f is not None]
    *batches, _, columns = (group_factors(dim, breaks) for dim in y.dims)
    batch = [dim for each in batches for dim in each]
    if y is not product.y and before in y.dims[-2] and part.blocks in y.dims[-2]:
        before = next(iter(y.dims[-1]), None)  # the result is arranged afterwards
    if before is None:
        columns.append([])
    with rewriter.before(part.collective.start, like=product.node):
        rows = [*batch, *rows]
        operands = product.x(rewriter, rows), product.w(rewriter, batch), product.per_column(rewriter, product.bias)
        result = _call(rewriter, part, operands, rows, columns, before)
        out = rewriter.result(rewriter.arrange(result, part.written(y, before), part.layout), part.target)
    rewriter.replace(part.target, out)
    return result


def _rewrite_several(rewriter: Rewriter, parts: Sequence[Part]) -> Node:
    first, group_size = parts[0], parts[0].collective.group_size
    rows = group_factors(first.product.y.dims[-2], [f for f in (first.before,) if f is not None])
    widths = [quotient(part.product.y.shape[-1], group_size) for part in parts]  # columns of one rank's block
    total = sum(width for width in widths if width is not None)
    start = min(part.collective.start for part in parts)
    collectives.hoist([operand for part in parts for operand in part.product.operands], start)
    with rewriter.before(start, like=first.product.node):
        w = _side_by_side(rewriter, [part.product.ws[0] for part in parts], group_size)
        biases = [part.product.per_column(rewriter, part.product.bias) for part in parts]  # of all parts, or of none
        given = [each for each in biases if each is not None]
        bias = _side_by_side(rewriter, given, group_size) if given else None
        operands = first.product.x(rewriter, rows), w, bias
        y = _call(rewriter, first, operands, rows, [[first.blocks], [Factor(total)]], first.before)
        outs, end = [], 0
        for part, width_of_part in zip(parts, widths, strict=True):
            begin, end = end, end + width_of_part  # type: ignore[operator]
            own = rewriter.call(aten.slice.Tensor, y, len(rows) + 1, begin, end)
            outs.append(rewriter.result(rewriter.arrange(own, part.result, part.layout), part.target))
    for part, out in zip(parts, outs, strict=True):
        rewriter.replace(part.target, out)
    return y


def _call(
    rewriter: Rewriter,
    part: Part,
    operands: tuple[Node, Node, Node | None],
    rows: list[list[Factor]],
    columns: list[list[Factor]],
    before: Factor | None,
) -> Node:
    dims = [*rows, *columns]
    return rewriter.call(
        part.product.op("matmul_all_to_all"),
        *operands,
        *part.product.scaling(rewriter, sizes(rows)),
        sizes(columns) if len(columns) > 1 else None,
        len(dims) - 1 if before is None else _index(dims, before),
        _index(dims, part.blocks),
        *EVEN,
        part.collective.group_size,
        part.collective.group_name,
        wire.of(part.collective.start),
    )


def _index(dims: Sequence[Sequence[Factor]], factor: Factor) -> int:
    return next(i for i, dim in enumerate(dims) if factor in dim)


def _side_by_side(rewriter: Rewriter, parts: Sequence[Node], group_size: int) -> Node:
    """[..., R * sum of widths]: each rank's block has its columns of every w or bias. Strides are nn.Linear's if the
    ws' are.
    """
    *lead, _ = map(size_of, value(parts[0]).shape)
    if lead and all(value(each).stride(0) == 1 for each in parts):
        rows = [rewriter.call(aten.permute.default, each, [1, 0]) for each in parts]
        blocks = [rewriter.call(aten.reshape.default, row, [group_size, -1, *lead]) for row in rows]
        joined = rewriter.call(aten.reshape.default, rewriter.call(aten.cat.default, blocks, 1), [-1, *lead])
        return rewriter.call(aten.permute.default, joined, [1, 0])
    blocks = [rewriter.call(aten.reshape.default, each, [*lead, group_size, -1]) for each in parts]
    return rewriter.call(aten.reshape.default, rewriter.call(aten.cat.default, blocks, -1), [*lead, -1])


def _part(start: Node) -> Part:
    collective = collectives.read(start)
    path = path_back(collective.sent, through_casts=True)
    _check_repeats(path[0], collective.group_size)
    matmul = producer(path[0])
    check_single_use(path, start)
    dtypes = [value(node).dtype for node in path]
    if not is_one_cast(dtypes) or dtypes[-1].itemsize < dtypes[0].itemsize:
        smallest = min(set(dtypes[1:]) - {dtypes[0]}, key=lambda dtype: dtype.itemsize)
        raise CannotFuse(f"the matmul's result is rounded to {smallest} before it is sent")
    sent = along(path, matmul.layout)
    received, blocks, sources = collective.received(sent)
    candidates = follow(collective.wait, received)
    refuse(sources.parts, "what arrives is rearranged across ranks")
    parts = [Part(collective, matmul, sent, blocks, sources, *candidate) for candidate in candidates]
    written = [part for part in parts if part.result == part.layout.order]  # no copy after the op
    return (written or parts)[-1]


def _check_repeats(node: Node, group_size: int) -> None:
    """Raises CannotFuse where node repeats a matmul's result, as heads of k and v are repeated for grouped queries."""
    if node.target is not aten.expand.default:
        return
    repeated = node.args[0]
    assert isinstance(repeated, Node)
    if path_back(repeated, through_casts=True)[0].target in MATMULS | SCALED:
        count = quotient(*(product(map(size_of, value(each).shape)) for each in (node, repeated)))
        raise CannotFuse(
            f"the matmul's result is repeated {count} times before it is sent: send it once, by matmul_all_to_all(..., "
            f"scatter_ranges=fusedcomm.replica_ranges(heads, {group_size}, replicas)), and repeat what arrives"
        )


def _start_after(node: Node) -> Node | None:
    """The all_to_all that node leads to, if node is a matmul and leads nowhere else."""
    if node.target not in MATMULS:
        return None
    last = follow(node, Layout.of(value(node).shape))[-1][0]
    user = next(iter(last.users)) if len(last.users) == 1 else None
    return user if user is not None and collectives.kind_of(user) == "all_to_all" else None
