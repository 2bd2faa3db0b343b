"""matmul -> all_reduce -> (+ bias) -> + residual -> RMSNorm becomes fusedcomm::matmul_all_reduce_norm, for few rows.

Few rows go whole to all ranks, so that each adds its own residual: nothing proves that residuals are equal. More rows,
whose sums have owners, become `matmul_all_reduce`, and the rest stays a kernel of the compiler's.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import matmul_all_reduce, wire
from fusedcomm.compile.fuse.matmul_all_reduce import MatmulAllReduceMatch
from fusedcomm.compile.graph.layout import CannotFuse, Size, size_of
from fusedcomm.compile.graph.rewrite import Rewriter, replace_node, sizes
from fusedcomm.compile.graph.views import CASTS, follow, path_back, sizes_of, value
from fusedcomm.plan.geometry.norm import goes_at_once

aten = torch.ops.aten
OP = "matmul_all_reduce_norm"
KIND = "all_reduce"


@dataclass(frozen=True)
class Norm:
    """``normed = x / sqrt(mean(x ** 2, -1) + eps) * weight``."""

    normed: Node
    weight: Node | None
    eps: float


@dataclass(frozen=True)
class NormTailMatch(MatmulAllReduceMatch):
    bias: Node | None
    residual: Node
    added: Node  # residual_out
    norm: Norm

    @property
    def keeps_order(self) -> bool:
        return False  # whole terms are sent, in place of parts and their sums


def match(start: Node) -> NormTailMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    found = matmul_all_reduce.match(start)
    product, collective = found.reduced.product, found.reduced.collective
    if collective.reduce_op != "sum" or product.bias is not None:
        raise CannotFuse("no op norms an average, or a sum with each rank's own bias")
    if (device := value(start).device.type) != "cpu":
        raise CannotFuse(f"the op that norms runs unfused on {device}")
    y, layout = follow(collective.wait, found.layout)[-1]
    if layout.order != product.y.order or layout.dims[-1] != product.y.dims[-1]:
        raise CannotFuse("the sum is rearranged before it is normed")
    if not goes_at_once([_most(size) for size in value(y).shape], collective.group_size):
        raise CannotFuse("its rows may be too many for each rank to add its own residual")
    added, other = _sum(y)
    bias = other if _is_per_column(other, y) else None
    if bias is not None:
        added, other = _sum(added)
    if sizes_of(value(other)) != sizes_of(value(y)) or value(other).dtype != value(y).dtype:
        raise CannotFuse("what is added to the sum is no residual")
    return NormTailMatch(found.reduced, found.layout, bias, other, added, _norm(added))


def rewrite(rewriter: Rewriter, match: NormTailMatch) -> Node:
    product, collective = match.reduced.product, match.reduced.collective
    with rewriter.before(collective.start, like=product.node):
        call = rewriter.call(
            torch.ops.fusedcomm.matmul_all_reduce_norm.default,
            *product.joined(rewriter),
            match.bias if match.bias is None else rewriter.reshape(match.bias, product.y.shape[-1:]),
            rewriter.reshape(match.residual, sizes(product.y.dims)),
            match.norm.weight,
            match.norm.eps,
            collective.group_size,
            collective.group_name,
            wire.of(collective.start),
        )
        olds = match.norm.normed, match.added
        results = [rewriter.call(operator.getitem, call, i) for i in range(2)]
        shaped = [rewriter.reshape(new, sizes_of(value(old))) for new, old in zip(results, olds, strict=True)]
        news = [rewriter.result(new, old) for new, old in zip(shaped, olds, strict=True)]
    for old, new in zip(olds, news, strict=True):
        if not old._erased:  # the sum may have been read by the norm alone
            replace_node(old, new)
    return call


def _most(size: int | torch.SymInt) -> int:
    """The largest value that size can have, at most 2^62."""
    if isinstance(size, int):
        return size
    most = size.node.shape_env.bound_sympy(size_of(size)).upper
    return int(most) if most.is_Integer else 1 << 62


def _sum(node: Node) -> tuple[Node, Node]:
    """The addition that alone reads node, and what it adds."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs:
        raise CannotFuse("something else than a residual's addition reads the sum")
    other = _other(users[0], node)
    if other is None:
        raise CannotFuse("the sum is added to itself, or to a number")
    return users[0], other


def _other(node: Node, operand: Node) -> Node | None:
    others = [each for each in node.args if each is not operand]
    return others[0] if len(others) == 1 and isinstance(others[0], Node) else None


def _is_per_column(node: Node, like: Node) -> bool:
    shape, n = sizes_of(value(node)), sizes_of(value(like))[-1]
    return value(node).dtype == value(like).dtype and shape != sizes_of(value(like)) and _holds_columns(shape, n)


def _holds_columns(shape: list[Size], n: Size) -> bool:
    return shape[-1:] == [n] and all(size == 1 for size in shape[:-1])


def _norm(x: Node) -> Norm:
    """The RMSNorm that reads x, over its last dim. Raises CannotFuse."""
    for wide in [x] if value(x).dtype == torch.float32 else [each for each in x.users if each.target in CASTS]:
        if value(wide).dtype == torch.float32:
            for mean in (each for user in wide.users if _is_square(user, wide) for each in user.users):
                if (found := _scaled(x, wide, mean)) is not None:
                    return found
    raise CannotFuse("no RMSNorm reads the sum")


def _is_square(node: Node, x: Node) -> bool:
    is_power = node.target is aten.pow.Tensor_Scalar and node.args[1] == 2
    return is_power or (node.target is aten.mul.Tensor and node.args == (x, x))


def _scaled(x: Node, wide: Node, mean: Node) -> Norm | None:
    """The norm by this mean of squares; in float32, where it reads ``wide``."""
    if mean.target is not aten.mean.dim or mean.args[1:] not in (([-1], True), ([value(x).ndim - 1], True)):
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
                        return Norm(*_weighted(scaled, x), eps)
    return None


def _weighted(scaled: Node, x: Node) -> tuple[Node, Node | None]:
    """(normed, weight): the weight is multiplied before the cast to x's dtype or behind it."""
    dtype, plain = value(x).dtype, scaled
    if (cast := _only_user(scaled)) is not None and cast.target in CASTS and value(cast).dtype == dtype:
        plain = cast
    product = _only_user(plain)
    if product is None or product.target is not aten.mul.Tensor or (factor := _other(product, plain)) is None:
        return plain, None
    weight = path_back(factor, through_casts=True)[0]
    n = sizes_of(value(x))[-1]
    if value(weight).dtype != dtype or sizes_of(value(weight)) != [n] or not _holds_columns(sizes_of(value(factor)), n):
        return plain, None  # 1 + weight in float32, as Gemma has it
    if value(product).dtype == dtype:
        return product, weight
    last = _only_user(product)
    if last is not None and last.target in CASTS and value(last).dtype == dtype:
        return last, weight
    return plain, None


def _only_user(node: Node) -> Node | None:
    users: list[Any] = list(node.users)
    return users[0] if len(users) == 1 else None
