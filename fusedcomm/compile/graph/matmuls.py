"""Matmuls in a graph: their operands, and the layout of their result."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.nn.functional import ScalingType

from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout, Size, refuse, size_of
from fusedcomm.compile.graph.rewrite import Rewriter, group_factors, returned, sizes
from fusedcomm.compile.graph.split_cat import argument_of
from fusedcomm.compile.graph.views import along, joined_by, path_back, sizes_of, value
from fusedcomm.plan.scaling import VALUES

aten = torch.ops.aten

MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
SCALED = {aten._scaled_mm.default, aten._scaled_mm_v2.default}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Scales(NamedTuple):
    """Scales of float8 operands: one each, or, ``by_row``, x's [M, 1] and w's [1, N]. ``fast``: use_fast_accum."""

    x: Node
    w: Node
    by_row: bool
    fast: bool


@dataclass(frozen=True)
class Product:
    """``node = sum(x @ w for x, w in zip(xs, ws)) + bias``; a sum of several matmuls is one over a longer K."""

    node: Node  # its value is the sum, in the order of y
    xs: tuple[Node, ...]
    ws: tuple[Node, ...]
    bias: Node | None
    y: Layout  # one matmul's result, [M, N] or [batch, M, N]
    layout: Layout  # node's layout
    scales: Scales | None = None

    @property
    def batched(self) -> bool:
        return len(self.y.dims) == 3

    @property
    def operands(self) -> list[Node]:
        """All operands but x."""
        return [*self.ws, *([] if self.bias is None else [self.bias]), *(self.scales or ())[:2]]

    def op(self, name: str) -> Any:
        """The op of this name, or its sibling for float8 operands."""
        return getattr(torch.ops.fusedcomm, name if self.scales is None else f"scaled_{name}").default

    def scaling(self, rewriter: Rewriter, rows: Sequence[Size]) -> list[Any]:
        """The sibling's arguments behind the bias: the scale of an x with these ``rows``, w's, the dtype of y, and
        use_fast_accum.
        """
        if self.scales is None:
            return []
        x, w, by_row, fast = self.scales
        of_x, of_w = ([*rows, 1], [1, *self.y.shape[-1:]]) if by_row else ([], [])
        return [rewriter.reshape(x, of_x), rewriter.reshape(w, of_w), value(self.node).dtype, fast]

    def x(self, rewriter: Rewriter, rows: list[list[Factor]]) -> Node:
        """x with its leading dims as given; in a batched matmul they may reorder the rows."""
        if self.batched:
            k = Factor(size_of(value(self.xs[0]).shape[-1]))
            layout = Layout((*map(tuple, rows), (k,)))
            return rewriter.arrange(self.xs[0], [f for dim in (*self.y.dims[:2], (k,)) for f in dim], layout)
        x = self.xs[0] if len(self.xs) == 1 else rewriter.call(aten.cat.default, list(self.xs), -1)
        return rewriter.reshape(x, [*sizes(rows), size_of(value(x).shape[-1])])

    def w(self, rewriter: Rewriter, batches: list[list[Factor]], batch: Sequence[Factor] = ()) -> Node:
        """w with its batch dims as given; ``batch``: the factors of its batch, if they are not y's."""
        if len(self.ws) > 1:
            return rewriter.call(aten.cat.default, list(self.ws), -2)
        if not self.batched:
            return self.ws[0]
        k, n = (Factor(size_of(size)) for size in value(self.ws[0]).shape[-2:])
        layout = Layout((*map(tuple, batches), (k,), (n,)))
        return rewriter.arrange(self.ws[0], [*(batch or self.y.dims[0]), k, n], layout)

    def cut(self, breaks: Sequence[Factor]) -> tuple[Layout, list[list[Factor]]]:
        """y, and its rows with a dim from each of ``breaks``; in a batched matmul these come first in one dim."""
        *batch, rows, columns = self.y.dims
        dims = group_factors(rows, breaks)
        if not self.batched or len(dims) == 1:
            return self.y, dims
        first = [f for f in breaks if f in rows]
        moved = [*first, *(f for f in rows if f not in first)]
        return Layout((*batch, tuple(moved), columns)), [moved]

    def per_column(self, rewriter: Rewriter, bias: Node | None) -> Node | None:
        """``bias`` as [N], if it has one number per column or one for all; see `_broadcasts`."""
        shape = [] if bias is None else [size_of(size) for size in value(bias).shape]
        if bias is None or shape == self.y.shape[-1:]:
            return bias
        flat = rewriter.reshape(bias, shape[-1:] or [1])
        return rewriter.contiguous(rewriter.call(aten.expand.default, flat, self.y.shape[-1:]))


def matmul(node: Node) -> Product:
    """Reads mm, addmm, bmm, baddbmm or _scaled_mm. Raises CannotFuse where no op of fusedcomm computes it."""
    if node.op == "call_function" and node.target in SCALED:
        return _scaled(node)
    if node.op != "call_function" or node.target not in MATMULS:
        raise CannotFuse(f"what is exchanged is not the result of a matmul but of {name_of(node)}")
    *bias, x, w = node.args
    refuse(any(node.kwargs.get(scale, 1) != 1 for scale in ("alpha", "beta")), f"{name_of(node)} scales its operands")
    dtype = value(node).dtype
    if dtype not in DTYPES or value(x).dtype != dtype:  # type: ignore[arg-type]
        raise CannotFuse(f"the matmul's dtype is {dtype}, and must be float32, float16 or bfloat16")
    y = Layout.of(value(node).shape)
    return Product(node, (x,), (w,), _bias(bias[0], node) if bias else None, y, y)  # type: ignore[arg-type]


def _scaled(node: Node) -> Product:
    """A product of float8 operands."""
    given, y = partial(argument_of, node), value(node)
    x, w, bias = given("self"), given("mat2"), given("bias")
    dtypes = value(x).dtype, value(w).dtype
    if not {*dtypes} <= {*VALUES} or {*dtypes} == {torch.float8_e5m2} or y.dtype not in DTYPES:
        of_both = f"{y.dtype} of {' and '.join(map(str, dtypes))}"
        raise CannotFuse(f"the matmul's dtype is {of_both}, and must be float32, float16 or bfloat16 of float8")
    recipes = {ScalingType(each).name for name in ("recipe_a", "recipe_b") for each in given(name) or ()}
    scales = [each[0] if isinstance(each, (list, tuple)) else each for each in (given("scale_a"), given("scale_b"))]
    shapes, (m, n) = [sizes_of(value(each)) for each in scales], sizes_of(y)
    is_one, by_row = (all(size == 1 for shape in shapes for size in shape), shapes == [[m, 1], [1, n]])
    swizzles = [each for name in ("swizzle_a", "swizzle_b") for each in given(name) or ()]
    special = [given("scale_result"), given("contraction_dim"), *swizzles]
    plain = not any(special) and all(value(each).dtype == torch.float32 for each in scales)
    if not (plain and (is_one or by_row) and recipes in ({*()}, {"TensorWise"}, {"RowWise"})):
        raise CannotFuse("the scales must be TensorWise or RowWise, in float32, not swizzled, of the operands alone")
    layout = Layout.of(y.shape)
    of_bias = None if bias is None else _bias(bias, node)
    made = Scales(scales[0], scales[1], by_row and not is_one, bool(given("use_fast_accum")))
    return Product(node, (x,), (w,), of_bias, layout, layout, made)


def producer(node: Node, sums: bool = False) -> Product:
    """The product that node is: one matmul, with or without a bias; with ``sums`` also the sum of several."""
    if node.op == "call_function" and node.target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
        a, b = node.args
        if isinstance(a, Node) and isinstance(b, Node):
            if (biased := _with_bias(node, a, b) or _with_bias(node, b, a)) is not None:
                return biased
            if sums and sizes_of(value(a)) == sizes_of(value(b)) == sizes_of(value(node)):
                return _sum(node, *(_branch(operand, node) for operand in (a, b)))
    return matmul(node)


def _branch(node: Node, user: Node) -> Product:
    """The product that makes node. Raises CannotFuse if it has another user."""
    path = path_back(node, through_casts=False)
    found = producer(path[0], sums=True)
    check_single_use(path, user)
    return replace(found, layout=along(path, found.layout))


def check_single_use(path: list[Node], user: Node) -> None:
    """Raises CannotFuse unless only the next node reads each node of the path, and only user the last."""
    for node, follower in zip(path, [*path[1:], user], strict=True):
        others = [u for u in node.users if u is not follower and joined_by(u) is not follower]
        if others:
            raise CannotFuse(f"the matmul's result is also {_used_by(others[0])}")


def _sum(node: Node, a: Product, b: Product) -> Product:
    forms = [(each.y.shape, [f.size for f in each.layout.order], value(each.node).dtype) for each in (a, b)]
    is_plain = all(each.bias is None and not (each.batched or each.scales) for each in (a, b))
    in_order = all(each.layout.order == each.y.order for each in (a, b))
    if not (is_plain and in_order and forms[0] == forms[1] and forms[0][2] == value(node).dtype):
        raise CannotFuse("it is the sum of matmuls with other shapes, dtypes, biases, batches, scales or transposes")
    return Product(node, a.xs + b.xs, a.ws + b.ws, None, a.y, a.layout)


def _with_bias(node: Node, operand: Node, bias: Node) -> Product | None:
    """The product, if operand is a matmul's result, viewed, and bias is one number per column or one for all."""
    like, added = value(node), value(bias)
    if not _broadcasts(bias) or like.shape != value(operand).shape:
        return None
    if like.device != added.device or not like.dtype == added.dtype == value(operand).dtype:
        return None
    path = path_back(operand, through_casts=False)
    if path[0].target not in MATMULS | SCALED:
        return None
    found = matmul(path[0])
    layout = along(path, found.layout)
    if found.bias is not None or (added.numel() != 1 and list(layout.dims[-1]) != list(found.y.dims[-1])):
        return None
    check_single_use(path, node)
    return replace(found, node=node, bias=bias, layout=layout)


def _broadcasts(bias: Node) -> bool:
    """Whether the bias is the same in every row: [N], [1, N], [1] or a scalar tensor."""
    return all(size_of(size) == 1 for size in value(bias).shape[:-1])


def _bias(bias: Node, node: Node) -> Node:
    refuse(not _broadcasts(bias), f"what {name_of(node)} adds is not one number per column")
    refuse(value(bias).dtype != value(node).dtype, "the bias has another dtype than the matmul")
    return bias


def _used_by(user: Node) -> str:
    if user.op == "output" or user.target is returned:
        return "returned by the function, or kept for its backward"
    return f"used by {name_of(user)}"


def name_of(node: Node) -> str:
    if node.target is returned:
        return "the caller"
    if node.op in ("placeholder", "output"):
        return {"placeholder": "an input", "output": "the caller"}[node.op]
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))
