"""The gradients of an op as a node of autograd, in Python or in the native part.

Where calls of a group are prepared, the native part (`kernels/cpu/training_calls.cpp`) makes the node, and asks once a
kind of call for the saved tensors. Its backward is in C++ too (`kernels/cpu/gradients.cpp`). `backward` runs for parts
of several sizes, for second derivatives, and inside a mode that looks at ops.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedcomm.kernels.native_part import loaded
from fusedcomm.ops.call_arguments import PerTensor
from fusedcomm.ops.table import OpSpec
from fusedcomm.plan.geometry.shapes import check_tensors

Tensors = Sequence[Tensor | None]


class Context:
    """``ctx`` of a node in the native part, for all calls of a kind: it keeps no tensor."""

    saved_tensors: tuple[Tensor | None, ...]  # in a backward

    def __init__(self, inputs: Sequence[Any], needs_grad: Sequence[bool]) -> None:
        """``needs_grad``: of those inputs that are tensors."""
        self.tensors = [i for i, each in enumerate(inputs) if isinstance(each, Tensor)]
        needed = {i for i, needs in zip(self.tensors, needs_grad, strict=True) if needs}
        self.needs_input_grad = tuple(i in needed for i in range(len(inputs)))
        self.to_save: tuple[Tensor | None, ...] = ()
        self.materializes = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.to_save = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materializes = value


def needs_now(ctx: Any) -> Sequence[Any]:
    """`ctx.needs_input_grad` of the running backward, which may ask for some gradients alone, as in pipelining."""
    needs: Sequence[Any] = ctx.needs_input_grad  # a list for a list
    if torch.compiler.is_compiling():
        return needs
    nodes = (node for node, _ in ctx.next_functions if node is not None)  # one for each tensor that needs its gradient
    asked: Sequence[Any] = pytree.tree_map(lambda need: need and _is_executed(next(nodes)), needs)
    return (
        asked if any(pytree.tree_leaves(asked)) else needs
    )  # the engine runs no node for nothing: grad_fn was called by hand


def _is_executed(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that autograd.grad asks for, or outside of a backward
        return True


@dataclass(frozen=True)
class Formula:
    """The gradients of an op. Its arguments are flat, as autograd needs them: [x, *ws, *biases, *options]."""

    spec: OpSpec

    @cached_property
    def function(self) -> type[torch.autograd.Function]:
        """`torch.library.register_autograd` gives no gradients for Tensor?[]."""
        functions = {  # no methods, which Dynamo does not take
            "forward": staticmethod(lambda ctx, *flat: self.forward(ctx, *flat)),
            "backward": staticmethod(lambda ctx, *grads: self.backward(ctx, *grads)),
        }
        return type(f"{self.spec.name}_", (torch.autograd.Function,), functions)

    def flat(self, args: Sequence[Any]) -> list[Any]:
        if not self.spec.takes_lists:
            return [*args]
        x, ws, biases, *options = args
        check_tensors(x, ws, biases)  # there are as many biases as weights: in a row nothing tells them apart
        return [x, *ws, *biases, *options]

    def forward(self, ctx: Any, *flat: Any) -> tuple[Tensor, ...]:
        """Run the op and save for `backward`."""
        args = self._nested(flat)
        with torch._C._AutoDispatchBelowAutograd():
            results = pytree.tree_leaves(self.spec.op(*args))
        self.save(ctx, flat, results)
        return tuple(results)

    def save(self, ctx: Any, flat: Sequence[Any], results: Sequence[Tensor]) -> None:
        assert self.spec.save is not None
        self.spec.save(ctx, self.spec.bind(self._nested(flat)), self._per_tensor(ctx.needs_input_grad), results)

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return self._gradients(ctx, needs_now(ctx), grads)

    def _gradients(self, ctx: Any, needs: Sequence[bool], grads: Tensors) -> tuple[Tensor | None, ...]:
        assert self.spec.backward is not None
        found = self.spec.backward(ctx, self._per_tensor(needs), *grads)
        return found.x, *found.ws, *found.biases, *(getattr(found, name, None) for name in self.spec.options)

    def describe(
        self, args: Sequence[Any], results: list[Tensor], needs_grad: Sequence[bool]
    ) -> tuple[Context, list[int], bool]:
        """Returns (ctx, indices of saved tensors in [*input tensors, *results] or -1, materialize_grads)."""
        args, results = pytree.tree_map_only(Tensor, loaded().alias, (list(args), results))  # x may be w
        flat = self.flat(args)
        ctx = Context(flat, needs_grad)
        self.save(ctx, flat, results)
        tensors = [*(flat[i] for i in ctx.tensors), *results]
        saved = [-1 if t is None else next(i for i, each in enumerate(tensors) if each is t) for t in ctx.to_save]
        ctx.to_save = ()
        assert not any(isinstance(each, Tensor) for each in pytree.tree_leaves(vars(ctx)))
        return ctx, saved, ctx.materializes

    def run(self, context: Context, saved: Tensors, grads: Tensors, needs: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of the tensors of a call. ``needs``: of each, whether it is asked for."""
        ctx = copy.copy(context)
        ctx.saved_tensors = tuple(saved)
        asked = {i for i, each in zip(ctx.tensors, needs, strict=True) if each}
        found = self._gradients(ctx, [need and i in asked for i, need in enumerate(ctx.needs_input_grad)], grads)
        return [found[i] for i in ctx.tensors]

    @cached_property
    def _num_options(self) -> int:
        return len(self.spec.options)

    def _nested(self, flat: Sequence[Any]) -> Sequence[Any]:
        """The inverse of `flat`."""
        if not self.spec.takes_lists:
            return flat
        x, *tensors = flat[: -self._num_options]
        num_ws = len(tensors) // 2
        return x, tensors[:num_ws], tensors[num_ws:], *flat[-self._num_options :]

    def _per_tensor(self, flat: Sequence[bool]) -> PerTensor:
        x, *tensors = flat[: -self._num_options]
        num_ws = len(tensors) // 2
        named = zip(self.spec.options, flat[-self._num_options :], strict=True)
        options = {name: each for name, each in named if name in PerTensor._fields}
        return PerTensor(x, tensors[:num_ws], tensors[num_ws:], **options)
