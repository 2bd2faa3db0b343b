"""The formula of an op's gradients as the native part uses it, for training calls that are prepared.

An op says what its backward needs in ``setup_context`` and what that does in ``backward``, in Python and as
`torch.library.register_autograd` takes them. Where calls of a group are prepared, the native part
(`kernels/cpu/training_calls.cpp`) makes the node of autograd, and asks once for a kind of call what is saved. The
second backward of a kind is recorded, as calls are (`fusedcomm.ops.prepared`); from the third on no Python runs.
Second derivatives, and backwards inside a mode that looks at ops, run ``backward`` itself.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fusedcomm.runtime.native_part import loaded
from fusedcomm.runtime.tape import Recorder

log = logging.getLogger("fusedcomm")
Tensors = Sequence[Tensor | None]


class Context:
    """``ctx`` of a formula, for all calls of a kind: it keeps no tensor."""

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


@dataclass(frozen=True)
class Formula:
    setup_context: Callable[..., None]
    backward: Callable[..., Any]

    def describe(
        self, args: Sequence[Any], results: list[Tensor], needs_grad: Sequence[bool]
    ) -> tuple[Context, list[int], bool]:
        """What a call leaves to its backward, where what is saved lies among its tensors and, behind them, its results,
        and whether gradients that are not there become zeros.
        """
        args, results = pytree.tree_map_only(Tensor, loaded().alias, (list(args), results))  # x may be w
        inputs = [each for arg in args for each in (arg if _is_tensor_list(arg) else [arg])]
        ctx = Context(inputs, needs_grad)
        self.setup_context(ctx=ctx, inputs=tuple(inputs), output=tuple(results) if len(results) > 1 else results[0])
        tensors = [*(inputs[i] for i in ctx.tensors), *results]
        saved = [-1 if t is None else next(i for i, each in enumerate(tensors) if each is t) for t in ctx.to_save]
        ctx.to_save = ()
        assert not any(isinstance(each, Tensor) for each in pytree.tree_leaves(vars(ctx)))
        return ctx, saved, ctx.materializes

    def run(self, context: Context, saved: Tensors, grads: Tensors) -> list[Tensor | None]:
        """The gradients of the tensors of a call."""
        ctx = copy.copy(context)
        ctx.saved_tensors = tuple(saved)
        found = self.backward(ctx, *grads)
        return [found[i] for i in ctx.tensors]

    def record(
        self, kind: Any, key: list[int], context: Context, saved: Tensors, grads: Tensors
    ) -> list[Tensor | None]:
        """`run`, and its tape goes to ``kind`` under ``key``."""
        saved, grads = pytree.tree_map_only(Tensor, loaded().alias, (saved, grads))
        with Recorder([t for t in (*saved, *grads) if t is not None]) as recorder:
            found = self.run(context, saved, grads)
        recorder.finish([found])
        if not recorder.is_usable:
            log.debug("a backward is not prepared: %s", "; ".join(recorder.reasons))
        kind.add(key, recorder.tape if recorder.is_usable else None)
        return found


def _is_tensor_list(arg: Any) -> bool:
    return isinstance(arg, list) and bool(arg) and all(each is None or isinstance(each, Tensor) for each in arg)
