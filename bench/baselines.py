"""The collectives of the baselines, as users call them: blocks along a first dim of R, autograd written by hand.

Each function takes the short way where nothing needs a gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedcomm.run.group_collectives import all_gather_single, reduce_scatter_single


def packed(t: Tensor, dim: int) -> Tensor:
    """t cut along ``dim`` into [R, block]; a copy unless dim is the first."""
    dim = dim % t.ndim
    return t.unflatten(dim, (dist.get_world_size(), -1)).movedim(dim, 0).contiguous()


def unpacked(blocks: Tensor, dim: int) -> Tensor:
    """[R, block] concatenated along ``dim`` of the block; a copy unless dim is the first."""
    return blocks.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def all_to_all(blocks: Tensor) -> Tensor:
    """[R, block] exchanged: block p goes to rank p."""
    return _Collective.apply(blocks, _all_to_all, _all_to_all) if blocks.requires_grad else _all_to_all(blocks)


def all_gather(t: Tensor) -> Tensor:
    """Every rank's t, [R, *t.shape]."""
    return _Collective.apply(t, _all_gather, _reduce_scatter) if t.requires_grad else _all_gather(t)


def reduce_scatter(blocks: Tensor) -> Tensor:
    """[R, block] -> the sum of every rank's block for this rank."""
    return _Collective.apply(blocks, _reduce_scatter, _all_gather) if blocks.requires_grad else _reduce_scatter(blocks)


def all_reduce(t: Tensor) -> Tensor:
    """Sum t over the ranks, in place. Its gradient is taken to be the same on all ranks, as in tensor parallelism."""
    return _Collective.apply(t, _all_reduce, lambda grad: grad) if t.requires_grad else _all_reduce(t)


def _all_to_all(blocks: Tensor) -> Tensor:
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks)
    return received


def _all_gather(t: Tensor) -> Tensor:
    gathered = t.new_empty(dist.get_world_size() * t.numel())
    all_gather_single(gathered, t.reshape(-1))
    return gathered.view(-1, *t.shape)


def _reduce_scatter(blocks: Tensor) -> Tensor:
    total = blocks.new_empty(blocks.numel() // blocks.shape[0])
    reduce_scatter_single(total, blocks.reshape(-1))
    return total.view(blocks.shape[1:])


def _all_reduce(t: Tensor) -> Tensor:
    dist.all_reduce(t)
    return t


class _Collective(torch.autograd.Function):
    """``run(t)``; its gradient is ``back(grad)``."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        if run is _all_reduce:
            ctx.mark_dirty(t)
        return run(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None
