"""Ulysses attention: a rank holds a block of the tokens, and inside attention a block of the heads.

    torchrun --nproc-per-node 2 examples/ulysses_attention.py

A plain block has its two projections replaced, by a line each, and trains beside the original, which has all tokens.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fusedcomm

BATCH, TOKENS, HIDDEN, HEADS, STEPS = 2, 256, 128, 8, 5


class QKV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[batch, tokens, hidden] -> q, k, v, each [batch, tokens, heads, head_dim]."""
        return self.linear(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)


class Out(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, heads, head_dim] -> [batch, tokens, hidden]."""
        return self.linear(x.flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv: Any = QKV()
        self.out: Any = Out()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(self.norm(x)))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(heads.transpose(1, 2))


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # the same model and data on every rank
    plain = Block().to(device)
    x, target = torch.randn(2, BATCH, TOKENS, HIDDEN, device=device)
    # The optimizer comes before the group: what torch.optim imports would keep gloo's threads alive (torch 2.13).
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    dist.init_process_group()
    rank, group_size = dist.get_rank(), dist.get_world_size()

    model = copy.deepcopy(plain)
    model.qkv = fusedcomm.nn.UlyssesQKV.from_linear(model.qkv.linear, num_heads=HEADS)
    model.out = fusedcomm.nn.UlyssesOut.from_linear(model.out.linear, num_heads=HEADS)
    my_x, my_target = (t.chunk(group_size, 1)[rank] for t in (x, target))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        plain_loss = F.mse_loss(plain(x), target)
        plain_loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

        loss = F.mse_loss(model(my_x), my_target) / group_size  # this rank's part of the mean over all tokens
        loss.backward()
        # Every rank holds all parameters, and the gradients of its own tokens.
        fusedcomm.nn.sum_replicated_gradients(model, also=model.norm.parameters())
        optimizer.step()
        optimizer.zero_grad()

        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total:.6f}, single process {plain_loss:.6f}")
        torch.testing.assert_close(total, plain_loss.detach(), rtol=1e-3, atol=0)
    if rank == 0:
        print(f"ulysses_attention: the losses on {group_size} ranks equal those of a single process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
