"""Chains of nodes that only rearrange or cast a tensor, between a matmul and a collective."""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusedcomm.compile.graph import split_cat
from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout, Size, quotient, refuse, size_of
from fusedcomm.compile.graph.split_cat import SELECT, SLICE, Part, args_of, part

aten = torch.ops.aten

SAME = {aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default, aten.lift_fresh.default}
RESHAPES = {
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.flatten.using_ints,
    aten.unflatten.int,
}
PERMUTES = {aten.permute.default, aten.transpose.int, aten.t.default}
REARRANGES = SAME | PERMUTES | RESHAPES
_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # with infinities, signed zeros and subnormals
CASTS = {torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype}
VIEWS = PERMUTES | RESHAPES | split_cat.CUTS | {operator.getitem}
joined_by = partial(split_cat.joined_by, rearranges=REARRANGES)
WAIT = torch.ops._c10d_functional.wait_tensor.default


def value(node: Node) -> Tensor:
    """The fake tensor of node's result."""
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        raise CannotFuse(f"{node.name} is not known to be a tensor")
    return val


def sizes_of(tensor: Tensor) -> list[Size]:
    """Its shape, to be compared without a guard on symbols."""
    return [size_of(size) for size in tensor.shape]


def source(node: Any) -> Node | None:
    """The tensor that has the same elements as node, perhaps in another order or dtype; None where node computes."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target in REARRANGES | CASTS:
        origin = args_of(node)[0]
        if not isinstance(origin, Node) or not isinstance(origin.meta.get("val"), Tensor):
            return None
        before, after = value(origin), value(node)
        same = node.target is not aten.expand.default or sizes_of(before) == sizes_of(after)
        return origin if same and before.device == after.device else None
    if node.target is WAIT:
        return args_of(node)[0] if _is_waited_for(args_of(node)[0]) else None
    if node.target in (SLICE, SELECT):
        found = part(node)
        return found.origin if found is not None and found.is_whole else None
    join = join_of(node)
    return None if join is None else join.origin


def viewed_bytes(node: Node) -> Node | None:
    """The tensor that node views in another dtype of one byte, or None: float8 values are sent as bytes."""
    if node.target is not aten.view.dtype:
        return None
    origin: Node = args_of(node)[0]
    return origin if value(origin).dtype.itemsize == value(node).dtype.itemsize == 1 else None


def _is_waited_for(node: Node | None) -> bool:
    """Whether node rearranges a wait's result: one more wait does nothing."""
    while node is not None and node.target is not WAIT:
        node = source(node)
    return node is not None


@dataclass(frozen=True)
class Join:
    """All parts of a tensor, of equal size, joined along a dim; each is rearranged on ``path`` before, alike.

    torch moves a dim's blocks so, and so do programs, by chunk and cat, stack or unbind.
    """

    part: Part
    num_parts: int
    path: list[Node]  # of the first part, which it begins with
    dim: int
    is_new_dim: bool  # the parts have no such dim

    @property
    def origin(self) -> Node:
        return self.part.origin

    def layout(self, origin: Layout) -> Layout:
        factor = origin.leading(self.part.dim, self.num_parts, self.part.size)
        rest = origin.without(factor)
        if self.part.picked:
            rest = rest.permute(d for d in range(len(rest.dims)) if d != self.part.dim)
        rest = along(self.path, rest)
        return rest.new_dim(self.dim, factor) if self.is_new_dim else rest.insert(self.dim, factor)


def join_of(node: Node) -> Join | None:
    """The tensor that node restores by joining all its parts in order, or None."""
    operands = split_cat.operands_of(node)
    if operands is None:
        return None
    paths = [_from_part(each) for each, _ in operands[0]]
    parts = [part(path[0]) for path in paths]
    first = parts[0]
    if first is None or not all(_alike(a, b) for a, b in pairwise(paths)):
        return None
    if len({is_new for _, is_new in operands[0]}) > 1 or not _fill(first, len(parts)):
        return None
    like = [Part(first.origin, first.dim, i * first.size, first.size, first.picked) for i in range(len(parts))]
    return Join(first, len(parts), paths[0], operands[1], operands[0][0][1]) if parts == like else None


def _fill(first: Part, num_parts: int) -> bool:
    """Whether so many parts like the first are all of their tensor, for any values of symbols or by a guard."""
    whole = value(first.origin).shape[first.dim]
    if first.size * num_parts == size_of(whole):
        return True
    return statically_known_true(whole % num_parts == 0) and size_of(whole // num_parts) == first.size


def _from_part(node: Node) -> list[Node]:
    """The path of rearrangements to node, from the part of a tensor, or from its first node without one."""
    path = [node]
    while (found := part(path[0])) is None or found.is_whole:
        origin = source(path[0]) if path[0].target in REARRANGES | {SLICE, SELECT} else None
        if origin is None:
            break
        path.insert(0, origin)
    return path


def _alike(a: list[Node], b: list[Node]) -> bool:
    return len(a) == len(b) and all(
        (x.target, x.args[1:], x.kwargs, sizes_of(value(x))) == (y.target, y.args[1:], y.kwargs, sizes_of(value(y)))
        for x, y in zip(a[1:], b[1:], strict=True)
    )


def merge_views(graph: Graph) -> None:
    """Let views and parts that are equal be one node: torch writes a view once more for each use after a write."""
    seen: dict[tuple[Any, ...], Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in {*VIEWS, aten.view.dtype}:
            first = seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if node.target is aten.view.dtype and value(node.args[0]).dtype == value(node).dtype:
                first = node.args[0]
            if first is not node and all(user.op == "call_function" for user in (*node.users, *first.users)):
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def is_read(node: Node) -> bool:
    """Whether anything but waits reads node."""
    return any(user.target is not WAIT or is_read(user) for user in node.users)


def is_cast(node: Node) -> bool:
    return node.target in CASTS


def is_one_cast(dtypes: Sequence[torch.dtype]) -> bool:
    """Whether casts through ``dtypes`` equal one cast from the first to the last."""
    first, *others = [dtype for dtype, _ in groupby(dtypes)]
    return all(between == first or _keeps(first, between) for between in others[:-1])


def _keeps(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether b has every value of a, as far as chains of floats need it."""
    return a in _WIDE and b in _WIDE and torch.promote_types(a, b) == b


def derived(node: Node) -> Iterator[tuple[Node, Node | None]]:
    """For each user of node: the user, and the node that rearranges node through it, or None if it does more."""
    joins: dict[Node, bool] = {}  # one cat may join R slices, and is looked at once
    for user in node.users:
        join = joined_by(user)
        if join is not None and join not in joins:
            joins[join] = source(join) is node
            if joins[join]:
                yield user, join
        if join is None or not joins[join]:
            yield user, user if source(user) is node else None


def advance(node: Node, layout: Layout) -> Layout:
    """The layout of node, given that of its source."""
    if node.target in SAME | CASTS or node.target is WAIT:
        return layout
    if node.target in RESHAPES or node.target in (SLICE, SELECT):
        return layout.reshape(value(node).shape)
    if (join := join_of(node)) is not None:
        return join.layout(layout)
    return layout.permute(permutation(node, len(layout.dims)))


def permutation(node: Node, ndim: int) -> list[int]:
    """For each dim of the result of one of ``PERMUTES``, the dim of its operand."""
    if node.target is aten.permute.default:
        return [d % ndim for d in args_of(node)[1]]
    dims = list(range(ndim))
    if ndim > 1:
        a, b = args_of(node)[1:3] if node.target is aten.transpose.int else (0, 1)
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def path_back(node: Node, through_casts: bool) -> list[Node]:
    """The nodes of the chain that leads to ``node``, from where it begins."""
    path = [node]
    while (origin := source(path[0])) is not None and (through_casts or not is_cast(path[0])):
        path.insert(0, origin)
    return path


def along(path: list[Node], layout: Layout) -> Layout:
    """The layout of the path's last node, given that of its first."""
    for node in path[1:]:
        layout = advance(node, layout)
    return layout


def follow(node: Node, layout: Layout) -> list[tuple[Node, Layout]]:
    """node, and the nodes that rearrange it further, as long as each is the only reader of the one before."""
    found = [(node, layout)]
    while True:
        nexts = list(derived(found[-1][0]))
        if len(nexts) != 1 or (following := nexts[0][1]) is None or is_cast(following):
            return found
        try:
            found.append((following, advance(following, found[-1][1])))
        except CannotFuse:
            return found


def block(layout: Layout, num_blocks: int) -> Factor:
    """The factor that tells apart the blocks along dim 0, which collectives cut and join."""
    dim = layout.shape[0] if layout.dims else 1
    refuse(quotient(dim, num_blocks) is None, f"its dim 0, of size {dim}, is not known to be divisible by {num_blocks}")
    return layout.leading(0, num_blocks)
