"""A DTensor that is replicated for whoever reads it, and is gathered from its shards only then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

_VIEW, _VIEW_AS = torch.ops.aten.view.default, torch.ops.aten.view_as.default  # the second one in inference mode


class Gather:
    """The whole of x, which communicates once. It is shared by a tensor and its views.

    ``x``: on a 1-D mesh, sharded or replicated.
    """

    def __init__(self, x: DTensor) -> None:
        self._x: Any = x.detach()  # it is read below autograd, where DTensors of torch 2.11 cannot drop a gradient
        self.gathered: Tensor | None = None
        self._is_saved = False
        self.is_made = False  # `DTensor.from_local` makes a view of what it is given, which is no reader yet

    def keep(self, gathered: Tensor) -> None:
        """Take what an op has gathered, and may have saved for its backward."""
        self.gathered, self._is_saved, self._x = gathered, True, None

    def read(self, to_write: bool = False) -> Tensor:
        if self.gathered is None:
            with torch.no_grad():
                sharded = self._x.placements != (Replicate(),)
                self.gathered = (self._x.redistribute(placements=(Replicate(),)) if sharded else self._x).to_local()
            self._x = None
        elif to_write and self._is_saved:  # autograd does not see this write, and could not refuse a backward behind it
            self.gathered, self._is_saved = self.gathered.clone(), False
        return self.gathered


def gathered_when_read(x: DTensor, gather: Gather) -> DTensor:
    """``x.redistribute(placements=[Replicate()])``, which communicates once any op, or `DTensor.to_local`, takes it.

    ``gather``: that of x. `source_of` finds it again from the result and its views.
    """
    replicated = _Replicated.apply(x, gather)
    gather.is_made = True
    return replicated  # type: ignore[no-any-return]


def source_of(x: object) -> Gather | None:
    local = getattr(x, "_local_tensor", None)
    return local.source if isinstance(local, WhenRead) else None


REPLICATED = "_ReplicatedBackward"


def origin_of(x: Tensor) -> str | None:
    """The node of autograd that the gradient of x goes to, views left out: REPLICATED for those of what
    `gathered_when_read` has made. (A DTensor viewed without gradient requires grad all the same.)"""
    node: Any = x.grad_fn
    while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0"):
        node = node.next_functions[0][0]
    return None if node is None else node.name()


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, gather: Gather) -> DTensor:
        ctx.placements = x.placements
        local = x.to_local()
        whole = local if x.placements == (Replicate(),) else torch.empty(x.shape, device="meta")
        local = WhenRead(whole, local, gather)
        return DTensor.from_local(local, x.device_mesh, (Replicate(),), run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        return grad.redistribute(placements=ctx.placements), None


class WhenRead(Tensor):
    """The local tensor of such a DTensor."""

    source: Gather

    @staticmethod
    def __new__(cls, laid_out: Tensor, like: Tensor, source: Gather) -> WhenRead:
        options: dict[str, Any] = {"strides": laid_out.stride(), "dtype": like.dtype, "device": like.device}
        made = Tensor._make_wrapper_subclass(cls, laid_out.shape, **options)
        made.source = source
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if func in (_VIEW, _VIEW_AS) and isinstance(first, cls):
            view = torch.empty_strided(first.shape, first.stride(), device="meta")
            view = view.view(args[1] if func is _VIEW else args[1].shape)
            if view.shape != first.shape or not first.source.is_made:
                return cls(view, first, first.source)
        to_write = func._schema.is_mutable
        args, kwargs = tree_map_only(cls, lambda each: each._read(to_write), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _read(self, to_write: bool) -> Tensor:
        return self.source.read(to_write).view(self.shape)
