"""The gradient of an input of linear layers, which is multiplied only where something reads it.

`whole_of` makes the x that layers share. Its gradient is a sum of products, which one op multiplies and sums over
ranks. Hooks, retained gradients and other users of x on the way read the numbers, on one rank too, and the op stays the
same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_map_only

from fusedcomm.ops.matmul_all_reduce import matmul_all_reduce
from fusedcomm.ops.matmul_reduce_scatter import matmul_reduce_scatter
from fusedcomm.parallel.unwritten import counts_of

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.view_as.default, _aten.detach.default)
_PASSED_ON = ("ViewBackward", "UnsafeViewBackward", "AliasBackward", "BackwardHookFunction", "_ShardOfBackward")


def whole_of(x: DTensor, whole: Tensor, gather_dim: int | None) -> DTensor:
    """``whole`` as x replicated. ``gather_dim``: None where x is replicated already."""
    found: list[Any] = []
    result = _Whole.apply(x, [whole], gather_dim, found)
    found.append(weakref.ref(result))
    return result  # type: ignore[no-any-return]


def product(grad: Tensor, weight: Tensor, parameter: Tensor | None, node: Any) -> Tensor:
    """``grad @ weight``, the gradient that goes on to ``node``: when it is read, if this backward comes to a
    `whole_of`. ``parameter``: what ``weight`` is the local tensor of, if optimizers may write it in the backward."""
    if torch.is_grad_enabled() or not any(map(torch._C._will_engine_execute_node, _wholes(node))):
        return grad @ weight
    if parameter is not None and (parameter._post_accumulate_grad_hooks or parameter._backward_hooks):
        weight = weight.clone()  # such hooks run optimizers, some as soon as the weight has its gradient
        parameter = None
    counts = [] if parameter is None else counts_of(parameter)
    factor = _Factor(grad, weight, counts, [each._version for each in counts])
    return WhenRead((*grad.shape[:-1], weight.shape[-1]), [factor])


def _wholes(node: Any) -> Iterator[Any]:
    if node is None or node.name() == "_WholeBackward":
        yield from () if node is None else (node,)
    elif node.name().startswith(_PASSED_ON):
        for each, _ in node.next_functions:
            yield from _wholes(each)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, whole: list[Tensor], gather_dim: int | None, found: list[Any]) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.placements, ctx.layout = x.device_mesh, x.placements, {"shape": x.shape, "stride": x.stride()}
        ctx.gather_dim, ctx.found = gather_dim, found
        return DTensor.from_local(whole[0], x.device_mesh, (Replicate(),), run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[DTensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        sums = grad._local_tensor
        if not isinstance(sums, WhenRead) or grad.placements != (Partial(),) or torch.is_grad_enabled():
            return grad.redistribute(placements=ctx.placements), None, None, None
        factors, rest = sums.parts()
        found = [] if rest is None else [_redistributed(rest, ctx)]
        if factors:
            grads, weights = zip(*(each.tensors() for each in factors), strict=True)
            joined, weight = (grads[0], weights[0]) if len(factors) == 1 else (torch.cat(grads, -1), torch.cat(weights))
            if ctx.gather_dim is None:
                found.append(matmul_all_reduce(joined, weight, ctx.mesh))
            else:
                found.append(matmul_reduce_scatter(joined, weight, ctx.gather_dim, ctx.mesh))
        part = found[0] if len(found) == 1 else found[0] + found[1]
        x = ctx.found[0]()
        sums.read_by_others(itself=x is not None and bool(x._backward_hooks))
        return DTensor.from_local(part, ctx.mesh, ctx.placements, run_check=False, **ctx.layout), None, None, None


def _redistributed(summand: Tensor, ctx: Any) -> Tensor:
    t = DTensor.from_local(summand, ctx.mesh, (Partial(),), run_check=False)
    return t.redistribute(placements=ctx.placements).to_local()


class _Factor(NamedTuple):
    grad: Tensor
    weight: Tensor
    counts: list[Tensor]
    versions: list[int]

    def tensors(self) -> tuple[Tensor, Tensor]:
        if [each._version for each in self.counts] != self.versions:
            raise RuntimeError(
                "a weight was modified by an inplace operation in the backward that computes the gradient of its x: "
                "write it after the backward, or in a hook of the weight, as register_post_accumulate_grad_hook"
            )
        return self.grad, self.weight


class WhenRead(Tensor):
    """The local tensor of such a gradient: the sum of ``grad @ weight`` over its factors, and of ``rest``."""

    factors: list[_Factor]
    rest: Tensor | None
    value: Tensor | None  # once it was read
    copy: Tensor | None  # of value, once that was given away as memory that may be written
    families: list[list[weakref.ref[WhenRead]]]

    @staticmethod
    def __new__(
        cls, shape: Any, factors: Any, rest: Tensor | None = None, families: list[Any] | None = None
    ) -> WhenRead:
        like = factors[0].grad
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.factors, made.rest, made.value, made.copy, made.families = factors, rest, None, None, families or [[]]
        made.families[0].append(weakref.ref(made))
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _VIEWS and (view := args[0]._viewed(args[1] if len(args) > 1 else args[0].shape)) is not None:
            return view
        if func is _aten.add.Tensor and not kwargs and len(args) == 2:
            first, second = args if isinstance(args[0], cls) else reversed(args)
            if (added := first._plus(second)) is not None:
                return added
        aliases = any(each.alias_info is not None for each in func._schema.returns)
        writes = func._schema.is_mutable
        args, kwargs = tree_map_only(cls, lambda each: each.read(aliases, writes), (args, kwargs or {}))
        return func(*args, **kwargs)

    def read(self, aliases: bool = False, writes: bool = False) -> Tensor:
        if self.value is None:
            products = [torch.matmul(*each.tensors()) for each in self.factors]
            self.value = sum(products[1:], products[0]) if self.rest is None else sum(products, self.rest)
        if writes:
            self.factors, self.copy = [], None
        elif aliases and self.copy is None and self.factors:
            self.copy = self.value.clone()
        return self.value

    def parts(self) -> tuple[list[_Factor], Tensor | None]:
        """Factors, and what is to be added; no factors once their sum was written."""
        if self.copy is not None and self.value is not None:
            pair = self.copy.view(torch.uint8), self.value.view(torch.uint8)  # NaN is no other value than it was
            if not torch.equal(*pair):
                self.factors, self.copy = [], None
        return self.factors, self.rest if self.factors else self.value

    def read_by_others(self, itself: bool) -> None:
        """Multiply what others keep of this gradient and those that it was made of, before a weight changes."""
        for each in [ref() for family in self.families for ref in family]:
            if each is not None and (itself or each is not self):
                each.read()

    def _viewed(self, shape: Any) -> WhenRead | None:
        factors, rest = self.parts()
        shape = torch.empty(self.shape, device="meta").view(getattr(shape, "shape", shape)).shape
        if not factors or len(shape) < 2 or shape[-1] != self.shape[-1]:
            return None
        factors = [each._replace(grad=each.grad.reshape(*shape[:-1], each.grad.shape[-1])) for each in factors]
        return WhenRead(shape, factors, None if rest is None else rest.reshape(shape), self.families)

    def _plus(self, other: Any) -> WhenRead | None:
        if not isinstance(other, Tensor) or other.shape != self.shape or other.dtype != self.dtype:
            return None
        factors, rest = self.parts()
        more, others = other.parts() if isinstance(other, WhenRead) else ([], other)
        if not (factors or more):
            return None
        both = rest if others is None else others if rest is None else rest + others
        families = self.families + (other.families if isinstance(other, WhenRead) else [])
        return WhenRead(self.shape, factors + more, both, families)
