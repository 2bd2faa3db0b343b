"""A DTensor that is replicated for whoever reads it, and is gathered from its shards only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.view_as.default)  # the second one in inference mode


def gathered_when_read(x: DTensor) -> tuple[DTensor, Gather]:
    """``x.redistribute(placements=[Replicate()])`` for x sharded evenly over a 1-D mesh, which communicates once any
    op, or `DTensor.to_local`, takes it; and what tells whether it has."""
    detached: Any = x.detach()  # no gradient: it is read below autograd, where DTensors of torch 2.11 cannot drop one
    gather = Gather(lambda: detached.redistribute(placements=(Replicate(),)).to_local())
    return _Replicated.apply(x, gather), gather


class Gather:
    """What is to be done, then what came of it; shared by a tensor and its aliases."""

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        self.gather: Callable[[], Tensor] | None = gather
        self.gathered: Tensor | None = None
        self.aliases_read = False  # `DTensor.from_local` makes a view of what it is given

    @property
    def done(self) -> bool:
        return self.gathered is not None

    def read(self) -> Tensor:
        if self.gather is not None:
            with torch.no_grad():
                self.gathered = self.gather()
            self.gather = None
        assert self.gathered is not None
        return self.gathered


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, gather: Gather) -> DTensor:
        ctx.placements = x.placements
        replicated = DTensor.from_local(_WhenRead(x, gather), x.device_mesh, (Replicate(),), run_check=False)
        gather.aliases_read = True
        return replicated

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        return grad.redistribute(placements=ctx.placements), None


class _WhenRead(Tensor):
    """The local tensor of such a DTensor."""

    source: Gather

    @staticmethod
    def __new__(cls, like: Tensor, gather: Gather) -> _WhenRead:
        made = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.source = gather
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if func in _VIEWS and isinstance(first, cls) and not first.source.aliases_read:
            return cls(first, first.source)
        args, kwargs = tree_map_only(cls, lambda each: each.source.read(), (args, kwargs or {}))
        return func(*args, **kwargs)
