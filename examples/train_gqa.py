"""A transformer layer with grouped queries: 8 heads of q, 2 of k and v, 1003 tokens, on any number of ranks.

    torchrun --nproc-per-node 4 examples/train_gqa.py

One function trains it in a single process and on all ranks; what the second needs more stands behind ``if parallel``.
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
        self.parallel = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.parallel:
            heads = self.qkv(self.norm(x), TOKENS)
        else:
            heads = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], -2)
        q, k, v = (t.transpose(1, 2) for t in heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        x = x + self.out(attended if self.parallel else attended.flatten(-2))
        return self.head(x + self.mlp(x))


def train(device: torch.device, parallel: bool) -> list[float]:
    torch.manual_seed(0)  # the same model and data on every rank
    model = Layer().to(device)
    words = torch.randint(WORDS, (BATCH, TOKENS + 1), device=device)
    ids, labels = words[:, :-1], words[:, 1:].masked_fill(torch.rand(BATCH, TOKENS, device=device) < 0.2, -100)
    count = (labels != -100).sum()  # on all ranks
    if parallel:
        model.parallel = True
        model.qkv = fusedcomm.nn.UlyssesQKV.from_linear(model.qkv, HEADS, KV_HEADS)
        model.out = fusedcomm.nn.UlyssesOut.from_linear(model.out, HEADS)
        ids, labels = fusedcomm.nn.shard_tokens((ids, labels))
    others = [p for part in (model.embedding, model.norm, model.mlp, model.head) for p in part.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / count
        loss.backward()
        if parallel:
            fusedcomm.nn.sum_replicated_gradients(model, also=others)
            dist.all_reduce(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    singles = train(device, parallel=False)
    dist.init_process_group()
    losses = train(device, parallel=True)
    for step, (loss, single) in enumerate(zip(losses, singles, strict=True)):
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.6f}, single process {single:.6f}")
        torch.testing.assert_close(loss, single, rtol=1e-3 if gpu else 1e-6, atol=0)
    if dist.get_rank() == 0:
        print(f"train_gqa: the losses on {dist.get_world_size()} ranks equal those of a single process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
