"""The tail of a tensor parallel layer in a graph: (+ bias) -> + residual -> RMSNorm behind a sum."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusedcomm.compile.graph.collectives import Collective, communicates, late_inputs
from fusedcomm.compile.graph.layout import CannotFuse, Size, refuse
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.split_cat import args_of
from fusedcomm.compile.graph.views import CASTS, RESHAPES, SAME, sizes_of, value

aten = torch.ops.aten
NO_TAIL = "no residual and RMSNorm that an op has stand behind it"  # never shown: the op without them is next


@dataclass(frozen=True)
class Tail:
    """``added = sum + bias + residual; normed = added / sqrt(mean(added ** 2, -1) + eps) * weight``."""

    bias: Node | None
    residual: Node
    added: Node
    normed: Node
    weight: Node | None
    eps: float

    def operands(self, rewriter: Rewriter, shape: list[Size]) -> tuple[Node | None, Node, Node | None, float]:
        """(bias, residual, norm_weight, eps) of an op with results of this shape."""
        bias = self.bias if self.bias is None else rewriter.reshape(self.bias, shape[-1:])
        return bias, rewriter.reshape(self.residual, shape), self.weight, self.eps

    def results(self, rewriter: Rewriter, call: Node) -> dict[Node, Node]:
        """The op's results by the program's nodes that they replace, the sum last."""
        shaped = {}
        for i, old in enumerate((self.normed, self.added)):
            new = rewriter.reshape(rewriter.call(operator.getitem, call, i), sizes_of(value(old)))
            shaped[old] = rewriter.result(new, old)
        return shaped


def find(collective: Collective, y: Node) -> Tail:
    """The tail behind ``y``, the rearranged result of a sum. Raises CannotFuse."""
    added, other = _sum(y)
    bias = other if _is_per_column(other, y) else None
    if bias is not None:
        added, other = _sum(added)
    refuse(sizes_of(value(other)) != sizes_of(value(y)) or value(other).dtype != value(y).dtype, NO_TAIL)
    found = Tail(bias, other, added, *_norm(added))
    late = late_inputs([each for each in (bias, other, found.weight) if each is not None], collective.start)
    if collective.wait in late or any(map(communicates, late)):  # they would come before what they are computed from
        raise CannotFuse(NO_TAIL)
    return found


def _sum(node: Node) -> tuple[Node, Node]:
    """The addition that alone reads node, and what it adds."""
    users = list(node.users)
    refuse(len(users) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs, NO_TAIL)
    other = _other(users[0], node)
    if other is None:
        raise CannotFuse(NO_TAIL)
    return users[0], other


def _other(node: Node, operand: Node) -> Node | None:
    others = [each for each in node.args if each is not operand]
    return others[0] if len(others) == 1 and isinstance(others[0], Node) else None


def _is_per_column(node: Node, like: Node) -> bool:
    shape, n = sizes_of(value(node)), sizes_of(value(like))[-1]
    is_smaller = shape != sizes_of(value(like))
    return is_smaller and value(node).dtype == value(like).dtype and _holds_columns(shape, n)


def _holds_columns(shape: list[Size], n: Size) -> bool:
    return bool(shape[-1:] == [n]) and all(size == 1 for size in shape[:-1])


def _norm(x: Node) -> tuple[Node, Node | None, float]:
    """(normed, weight, eps) of the RMSNorm that reads x, over its last dim. Raises CannotFuse."""
    for wide in [x] if value(x).dtype == torch.float32 else [each for each in x.users if each.target in CASTS]:
        if value(wide).dtype == torch.float32:
            for mean in (each for user in wide.users if _is_square(user, wide) for each in user.users):
                if (found := _scaled(x, wide, mean)) is not None:
                    return found
    raise CannotFuse(NO_TAIL)


def _is_square(node: Node, x: Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 2)
    return node.target is aten.mul.Tensor and node.args == (x, x)


def _scaled(x: Node, wide: Node, mean: Node) -> tuple[Node, Node | None, float] | None:
    """The norm by this mean of squares; in float32, where it reads ``wide``."""
    if (
        mean.target is not aten.mean.dim
        or mean.kwargs
        or mean.args[1:] not in (([-1], True), ([value(x).ndim - 1], True))
    ):
        return None
    for biased in mean.users:
        eps = biased.args[1] if biased.target in (aten.add.Tensor, aten.add.Scalar) else None
        if not isinstance(eps, float) or eps < 0 or biased.kwargs:
            continue
        for inverse in biased.users:
            is_inverse = inverse.target is aten.rsqrt.default
            if is_inverse or (inverse.target is aten.pow.Tensor_Scalar and inverse.args[1] == -0.5):
                for scaled in inverse.users:
                    if scaled.target is aten.mul.Tensor and _other(scaled, inverse) is wide:
                        found = _weighted(scaled, x)
                        return found and (*found, eps)
    return None


def _weighted(scaled: Node, x: Node) -> tuple[Node, Node | None] | None:
    """(normed, weight), of x's dtype: the weight is multiplied before the cast to it or behind."""
    dtype, n = value(x).dtype, sizes_of(value(x))[-1]
    plain = _cast(scaled, dtype)
    product = _only_user(plain or scaled)
    if product is not None and product.target is aten.mul.Tensor:
        factor = _other(product, plain or scaled)
        weight = None if factor is None else _weight(factor, n)
        if (
            weight is not None
            and value(weight).dtype in (dtype, torch.float32)
            and (normed := _cast(product, dtype)) is not None
        ):
            return normed, weight
    return None if plain is None else (plain, None)


def _cast(node: Node, dtype: torch.dtype) -> Node | None:
    """node, or the cast of it that alone reads it, in this dtype."""
    found = node if value(node).dtype == dtype else _only_user(node)
    is_one = found is node or (found is not None and found.target in CASTS and value(found).dtype == dtype)
    return found if is_one else None


def _weight(node: Node, n: Size) -> Node | None:
    """The [n] that node has in its last dim."""
    while _holds_columns(sizes_of(value(node)), n):
        if node.target not in CASTS | SAME | RESHAPES:
            return node if value(node).ndim == 1 else None
        node = args_of(node)[0]
    return None


def _only_user(node: Node) -> Node | None:
    users: list[Any] = list(node.users)
    return users[0] if len(users) == 1 else None
