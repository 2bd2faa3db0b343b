"""A layer as Llama has it, whole or under this package's tensor parallel styles."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from fusedcomm import parallel


@dataclass(frozen=True)
class Sizes:
    """x is [batch, tokens, hidden] on every rank; heads and intermediate are of one rank.

    A rank has an eighth of Llama 3 8B, as on a node of 8 GPUs, with hidden size and features divided by 4.
    """

    batch: int = 2
    tokens: int = 512
    hidden: int = 1024
    heads: int = 2
    head_dim: int = 64
    intermediate: int = 448


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, shares: int) -> None:
        super().__init__()
        self.head_dim, inner = sizes.head_dim, sizes.heads * sizes.head_dim * shares
        self.wq, self.wk, self.wv = (nn.Linear(sizes.hidden, inner, bias=False) for _ in range(3))
        self.wo = nn.Linear(inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x)))
        y: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes, shares: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(sizes.hidden, sizes.intermediate * shares, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.intermediate * shares, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, shares: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention, self.feed_forward = Attention(sizes, shares), FeedForward(sizes, shares)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


MODELS: dict[str, Callable[[Sizes, int], nn.Module]] = {"mlp": FeedForward, "layer": Layer}


def styled(model: str, sizes: Sizes, device: torch.device) -> nn.Module:
    """The plan of PyTorch's tensor parallel examples. All ranks make the same weights, so nobody sends them."""
    apply: Any = partial(parallel.parallelize_module, src_data_rank=None)
    prepare: Any = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    mlp = {
        "w1": parallel.ColwiseParallel(),
        "w3": parallel.ColwiseParallel(),
        "w2": parallel.RowwiseParallel(output_layouts=Shard(1)),
    }
    module = MODELS[model](sizes, dist.get_world_size()).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if model == "mlp":
        apply(module, mesh, parallel.PrepareModuleInput(**prepare))
        return apply(module, mesh, mlp)
    plan = {
        "attention_norm": parallel.SequenceParallel(),
        "attention": parallel.PrepareModuleInput(**prepare),
        **{f"attention.w{each}": parallel.ColwiseParallel() for each in "qkv"},
        "attention.wo": parallel.RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": parallel.SequenceParallel(),
        "feed_forward": parallel.PrepareModuleInput(**prepare),
        **{f"feed_forward.{name}": style for name, style in mlp.items()},
    }
    return apply(module, mesh, plan)
