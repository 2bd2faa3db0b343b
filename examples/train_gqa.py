"""A transformer layer with grouped queries on any number of ranks: 8 heads of q, 2 of k and v, 1003 tokens.

    torchrun --nproc-per-node 4 examples/train_gqa.py

`train_gqa_single.py` beside it is the same script in one process, ten lines shorter. The losses are equal.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fusedcomm

BATCH, TOKENS, HIDDEN, HEADS, KV_HEADS, WORDS, STEPS = 2, 1003, 32, 8, 2, 50, 5
HEAD_DIM = HIDDEN // HEADS


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv: nn.Module = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out: nn.Module = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, HIDDEN))
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        heads = self.qkv(self.norm(x), TOKENS)
        q, k, v = (t.transpose(1, 2) for t in heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        x = x + self.out(attended)
        return self.head(x + self.mlp(x))


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group()
    torch.manual_seed(0)
    model = Layer().to(device)
    words = torch.randint(WORDS, (BATCH, TOKENS + 1), device=device)
    ids, labels = words[:, :-1], words[:, 1:].masked_fill(torch.rand(BATCH, TOKENS, device=device) < 0.2, -100)
    count = (labels != -100).sum()
    model.qkv = fusedcomm.nn.UlyssesQKV.from_linear(model.qkv, HEADS, KV_HEADS)
    model.out = fusedcomm.nn.UlyssesOut.from_linear(model.out, HEADS)
    ids, labels = fusedcomm.nn.shard_tokens((ids, labels))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / count
        loss.backward()
        fusedcomm.nn.sum_replicated_gradients(model, also=model.parameters())
        dist.all_reduce(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
