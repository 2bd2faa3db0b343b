"""The parts that programs of users are made of: sizes, and collectives as torch and libraries write them."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

B, T, K, HEADS, DIM = 2, 6, 8, 4, 3  # T tokens per rank
N = HEADS * DIM


def gather_at_dim_0(x: Tensor, dim: int, group: Any) -> Tensor:
    """all_gather_tensor as torch 2.11 and 2.12 can trace it."""
    gathered = funcol.all_gather_tensor(x, 0, group)
    return torch.cat(gathered.chunk(dist.get_world_size(group)), dim) if dim else gathered


# torch 2.13 renamed them
all_gather = getattr(funcol, "all_gather_single", gather_at_dim_0)
all_gather_autograd = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
reduce_scatter_autograd = (
    getattr(funcol, "reduce_scatter_single_autograd", None) or funcol.reduce_scatter_tensor_autograd
)


def world() -> Any:
    return dist.group.WORLD


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def reshard(y: Tensor, gather_dim: int, scatter_dim: int, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(y, mesh, [Shard(gather_dim)]).redistribute(mesh, [Shard(scatter_dim)]).to_local()


class AllToAll(torch.autograd.Function):
    """all_to_all_single, whose gradient comes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.wait_tensor(funcol.all_to_all_single(x, None, None, world()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return funcol.wait_tensor(funcol.all_to_all_single(grad.contiguous(), None, None, world()))


def heads_first(t: Tensor, r: int) -> Tensor:
    """[b, t, h, d] of this rank's tokens -> [b, R t, h / R, d], in the way of xDiT and long-context-attention."""
    b, tokens, heads, dim = t.shape
    t = t.reshape(b, tokens, r, heads // r, dim).transpose(0, 2).contiguous()
    t = AllToAll.apply(t)
    return t.reshape(r * tokens, b, heads // r, dim).transpose(0, 1).contiguous().reshape(b, -1, heads // r, dim)


def tokens_first(t: Tensor, r: int) -> Tensor:
    """The way back: [b, R t, h / R, d] -> [b, t, h, d]."""
    b, tokens, heads, dim = t.shape
    t = t.reshape(b, r, tokens // r, heads, dim).transpose(0, 3).transpose(0, 1).contiguous()
    t = AllToAll.apply(t.reshape(r, heads, tokens // r, b, dim))
    return t.reshape(r * heads, tokens // r, b, dim).transpose(0, 2).contiguous().reshape(b, tokens // r, -1, dim)


def veomni(t: Tensor, r: int) -> Tensor:
    """[t, h, d] for packed sequences, in the way of VeOmni: the heads are sent."""
    t = t.reshape(t.shape[0], r, t.shape[1] // r, *t.shape[2:]).transpose(0, 1).contiguous()
    return AllToAll.apply(t.flatten(0, 1))
