"""Ulysses layers with small integers, whose sums are exact: bit by bit what one process computes. How they round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedcomm
from fusedcomm.nn import UlyssesOut, UlyssesQKV, shard_tokens, sum_replicated_gradients
from tests.helpers.on_ranks import on_ranks

BATCH, FEATURES, HEAD_DIM = 2, 3, 2
EIGHT = [(8, *heads, tokens) for heads in ((20, 20), (8, 1), (8, 2), (20, 4)) for tokens in (5, 19)]
CASES = [  # ranks, heads of q, of k and v, tokens
    (4, 7, 7, 9),
    (4, 7, 1, 10),
    (4, 8, 1, 11),
    (4, 8, 2, 5),
    (4, 10, 5, 13),
    *(pytest.param(*case, marks=pytest.mark.thorough) for case in EIGHT),
]


def integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stands for attention: a token reads all before it, a head its group's k and v, and each has a gradient."""
    count = q.shape[-2] // max(1, k.shape[-2])
    k, v = (t.repeat_interleave(count, -2) for t in (k, v))
    scores = (q * k).sum(-1, keepdim=True).remainder(3).detach()
    return scores * v.cumsum(1) + q - k


def linear(in_features: int, out_features: int) -> nn.Linear:
    made = nn.Linear(in_features, out_features)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(integers(*parameter.shape))
    return made


@on_ranks()
@pytest.mark.parametrize(("world_size", "heads", "kv_heads", "tokens"), CASES)
@pytest.mark.parametrize("algorithm", ["unfused", "chunked"])
def test_bit_by_bit(rank: int, world_size: int, heads: int, kv_heads: int, tokens: int, algorithm: str) -> None:
    torch.manual_seed(0)
    plain = linear(FEATURES, (heads + 2 * kv_heads) * HEAD_DIM), linear(heads * HEAD_DIM, FEATURES)
    x, grad = integers(BATCH, tokens, FEATURES).requires_grad_(), integers(BATCH, tokens, FEATURES)
    parts = plain[0](x).unflatten(-1, (-1, HEAD_DIM)).split([heads, kv_heads, kv_heads], -2)
    want = plain[1](exact_attention(*parts).flatten(-2))
    want.backward(grad)

    qkv, out = UlyssesQKV.from_linear(plain[0], heads, kv_heads), UlyssesOut.from_linear(plain[1], heads)
    mine = shard_tokens(x.detach()).clone().requires_grad_()
    with fusedcomm.force_algorithm(algorithm, strict=True):
        y = out(exact_attention(*qkv(mine, tokens)), tokens)
        y.backward(shard_tokens(grad))
    assert torch.equal(y, shard_tokens(want)) and torch.equal(mine.grad, shard_tokens(x.grad))
    for layer, single in zip((qkv, out), plain, strict=True):
        sum_replicated_gradients(layer)
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, single.get_parameter(name).grad)


@on_ranks(3)
@pytest.mark.parametrize("algorithm", ["unfused", "chunked"])
def test_gradients_of_repeated_heads_are_added_in_float32(rank: int, algorithm: str) -> None:
    """8 heads of q, 2 of k: rank 1 needs the second of k twice, rank 2 once. Rank 1 adds its two in float32 and rounds
    the sum to bfloat16, in which it travels; what comes from the ranks is added in float32, and rounded again.
    """
    tokens, size = 6, 4
    layer = UlyssesQKV(size, 8, size, 2, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[9 * size : 10 * size] = torch.eye(size)  # behind q, the second head of k
    x = torch.zeros(tokens // 3, size, dtype=torch.bfloat16, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    first, second, third = torch.randn(3, tokens, size, generator=generator).bfloat16()
    with fusedcomm.force_algorithm(algorithm, strict=True):
        _, k, _ = layer(x)
        assert k.shape[-2] == (1, 3, 1)[rank]
        zero = torch.zeros_like(first)
        mine: Any = [[zero], [zero, first, second], [third]][rank]
        k.backward(torch.stack(mine, -2))
    sums = [(first.float() + second.float()).bfloat16().float(), third.float()]
    want = (sums[0] + sums[1]).bfloat16()
    assert torch.equal(x.grad, want.chunk(3)[rank])
    exact = first.double() + second.double() + third.double()
    bound = 2**-8 * ((first.double() + second.double()).abs() + exact.abs() + 2**-8)
    assert ((want.double() - exact).abs() <= bound).all()
