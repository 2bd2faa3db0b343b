"""cat(parts of t): all parts of one tensor, of equal size, joined along another dim. torch moves a dim's blocks so."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusedcomm.compile.graph.layout import Layout, Size, size_of

aten = torch.ops.aten
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
SLICE = aten.slice.Tensor


@dataclass(frozen=True)
class Join:
    origin: Node
    split_dim: int
    num_parts: int
    dim: int

    def layout(self, origin: Layout) -> Layout:
        part = origin.leading(self.split_dim, self.num_parts)
        return origin.without(part).insert(self.dim, part)


def join_of(cat: Node) -> Join | None:
    """What cat joins, if that is every part of one tensor, in order."""
    parts, *dims = args_of(cat) or ((),)
    if cat.target is not aten.cat.default or not isinstance(parts, (list, tuple)) or not parts:
        return None
    found = [_part(part) for part in parts]
    if len({part[:2] for part in found}) != 1 or not all(found):
        return None
    origin, split_dim, _, size = found[0]
    begins = [begin for _, _, begin, _ in found]
    whole = _shape(origin)[split_dim]
    sizes = {_shape(part)[split_dim] for part in parts}
    if len(sizes) != 1 or begins != [i * size for i in range(len(parts))] or size * len(parts) != whole:
        return None
    return Join(origin, split_dim, len(parts), _dim(cat, dims) % len(_shape(origin)))


def joined_by(user: Node) -> Node | None:
    """The cat that is all that a split, or a slice, leads to."""
    if user.target in SPLITS:
        cats = {cat for part in user.users for cat in part.users}
    elif user.target is SLICE:
        cats = set(user.users)
    else:
        return None
    cat = cats.pop() if len(cats) == 1 else None
    return cat if cat is not None and cat.target is aten.cat.default else None


def split_dim(split: Node) -> int:
    args = args_of(split)
    return _dim(split, args[2:]) % len(_shape(args[0]))


def _dim(node: Node, given: Sequence[Any]) -> Any:
    return given[0] if given else node.kwargs.get("dim", 0)


def args_of(node: Node) -> tuple[Any, ...]:
    """node.args, whose types fx leaves open."""
    return node.args


def _part(part: Any) -> tuple[Any, ...]:
    """(tensor, dim, where the part begins, its size), or () if it is no part of a tensor."""
    if not isinstance(part, Node) or not isinstance(part.meta.get("val"), Tensor):
        return ()
    args = args_of(part)
    if part.target is operator.getitem and getattr(args[0], "target", None) in SPLITS:
        split, index = args
        dim = split_dim(split)
        parts = split.meta["val"]
        if split.target is aten.split.Tensor:  # all parts but the last are as long as the first
            return args_of(split)[0], dim, index * size_of(parts[0].shape[dim]), size_of(parts[index].shape[dim])
        sizes = [size_of(each.shape[dim]) for each in parts]
        return args_of(split)[0], dim, sum(sizes[:index]), sizes[index]
    if part.target is SLICE and len(args) >= 3 and args[2] is not None and args[4:] in ((), (1,)):
        origin, dim, begin = args[:3]
        dim %= len(_shape(origin))
        return origin, dim, size_of(begin.meta["val"] if isinstance(begin, Node) else begin), _shape(part)[dim]
    return ()


def _shape(node: Any) -> list[Size]:
    return [size_of(size) for size in node.meta["val"].shape]
