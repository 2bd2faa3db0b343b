"""Parts of a tensor: results of splits, slices and picks along one dim."""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusedcomm.compile.graph.layout import Size, size_of

aten = torch.ops.aten
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
UNBIND = aten.unbind.int
SLICE = aten.slice.Tensor
SELECT = aten.select.int
FILLS = {aten.slice_scatter.default, aten.select_scatter.default}
COPY = aten.copy.default
CUTS = SPLITS | {UNBIND, SLICE, SELECT}


@dataclass(frozen=True)
class Part:
    """``size`` elements of ``origin`` along ``dim``, from ``begin`` on; a ``picked`` part is one, without the dim."""

    origin: Node
    dim: int
    begin: Size
    size: Size
    picked: bool = False

    @property
    def is_whole(self) -> bool:
        return bool(self.begin == 0 and self.size == shape_of(self.origin)[self.dim])


def part(node: Any) -> Part | None:
    """node as a part of a tensor, or None."""
    if not isinstance(node, Node) or not isinstance(node.meta.get("val"), Tensor):
        return None
    args = args_of(node)
    if node.target is operator.getitem and getattr(args[0], "target", None) in SPLITS | {UNBIND}:
        split, index = args
        origin = args_of(split)[0]
        dim = dim_of(split, origin)
        if split.target is UNBIND:
            return Part(origin, dim, index, 1, picked=True)
        parts = split.meta["val"]
        if split.target is aten.split.Tensor:  # all parts but the last are as long as the first
            return Part(origin, dim, index * size_of(parts[0].shape[dim]), size_of(parts[index].shape[dim]))
        sizes = [size_of(each.shape[dim]) for each in parts]
        return Part(origin, dim, sum(sizes[:index]), sizes[index])
    if node.target in (SLICE, SELECT):
        return _cut(node, args[0], shape_of(node), node.target is SELECT)
    return None


def filled(fill: Node) -> Part | None:
    """The place that a ``slice_scatter`` or ``select_scatter`` writes."""
    origin, source, *_ = args_of(fill)
    return _cut(fill, origin, shape_of(source), fill.target is aten.select_scatter.default)


def _cut(node: Node, origin: Node, size: list[Size], picked: bool) -> Part | None:
    begin = argument_of(node, "index" if picked else "start")
    if begin is None or argument_of(node, "step") not in (None, 1):
        return None
    dim = dim_of(node, origin)
    whole, at = shape_of(origin)[dim], size_of(begin.meta["val"] if isinstance(begin, Node) else begin)
    if isinstance(at, int) and at < 0:
        at += whole
    return Part(origin, dim, at, 1 if picked else size[dim], picked)


def operands_of(node: Node) -> tuple[list[tuple[Node, bool]], int] | None:
    """The parts that a cat joins or that fill a tensor, in order, each with whether it lacks the dim; and the dim."""
    if node.target is aten.cat.default:
        parts = args_of(node)[0]
        if isinstance(parts, (list, tuple)) and parts and all(isinstance(each, Node) for each in parts):
            return [(each, False) for each in parts], dim_of(node, node)
    if node.target not in FILLS or not node.meta["val"].is_contiguous() or _next_fill(node) is not None:
        return None
    written: dict[Size, tuple[Node, Part]] = {}
    dims: set[int] = set()
    fill = node
    while fill.target in FILLS and (fill is node or _next_fill(fill) is not None):
        place, source = filled(fill), args_of(fill)[1]
        if source.target is COPY and shape_of(source.args[1]) == shape_of(source):
            source = source.args[1]
        forms = [(each.meta["val"].dtype, each.meta["val"].device) for each in (source, node)]
        if place is None or place.begin in written or forms[0] != forms[1]:
            return None
        written[place.begin] = source, place
        dims.add(place.dim)
        fill = place.origin
    end: Size = 0
    found = []
    while end in written and len(dims) == 1:
        source, place = written.pop(end)  # an empty one ends where it begins
        found.append((source, place.picked))
        end = end + place.size
    is_whole = len(dims) == 1 and not written and end == shape_of(node)[next(iter(dims))]
    return (found, dims.pop()) if is_whole else None


def _next_fill(node: Node) -> Node | None:
    """The only reader of node's result, if it fills another part of it."""
    readers = [user for user in node.users if not _is_named(user)]
    return readers[0] if len(readers) == 1 and readers[0].target in FILLS and readers[0].args[0] is node else None


def _is_named(cut: Node) -> bool:
    """Whether a cut is read for its form only, as by a copy to it."""
    return cut.target in CUTS | {operator.getitem} and all(
        (user.target is COPY and user.args[0] is cut and user.args[1] is not cut) or _is_named(user)
        for user in cut.users
    )


def joined_by(user: Node, rearranges: Any) -> Node | None:
    """The only cat or last fill behind a cut, or None; ``rearranges``: the ops that parts may pass on the way."""
    if user.target not in CUTS:
        return None
    joins, stack = set(), [user]
    while stack:
        node = stack.pop()
        if node.target in FILLS:
            while (following := _next_fill(node)) is not None:
                node = following
        if node.target in FILLS or node.target is aten.cat.default:
            joins.add(node)
        elif node.target in SPLITS | {UNBIND} or (
            len(node.users) == 1 and node.target in {operator.getitem, SLICE, SELECT, COPY} | rearranges
        ):
            stack += node.users
        else:
            return None
    return joins.pop() if len(joins) == 1 else None


def dim_of(node: Node, like: Node) -> int:
    """The dim that node cuts or joins; ``like`` has as many."""
    return int(argument_of(node, "dim") or 0) % len(shape_of(like))


def argument_of(node: Node, name: str) -> Any:
    """The value of an op's argument by its schema name; None without such an argument, or if node is no op."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    at = index_of(node.target, name)
    return node.kwargs.get(name) if at is None or at >= len(node.args) else node.args[at]


@functools.lru_cache(maxsize=4096)
def index_of(target: torch._ops.OpOverload, name: str) -> int | None:
    return next((i for i, arg in enumerate(target._schema.arguments) if arg.name == name), None)


def args_of(node: Node) -> tuple[Any, ...]:
    """``node.args`` with an open type, for mypy."""
    return node.args


def shape_of(node: Any) -> list[Size]:
    return [size_of(size) for size in node.meta["val"].shape]
