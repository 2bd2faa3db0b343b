"""The gradient of an input of linear layers, multiplied lazily, when something reads it.

`whole_of` makes the x that layers share. Its gradient is a sum of products; one op multiplies and sums them over ranks.
Hooks, retained gradients and other users of x on the way read the numbers, or change them, perhaps on one rank alone:
then the sum is made first, and the op sends it as it sends products.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_map_only

from fusedcomm.memory.group import resolve
from fusedcomm.ops import splits
from fusedcomm.plan.geometry.shapes import OP_DTYPES
from fusedcomm.plan.planner import GRAPH

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.view_as.default, _aten.detach.default)
_PASSED_ON = ("ViewBackward", "UnsafeViewBackward", "AliasBackward", "BackwardHookFunction", "_ShardOfBackward")


def whole_of(x: DTensor, whole: Tensor, gather_dim: int | None) -> DTensor:
    """``whole`` as x replicated. ``gather_dim``: None if x is replicated already."""
    return _Whole.apply(x, [whole], gather_dim)  # type: ignore[no-any-return]


def product(grad: Tensor, weight: Tensor, node: Any) -> Tensor:
    """``grad @ weight``, the gradient that goes on to ``node``: when it is read, if this backward comes to a
    `whole_of`. The weight is copied, as any hook may write it until then: optimizers do, some by its data."""
    is_lazy = not torch.is_grad_enabled() and not is_compiled_backward()
    if not is_lazy or not any(map(torch._C._will_engine_execute_node, _wholes(node))):
        return grad @ weight
    factor = _Factor(grad.flatten(0, -2), weight.clone())
    return WhenRead((*grad.shape[:-1], weight.shape[-1]), _Sum([factor], None, []))


def is_compiled_backward() -> bool:
    """Whether compiled autograd runs the backward: it traces what is behind this gradient with stand-ins."""
    found = sys.modules.get("torch._dynamo.compiled_autograd")
    return found is not None and (found.compiled_autograd_enabled or found.in_compiled_autograd_region)


def _wholes(node: Any) -> Iterator[Any]:
    if node is not None and node.name() == "_WholeBackward":
        yield node
    elif node is not None and node.name().startswith(_PASSED_ON):
        for each, _ in node.next_functions:
            yield from _wholes(each)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, whole: list[Tensor], gather_dim: int | None) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.placements, ctx.layout = x.device_mesh, x.placements, {"shape": x.shape, "stride": x.stride()}
        ctx.gather_dim = gather_dim
        return DTensor.from_local(whole[0], x.device_mesh, (Replicate(),), run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[DTensor | None, None, None]:
        if grad is None:
            return None, None, None
        local = grad._local_tensor
        is_sent = local.dtype in OP_DTYPES and local.numel() > 0
        if grad.placements != (Partial(),) or not is_sent:
            return grad.redistribute(placements=ctx.placements), None, None
        if torch.is_grad_enabled():
            part = _Summed.apply(grad.to_local(grad_placements=(Replicate(),)), ctx)
        else:
            part = _summed(*_as_product(local), ctx)
        if isinstance(local, WhenRead):
            kept = [*local.terms.parts_of, weakref.ref(local.terms)]
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_read_what_is_kept, kept))
        return DTensor.from_local(part, ctx.mesh, ctx.placements, run_check=False, **ctx.layout), None, None


def _summed(x: Tensor, weight: Tensor | None, ctx: Any) -> Tensor:
    """The sum of the ranks' x @ weight, or where a rank has no weight of its x, by one wire."""
    factors: tuple[Any, ...] = (x,) if weight is None else (x, weight, None)
    prefix, (group_size, group_name) = "" if weight is None else "matmul_", resolve(ctx.mesh)
    if ctx.gather_dim is None:
        op = getattr(torch.ops.fusedcomm, f"{prefix}all_reduce")
        return op(*factors, "sum", group_size, group_name, GRAPH)  # type: ignore[no-any-return]
    if weight is None:
        divisible = splits.divides(group_size, x.shape, ctx.gather_dim)
    else:
        divisible = splits.divides_product(group_size, x, weight, ctx.gather_dim)
    parts = splits.splits_of(None, None, None, None, divisible, group_name).to_scatter
    op = getattr(torch.ops.fusedcomm, f"{prefix}reduce_scatter")
    return op(*factors, "sum", ctx.gather_dim, *parts, group_size, group_name, GRAPH)  # type: ignore[no-any-return]


class _Summed(torch.autograd.Function):
    """For second derivatives, which one rank may ask for alone as well."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, of: Any) -> Tensor:
        ctx.of = of
        return _summed(local, None, of)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        sharded = DTensor.from_local(grad, ctx.of.mesh, ctx.of.placements, run_check=False, **ctx.of.layout)
        return sharded.redistribute(placements=(Replicate(),)).to_local(), None


def _as_product(local: Tensor) -> tuple[Tensor, Tensor | None]:
    """x and w of ``x @ w``, or all of the gradient and None, if it is more than products of layers."""
    if not isinstance(local, WhenRead):
        return local, None
    factors, rest = local.terms.parts()
    if not factors or rest is not None:
        return local.read(), None
    grads, weights = zip(*factors, strict=True)
    joined, weight = (grads[0], weights[0]) if len(factors) == 1 else (torch.cat(grads, -1), torch.cat(weights))
    return joined.view(*local.shape[:-1], -1), weight


def _read_what_is_kept(sums: list[weakref.ref[_Sum]]) -> None:
    """Multiply the factors that hooks still hold of an ended backward, before a weight changes."""
    for each in [ref() for ref in sums]:
        if each is not None:
            each.read()


class _Factor(NamedTuple):
    grad: Tensor  # [M, N]
    weight: Tensor  # [N, K]


class _Sum:
    """``grad @ weight`` over factors, and ``rest``: [M, K]. ``parts_of``: the sums that make up this one."""

    def __init__(self, factors: list[_Factor], rest: Tensor | None, parts_of: list[weakref.ref[_Sum]]) -> None:
        self.factors, self.rest, self.parts_of = factors, rest, parts_of
        self.value: Tensor | None = None
        self.unwritten: Tensor | None = None  # the value, once it was given away as memory that may be written

    def read(self) -> Tensor:
        if self.value is None:
            products = [torch.matmul(*each) for each in self.factors]
            self.value = sum(products[1:], products[0]) if self.rest is None else sum(products, self.rest)
        return self.value

    def give(self, is_alias: bool, to_write: bool) -> Tensor:
        value = self.read()
        if to_write:
            self.factors = []
        elif is_alias and self.unwritten is None:
            self.unwritten = value.clone()
        return value

    def parts(self) -> tuple[list[_Factor], Tensor | None]:
        """Returns (factors, rest to add), or ([], sum) once the sum was written."""
        if self.factors and self.unwritten is not None:
            pair = self.unwritten.view(torch.uint8), self.read().view(torch.uint8)  # NaN is no other value than it was
            if not torch.equal(*pair):
                self.factors = []
        return self.factors, self.rest if self.factors else self.value

    def plus(self, other: Tensor | _Sum) -> _Sum | None:
        factors, rest = self.parts()
        more, others = other.parts() if isinstance(other, _Sum) else ([], other)
        if not factors and not more:
            return None
        both = rest if others is None else others if rest is None else rest + others
        made_of = [each for each in (self, other) if isinstance(each, _Sum)]
        parts_of = [ref for each in made_of for ref in (weakref.ref(each), *each.parts_of)]
        return _Sum(factors + more, both, parts_of)


def _of_the_numbers(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self.read(is_alias=True), name)(*args, **kwargs)


class WhenRead(Tensor):
    """The local tensor of a lazy gradient; views share its sum."""

    terms: _Sum
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: Any, terms: _Sum) -> WhenRead:
        like = terms.factors[0].grad if terms.factors else terms.read()
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.terms = terms
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _VIEWS:
            wanted = getattr(args[1], "shape", args[1]) if len(args) > 1 else args[0].shape
            shape = torch.empty(args[0].shape, device="meta").view(wanted).shape
            if len(shape) > 1 and shape[-1] == args[0].shape[-1]:
                return cls(shape, args[0].terms)
        if func is _aten.add.Tensor and not kwargs and len(args) == 2:
            first, second = args if isinstance(args[0], cls) else reversed(args)
            if isinstance(second, Tensor) and second.shape == first.shape and second.dtype == first.dtype:
                other = second.terms if isinstance(second, cls) else second.reshape(-1, second.shape[-1])
                if (added := first.terms.plus(other)) is not None:
                    return cls(first.shape, added)
        is_alias = any(each.alias_info is not None for each in func._schema.returns)
        to_write = func._schema.is_mutable
        args, kwargs = tree_map_only(cls, lambda each: each.read(is_alias, to_write), (args, kwargs or {}))
        return func(*args, **kwargs)

    def read(self, is_alias: bool = False, to_write: bool = False) -> Tensor:
        return self.terms.give(is_alias, to_write).view(self.shape)

    numpy, tolist, data_ptr, untyped_storage, __reduce_ex__, __deepcopy__, __repr__ = map(
        _of_the_numbers,
        ("numpy", "tolist", "data_ptr", "untyped_storage", "__reduce_ex__", "__deepcopy__", "__repr__"),
    )
