"""The exchanged dim of a tensor, followed through ops that act on each block alone.

An exchange of R ranks cuts one dim of its input into ``outer x R x inner`` and sends block p of rank s to rank p, in
the place of block s. An op acts on each block alone if no output element depends on two blocks: norms over other dims,
rotary embeddings, activations, sums of such. It gives the same before and after the exchange.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusedcomm.compile.graph.layout import CannotFuse, Size, product, quotient, refuse, size_of
from fusedcomm.compile.graph.matmuls import name_of
from fusedcomm.compile.graph.split_cat import SPLITS, args_of, argument_of
from fusedcomm.compile.graph.views import CASTS, PERMUTES, RESHAPES, SAME, permutation

aten = torch.ops.aten

SUMS = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default}
REDUCTIONS = SUMS | {aten.amax.default, aten.amin.default, aten.var_mean.correction, aten.var.correction}
CUTS = SPLITS | {aten.slice.Tensor, aten.slice_scatter.default}
PICKS = {aten.select.int, aten.unbind.int}
COMPLEX = {aten.view_as_complex.default, aten.view_as_real.default}
VIEWS = RESHAPES - {aten.expand.default}


@dataclass(frozen=True)
class Place:
    """Blocks lie along ``dim``, counted from the last (-1), each of them ``inner`` long, and repeat every R blocks."""

    dim: int
    inner: Size


@dataclass(frozen=True)
class Dims:
    """For each dim of a result the dim of the operand that it runs along, both counted from the last; None: a new one.

    A dim of the operand that is missing is coupled: all its elements go into each result. ``marks`` are the places at
    which ``cut`` is cut or joined.
    """

    along: tuple[int | None, ...]
    cut: int | None = None
    marks: tuple[Size, ...] = field(default=())

    def forward(self, place: Place, group_size: int, node: Node) -> Place:
        refuse(place.dim not in self.along, f"{name_of(node)} mixes the blocks that are exchanged")
        self._check(place, group_size, node)
        return Place(self.along.index(place.dim) - len(self.along), place.inner)

    def back(self, place: Place, group_size: int, node: Node) -> Place | None:
        """The place in the operand, or None if the operand is the same for all blocks."""
        dim = self.along[place.dim]
        if dim is None:
            return None
        found = Place(dim, place.inner)
        self._check(found, group_size, node)
        return found

    def _check(self, place: Place, group_size: int, node: Node) -> None:
        if place.dim == self.cut and any(
            mark != 0 and quotient(mark, place.inner * group_size) is None for mark in self.marks
        ):
            raise CannotFuse(f"{name_of(node)} cuts the blocks that are exchanged")


@dataclass(frozen=True)
class Reshape:
    before: Sequence[Size]
    after: Sequence[Size]

    def forward(self, place: Place, group_size: int, node: Node) -> Place:
        return reshaped(place, self.before, self.after, group_size)

    def back(self, place: Place, group_size: int, node: Node) -> Place | None:
        return reshaped(place, self.after, self.before, group_size)


def reshaped(place: Place, before: Sequence[Size], after: Sequence[Size], group_size: int) -> Place:
    """Where blocks lie after a reshape. Raises CannotFuse unless they lie along one dim again."""
    stride = place.inner * product(before[len(before) + place.dim + 1 :])
    below: Size = 1
    for dim in range(-1, -len(after) - 1, -1):
        inner = quotient(stride, below)
        if inner is not None and after[dim] != 1 and quotient(after[dim], inner * group_size) is not None:
            return Place(dim, inner)
        below = below * after[dim]
    raise CannotFuse(f"a view from {list(before)} to {list(after)} cuts the blocks that are exchanged")


def rule(node: Node, operand: Node) -> Dims | Reshape:
    """The map from dims of ``operand`` to dims of node's result; one for all results of a tuple. Raises CannotFuse
    where node couples elements freely.
    """
    for targets, read in _RULES:
        if node.target in targets:
            return read(node, operand)
    if is_elementwise(node):
        return _broadcast(node, operand)
    raise CannotFuse(f"{name_of(node)} stands between")


def shape(node: Node) -> list[Size]:
    """The shape of node's result; for a tuple that of its first tensor."""
    val = node.meta.get("val")
    val = val[0] if isinstance(val, (tuple, list)) else val
    if not isinstance(val, Tensor):
        raise CannotFuse(f"{node.name} is not known to be a tensor")
    return [size_of(size) for size in val.shape]


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), (Tensor, tuple, list))


def tensors(node: Node) -> list[Node]:
    return [each for each in node.all_input_nodes if is_tensor(each)]


def dims_argument(node: Node) -> list[int]:
    """The dims that a reduction, a cut or a pick names, counted from the operand's last."""
    dims, first = argument_of(node, "dim"), args_of(node)[0]
    if dims is None and node.target not in REDUCTIONS:
        dims = 0
    ndim = len(shape(first[0] if isinstance(first, (list, tuple)) else first))
    dims = [dims] if isinstance(dims, int) else dims or range(ndim)
    return [dim % ndim - ndim for dim in dims]


def keeps_dims(node: Node) -> bool:
    return bool(argument_of(node, "keepdim"))


def is_elementwise(node: Node) -> bool:
    """Whether each element of the result is computed from one of every operand, broadcast, and from nothing else.

    A number that the program computes, as `Tensor.item` gives one, is this rank's own.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if not all(map(is_tensor, node.all_input_nodes)):
        return False
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


def _broadcast(node: Node, operand: Node) -> Dims:
    out, own = shape(node), shape(operand)
    dims = range(-len(out), 0)
    return Dims(tuple(d if -d <= len(own) and (own[d] != 1 or out[d] == 1) else None for d in dims))


def permuted(node: Node, operand: Node) -> Dims:
    ndim = len(shape(operand))
    return Dims(tuple(d - ndim for d in permutation(node, ndim)))


def _reduce(node: Node, operand: Node) -> Dims:
    ndim, dims = len(shape(operand)), dims_argument(node)
    kept = [None if d in dims else d for d in range(-ndim, 0)]
    return Dims(tuple(kept if keeps_dims(node) else [d for d in kept if d is not None]))


def _pick(node: Node, operand: Node) -> Dims:
    (picked,) = dims_argument(node)
    return Dims(tuple(d for d in range(-len(shape(operand)), 0) if d != picked))


def _cut(node: Node, operand: Node) -> Dims:
    (dim,) = dims_argument(node)
    if node.target in SPLITS:
        marks = [size_of(part.shape[dim]) for part in node.meta["val"]]
    elif argument_of(node, "step") in (None, 1):
        begin, part = argument_of(node, "start"), node if node.target is aten.slice.Tensor else args_of(node)[1]
        marks = [size_of(begin.meta["val"] if isinstance(begin, Node) else begin or 0), shape(part)[dim]]
    else:
        marks = [_NOWHERE]
    return Dims(_all(operand), dim, tuple(marks))


def _cat(node: Node, operand: Node) -> Dims:
    (dim,) = dims_argument(node)
    return Dims(_all(operand), dim, (shape(operand)[dim],))


def _complex(node: Node, operand: Node) -> Dims:
    own = len(shape(operand))
    if node.target is aten.view_as_real.default:
        return Dims((*range(-own, 0), None))
    return Dims(tuple(range(-own, -1)))


def _same(node: Node, operand: Node) -> Dims:
    return Dims(_all(operand))


def _all(node: Node) -> tuple[int, ...]:
    return tuple(range(-len(shape(node)), 0))


_NOWHERE = -1  # where no block ends
_RULES: tuple[tuple[Iterable[Any], Callable[[Node, Node], Dims | Reshape]], ...] = (
    (VIEWS, lambda node, operand: Reshape(shape(operand), shape(node))),
    (PERMUTES, permuted),
    (REDUCTIONS, _reduce),
    (CUTS, _cut),
    (PICKS, _pick),
    (COMPLEX, _complex),
    ({aten.cat.default}, _cat),
    ({aten.expand.default}, _broadcast),
    (SAME | CASTS | {operator.getitem}, _same),
)
