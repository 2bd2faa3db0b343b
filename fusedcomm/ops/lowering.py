"""Inductor's lowerings of the fused ops: as collectives, kept in program order among all others, read or not.

Importing this module registers the lowerings, and imports Inductor, which takes a second.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V
from torch.fx import Node
from torch.utils import _pytree as pytree

from fusedcomm.ops.routed import COLLECTIVES
from fusedcomm.ops.table import OPS


def _register() -> None:
    """Tell Inductor how to lower the ops. Graphs that it has lowered before stay as they are."""
    if not hasattr(ir, "_CollectiveKernel"):  # it is private; without it ops are plain fallbacks, in no fixed order
        return
    for spec in OPS.values():
        lower = _lower_pair if spec.gathers or spec.num_results > 1 else _lower_tensor
        lowering.add_layout_constraint(spec.op, _constrain_x if spec.is_plain else _constrain)
        _register_lowering(spec.op, lower(spec.op))
    for name in COLLECTIVES:  # they take any strides
        op = getattr(torch.ops.fusedcomm, name).default
        is_tensor = [each.type for each in op._schema.returns] == [torch.TensorType.get()]
        lower = _lower_tensor if is_tensor else _lower_pair
        _register_lowering(op, lower(op))


def _register_lowering(op: torch._ops.OpOverload, lower: Callable[..., Any]) -> None:
    def lower_without_waits(*args: Any) -> Any:
        # A wait would be a write: consumers could no longer reuse the result's memory
        _skip_waits(V.graph.current_node)
        return lower(*args)

    lowering.register_lowering(op, type_promotion_kind=None)(lower_without_waits)


def _skip_waits(node: Node) -> None:
    """Keep Inductor from lowering the unread waits of `tracing`: a `_CollectiveKernel` stays without."""
    for user in node.users:
        if user.target is operator.getitem:
            _skip_waits(user)
        elif user.target is torch.ops._c10d_functional.wait_tensor.default and not user.users:
            V.graph.env[user] = None  # fx.Interpreter runs no node that has a value


def _lower_tensor(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    defaults = [each.default_value for each in overload._schema.arguments]

    def lower(*args: Any) -> Any:
        create: Any = ir._CollectiveKernel.create_out_of_place
        every = *args, *defaults[len(args) :]  # a C++ wrapper fills in none
        return ir.TensorBox.create(create(overload, *every))

    return lower


def _lower_pair(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    def lower(*args: Any) -> Any:
        create: Any = ir._CollectiveKernel.create
        if len(overload._schema.returns) == 2 and isinstance(args[1], (list, tuple)) and V.graph.cpp_wrapper:
            *outs, gathered = create(getattr(torch.ops.fusedcomm, overload._opname).flat, *args)
            result = outs, gathered
        else:
            result = create(overload, *args)
        return pytree.tree_map(ir.TensorBox.create, result)

    return lower


def _constrain(node: Node, x: Any, w: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """x contiguous, and every w with K or N contiguous: the producer writes them so, and nothing is copied."""
    like = pytree.tree_map_only(Node, lambda n: n.meta["val"], node.args[1])
    w = [_matrix(*each) for each in zip(w, like, strict=True)] if isinstance(w, Sequence) else _matrix(w, like)
    return (ir.ExternKernel.require_contiguous(x), w, *args), kwargs


def _constrain_x(node: Node, x: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (ir.ExternKernel.require_contiguous(x), *args), kwargs


def _matrix(w: Any, like: Tensor) -> Any:
    """w as it is if K or N is contiguous; else as traced, [..., K, N] or the transpose of [..., N, K]."""
    lies = ir.is_storage_and_layout(w) and not isinstance(w.get_layout(), ir.FlexibleLayout)
    if lies and any(_is_one(stride) for stride in w.get_stride()[-2:]):
        return w
    *batch, k, n = w.get_size()
    if _is_one(like.stride(-2)) and not _is_one(like.stride(-1)):
        *outer, n_stride, k_stride = ir.FlexibleLayout.contiguous_strides([*batch, n, k])
        return ir.ExternKernel.require_exact_strides(w, [*outer, k_stride, n_stride])
    return ir.ExternKernel.require_contiguous(w)


def _is_one(stride: Any) -> bool:
    return not isinstance(stride, torch.SymInt) and stride == 1


_register()
