"""Sequences packed into one row: cu_seqlens, positions and masked labels, with attention inside each sequence."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fusedcomm.nn import UlyssesOut, UlyssesQKV, shard_tokens, sum_replicated_gradients, unshard_tokens
from tests.helpers.on_ranks import on_ranks

WORDS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 17, 12, 7, 1, 4
CU_SEQLENS = (0, 5, 6, 19, 27)
TOKENS = CU_SEQLENS[-1]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """What a kernel for sequences of different lengths computes: causal attention inside each."""
    found = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        heads = (t[start:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        found.append(F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(found)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.qkv: Any = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out: Any = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = self.words(ids) + self.places(positions)
        if isinstance(self.qkv, UlyssesQKV):
            q, k, v = self.qkv(x, TOKENS)
            attended = self.out(attention(q, k, v, cu_seqlens), TOKENS)
        else:
            q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], -2)
            attended = self.out(attention(q, k, v, cu_seqlens).flatten(-2))
        return self.head(x + attended)


@on_ranks(4)
def test_the_loss_is_that_of_the_whole_batch(rank: int) -> None:
    """7 heads of q and 1 of k and v on 4 ranks, whose blocks of tokens end inside of sequences."""
    torch.manual_seed(0)
    model, words = Model(), torch.randint(WORDS, (TOKENS + 1,))
    cu_seqlens = torch.tensor(CU_SEQLENS)
    positions = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(CU_SEQLENS)])
    ids, labels = words[:-1], words[1:].clone()
    labels[cu_seqlens[1:] - 1] = -100  # the next word is of another sequence
    labels[8:12] = -100
    count = (labels != -100).sum()
    logits = model(ids, positions, cu_seqlens)
    want = F.cross_entropy(logits, labels, reduction="sum") / count
    torch.testing.assert_close(want, F.cross_entropy(logits, labels))
    want.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    model.qkv = UlyssesQKV.from_linear(model.qkv, HEADS, KV_HEADS)
    model.out = UlyssesOut.from_linear(model.out, HEADS)
    batch = {"ids": ids, "positions": positions, "labels": labels, "cu_seqlens": cu_seqlens}
    dims = {"ids": 0, "positions": 0, "labels": 0, "cu_seqlens": None}
    mine = shard_tokens(batch, dims)
    own = mine.pop("labels")
    part = model(**mine)
    loss = F.cross_entropy(part, own, reduction="sum") / count
    loss.backward()
    others = [p for each in (model.words, model.places, model.head) for p in each.parameters()]
    sum_replicated_gradients(model, also=others)
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(unshard_tokens(part, TOKENS, 0), logits, **CLOSE)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], **CLOSE)
