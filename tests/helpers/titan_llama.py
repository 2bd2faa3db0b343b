"""A Llama as torchtitan writes it, and torchtitan's plan for it: rotary embeddings on DTensors, norms of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from tests.helpers.small_llama import HEAD_DIM, HEADS, KV_HEADS, LAYERS, TOKENS, VOCAB, WIDTH, FeedForward


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x.float() * scale).type_as(x) * self.weight


def precompute_freqs_cis() -> Tensor:
    """[tokens, head_dim / 2], complex."""
    freqs = 1.0 / (10000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    angles = torch.outer(torch.arange(TOKENS).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, freqs_cis: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


class InnerAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = (nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.inner_attention = InnerAttention()

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (each.view(batch, tokens, -1, HEAD_DIM) for each in (self.wq(x), self.wk(x), self.wv(x)))
        q, k = rotated(q, freqs_cis), rotated(k, freqs_cis)
        attended = self.inner_attention(*(each.transpose(1, 2) for each in (q, k, v)))
        return self.wo(attended.transpose(1, 2).contiguous().view(batch, tokens, -1))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    freqs_cis: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.register_buffer("freqs_cis", precompute_freqs_cis(), persistent=False)
        self.layers = nn.ModuleDict({str(i): TransformerBlock() for i in range(LAYERS)})
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        return self.output(self.norm(h))  # type: ignore[no-any-return]


def titan_llama() -> Transformer:
    """The same parameters on every rank."""
    torch.manual_seed(0)
    return Transformer()


def apply_tp(model: Transformer, mesh: DeviceMesh, loss_parallel: bool, styles: Any) -> Transformer:
    """Its `apply_tp`, with the styles of either package."""
    colwise, rowwise, norm = styles.ColwiseParallel, styles.RowwiseParallel, styles.SequenceParallel
    logits = Shard(-1) if loss_parallel else Replicate()
    ends = {
        "tok_embeddings": rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": norm(),
        "output": colwise(input_layouts=Shard(1), output_layouts=logits, use_local_output=not loss_parallel),
    }
    heads = (Shard(1),)
    block = {
        "attention_norm": norm(),
        "attention": styles.PrepareModuleInput(
            input_layouts=(Shard(1), Replicate()), desired_input_layouts=(Replicate(), Replicate())
        ),
        "attention.wq": colwise(use_local_output=False),
        "attention.wk": colwise(use_local_output=False),
        "attention.wv": colwise(use_local_output=False),
        "attention.inner_attention": styles.PrepareModuleInputOutput(
            input_layouts=heads * 3,
            desired_input_layouts=heads * 3,
            use_local_input=True,
            output_layouts=heads,
            desired_output_layouts=heads,
            use_local_output=False,
        ),
        "attention.wo": rowwise(output_layouts=Shard(1)),
        "ffn_norm": norm(),
        "feed_forward": styles.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": colwise(),
        "feed_forward.w2": rowwise(output_layouts=Shard(1)),
        "feed_forward.w3": colwise(),
    }
    styles.parallelize_module(model, mesh, ends)
    for layer in model.layers.values():
        styles.parallelize_module(layer, mesh, block)
    return model
