"""A DTensor that is replicated for whoever reads it, and is gathered from its shards only then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only


def gathered_when_read(x: DTensor) -> DTensor:
    """``x.redistribute(placements=[Replicate()])`` for x sharded evenly over a 1-D mesh, which communicates once any
    op, or `DTensor.to_local`, takes it."""
    result: DTensor = _Gather.apply(x)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        ctx.placements = x.placements
        local = _WhenRead(x.shape, x.to_local(), lambda: x.redistribute(placements=(Replicate(),)).to_local())
        replicated = DTensor.from_local(local, x.device_mesh, (Replicate(),), run_check=False)
        local.box.aliases_read = True
        return replicated

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return grad.redistribute(placements=ctx.placements)


class _Box:
    """What is to be done, then what came of it; shared by a tensor and its aliases."""

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        self.gather: Callable[[], Tensor] | None = gather
        self.gathered: Tensor | None = None
        self.aliases_read = False  # `DTensor.from_local` makes a view of what it is given

    def read(self) -> Tensor:
        if self.gather is not None:
            with torch.no_grad():
                self.gathered = self.gather()
            self.gather = None
        assert self.gathered is not None
        return self.gathered


class _WhenRead(Tensor):
    """The local tensor of such a DTensor."""

    box: _Box

    @staticmethod
    def __new__(cls, size: Sequence[int], like: Tensor, gather: Callable[[], Tensor]) -> _WhenRead:
        return cls._of(size, like, _Box(gather))

    @classmethod
    def _of(cls, size: Sequence[int], like: Tensor, box: _Box) -> _WhenRead:
        made = Tensor._make_wrapper_subclass(cls, size, dtype=like.dtype, device=like.device, requires_grad=False)
        made.box = box
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if func is torch.ops.aten.view.default and isinstance(first, cls) and not first.box.aliases_read:
            return cls._of(first.shape, first, first.box)
        args, kwargs = tree_map_only(cls, lambda each: each.box.read(), (args, kwargs or {}))
        return func(*args, **kwargs)
