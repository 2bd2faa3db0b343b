"""What is the same in every launch of a kind is worked out once: the grid, the scalar arguments, the compiled kernel.

Triton looks at every argument of every launch to find the kernel that is compiled for it, which takes longer than all
else of a launch. Launches of one kind have the same kernel: their tensors have the same dtypes, sizes, strides and
alignment, and everything else is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

_MOST_KINDS = 1024  # a workspace with more, whose sizes change all the time, begins anew
_ALIGNED = 16  # bytes: what Triton compiles for


class Launch:
    """Launches of one kind. ``arguments`` makes all of a kernel's from the tensors of one launch, and keeps none."""

    def __init__(
        self, kernel: Any, grid: tuple[int], arguments: Callable[..., tuple[Any, ...]], **options: int
    ) -> None:
        self._kernel, self._grid, self._arguments, self._options = kernel, grid, arguments, options
        self._compiled: Any = None

    def __call__(self, *tensors: Tensor | None) -> None:
        arguments = self._arguments(*tensors)
        if self._compiled is not None:
            self._compiled[(*self._grid, 1, 1)](*arguments)
            return
        compiled = self._kernel[self._grid](*arguments, **self._options)
        if hasattr(type(compiled), "__getitem__"):  # neither futures of Triton nor None have it
            self._compiled = compiled


_kinds: WeakKeyDictionary[Any, dict[Hashable, tuple[Launch | None, object]]] = WeakKeyDictionary()


def of_kind(
    workspace: Any,
    plan: Callable[[], Launch | None],
    name: str,
    *facts: Hashable,
    tensors: tuple[Tensor | None, ...] = (),
    by: object = None,
) -> Launch | None:
    """``plan()`` of the first launch on ``workspace`` with this name, these facts, tensors like these and this ``by``.

    It must not keep the workspace alive, with which it goes.
    """
    kinds = _kinds.setdefault(workspace, {})
    kind = (name, id(by), facts, *map(_layout, tensors))
    if kind not in kinds:
        if len(kinds) >= _MOST_KINDS:
            kinds.clear()
        kinds[kind] = plan(), by
    return kinds[kind][0]


def _layout(t: Tensor | None) -> Hashable:
    return None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % _ALIGNED)
