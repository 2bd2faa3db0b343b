"""Ulysses as a registered attention of transformers: any model of its attention interface, each rank with its tokens.

    torchrun --nproc-per-node 2 examples/transformers_ulysses.py

accelerate's own way of it registers an attention likewise. The loss and gradients are those of one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

import fusedcomm

NAME, BATCH, TOKENS, VOCAB = "fusedcomm_ulysses", 2, 64, 100


def ulysses(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **options: Any) -> Any:
    """q, k, v [batch, heads, tokens / R, features] -> [batch, tokens / R, heads, features]; causal."""
    q, k, v = (fusedcomm.all_to_all(t, gather_dim=2, scatter_dim=1) for t in (q, k, v))  # all tokens of some heads
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return fusedcomm.all_to_all(y, gather_dim=1, scatter_dim=2).transpose(1, 2).contiguous(), None


def llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, **sizes)
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, tokens: Tensor, targets: Tensor, places: Tensor) -> Tensor:
    """The sum over these tokens, of the mean over all."""
    logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * TOKENS)
    loss.backward()
    return loss.detach()


def main() -> None:
    AttentionInterface.register(NAME, ulysses)
    AttentionMaskInterface.register(NAME, lambda *args, **options: None)  # causal by its own
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    data = torch.randint(VOCAB, (BATCH, TOKENS + 1))
    whole = data[:, :-1], data[:, 1:], torch.arange(TOKENS)[None]
    single, ours = llama("sdpa"), llama(NAME)
    expected = loss_of(single, *whole)
    loss = loss_of(ours, *(t.chunk(num_ranks, 1)[rank] for t in whole))
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, expected)
    for p, other in zip(ours.parameters(), single.parameters(), strict=True):
        dist.all_reduce(p.grad)  # each rank has those of its tokens
        torch.testing.assert_close(p.grad, other.grad, atol=1e-6, rtol=1e-4)
    if rank == 0:
        print(f"transformers_ulysses: loss {loss:.6f} and all gradients on {num_ranks} ranks are those of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
