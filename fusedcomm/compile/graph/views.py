"""Chains of nodes that only rearrange or cast a tensor, between a matmul and a collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout, Size, quotient, size_of
from fusedcomm.compile.graph.split_cat import args_of, join_of, joined_by

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
CASTS = {torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype}
WAIT = torch.ops._c10d_functional.wait_tensor.default


def value(node: Node) -> Tensor:
    """The fake tensor that stands for node's result."""
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
    if node.target in SAME | PERMUTES | RESHAPES | CASTS:
        origin = args_of(node)[0]
        if not isinstance(origin, Node) or not isinstance(origin.meta.get("val"), Tensor):
            return None
        before, after = value(origin), value(node)
        same = node.target is not aten.expand.default or sizes_of(before) == sizes_of(after)
        return origin if same and before.device == after.device else None
    if node.target is WAIT and args_of(node)[0].target is WAIT:  # waited for already
        return args_of(node)[0]  # type: ignore[no-any-return]
    join = join_of(node)
    return None if join is None else join.origin


def is_read(node: Node) -> bool:
    """Whether anything but waits reads node."""
    return any(user.target is not WAIT or is_read(user) for user in node.users)


def is_cast(node: Node) -> bool:
    return node.target in CASTS


def derived(node: Node) -> Iterator[tuple[Node, Node | None]]:
    """For each user of node: the user, and the node that rearranges node through it, or None if it does more."""
    rearranges: dict[Node, bool] = {}  # one cat may join R slices, and is looked at once
    for user in node.users:
        following = joined_by(user) or user
        is_first = following not in rearranges
        if is_first:
            rearranges[following] = source(following) is node
        if not rearranges[following]:
            yield user, None
        elif is_first:
            yield user, following


def advance(node: Node, layout: Layout) -> Layout:
    """The layout of node, given that of its source."""
    if node.target in SAME | CASTS or node.target is WAIT:
        return layout
    if node.target in RESHAPES:
        return layout.reshape(value(node).shape)
    if (join := join_of(node)) is not None:
        return join.layout(layout)
    ndim = len(layout.dims)
    dims = list(range(ndim))
    if node.target is aten.permute.default:
        dims = [d % ndim for d in args_of(node)[1]]
    elif ndim > 1:
        a, b = args_of(node)[1:3] if node.target is aten.transpose.int else (0, 1)
        dims[a], dims[b] = dims[b], dims[a]
    return layout.permute(dims)


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
    if quotient(dim, num_blocks) is None:
        raise CannotFuse(f"its dim 0, of size {dim}, is not known to be divisible by {num_blocks}")
    return layout.leading(0, num_blocks)
