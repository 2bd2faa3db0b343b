"""Ulysses layers beside one process: tokens and heads that R does not divide, fewer heads of k and v than ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fusedcomm
from fusedcomm.nn import UlyssesOut, UlyssesQKV, shard_tokens, sum_replicated_gradients
from fusedcomm.nn.ulysses import head_splits, kv_ranges, repeats
from tests.helpers.groups import fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched

BATCH, HIDDEN, HEAD_DIM = 2, 6, 3
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # float32 has 1.2e-7; sums of some tens of terms of about 1 run in another order


@dataclass(frozen=True)
class Case:
    num_ranks: int
    tokens: int
    heads: int
    kv_heads: int
    splits: tuple[int, ...] | None = None  # tokens by rank; None: as torch.chunk cuts them
    bias: bool = True

    def __str__(self) -> str:
        splits = "" if self.splits is None else "-split"
        return f"{self.tokens}-tokens{splits}-{self.heads}-heads-{self.kv_heads}-kv-on-{self.num_ranks}"

    @property
    def given(self) -> Any:
        return self.tokens if self.splits is None else self.splits

    def mine(self, t: Tensor, dim: int = 1) -> Tensor:
        if self.splits is None:
            return shard_tokens(t, dim)
        return t.split(self.splits, dim)[dist.get_rank()]


CASES = [
    Case(2, 7, 4, 1),
    Case(2, 1, 5, 5, bias=False),  # no tokens on rank 1
    Case(2, 6, 6, 2, splits=(5, 1)),
    Case(2, 7, 6, 3),  # kv straddle: 3 heads of q read 2 and 1
    Case(3, 4, 2, 1),  # no heads on rank 2
    Case(3, 9, 8, 4, splits=(0, 7, 2)),
    Case(4, 9, 7, 7),
    Case(4, 11, 8, 2),
    Case(4, 5, 10, 2),  # kv straddle, and no tokens on rank 3
]
EIGHT = [Case(8, tokens, *heads) for heads in ((20, 20), (8, 1), (8, 2), (20, 4)) for tokens in (5, 19)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def plain_layers(case: Case) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(1)
    qkv = nn.Linear(HIDDEN, (case.heads + 2 * case.kv_heads) * HEAD_DIM, case.bias)
    return qkv, nn.Linear(case.heads * HEAD_DIM, HIDDEN, case.bias)


def run_plain(case: Case, qkv: nn.Linear, out: nn.Linear, x: Tensor) -> tuple[Sequence[Tensor], Tensor]:
    heads = qkv(x).unflatten(-1, (-1, HEAD_DIM)).split([case.heads, case.kv_heads, case.kv_heads], -2)
    return heads, out(attention(*heads).flatten(-2))


def heads_of(case: Case, t: Tensor, rank: int, size: int) -> Tensor:
    """What a rank should hold of k or v: the heads that its heads of q read, each once or, if unevenly, for each."""
    mine = torch.arange(case.heads).tensor_split(size)[rank]
    read = mine // (case.heads // case.kv_heads)
    once, counts = read.unique(return_counts=True)
    return t[..., once if counts.unique().numel() <= 1 else read, :]


@on_ranks()
@pytest.mark.parametrize("algorithm", ["unfused", "chunked"])
@pytest.mark.parametrize(
    ("world_size", "case"),
    [(case.num_ranks, case) for case in CASES] + [pytest.param(8, case, marks=pytest.mark.nightly) for case in EIGHT],
    ids=str,
)
def test_values_and_gradients(rank: int, world_size: int, case: Case, algorithm: str) -> None:
    size = dist.get_world_size()
    plain_qkv, plain_out = plain_layers(case)
    x = torch.randn(BATCH, case.tokens, HIDDEN, generator=torch.Generator().manual_seed(2), requires_grad=True)
    weight = torch.randn(BATCH, case.tokens, HIDDEN, generator=torch.Generator().manual_seed(3))
    (q, k, v), want = run_plain(case, plain_qkv, plain_out, x)
    (want * weight).sum().backward()

    qkv = UlyssesQKV.from_linear(plain_qkv, case.heads, case.kv_heads)
    out = UlyssesOut.from_linear(plain_out, case.heads)
    assert qkv.state_dict().keys() == plain_qkv.state_dict().keys()
    mine = case.mine(x.detach()).clone().requires_grad_()
    parts = case.splits or [len(each) for each in torch.arange(case.tokens).chunk(size)]
    strict = 1 not in parts  # of one token: it does not show what K is, and the way out of attention is unfused
    with fusedcomm.force_algorithm(algorithm, strict=strict), Dispatched() as spy:
        found = qkv(mine, case.given)
        y = out(attention(*found), case.given)
        (y * case.mine(weight)).sum().backward()
    pushes = 1 if case.kv_heads == case.heads else 2
    assert spy.names("fusedcomm")[: pushes + 1] == ["matmul_all_to_all"] * pushes + ["all_to_all_matmul"]
    wants = [q.tensor_split(size, -2)[rank], heads_of(case, k, rank, size), heads_of(case, v, rank, size)]
    torch.testing.assert_close(list(found), wants, **CLOSE)
    torch.testing.assert_close(y, case.mine(want), **CLOSE)
    torch.testing.assert_close(mine.grad, case.mine(x.grad), **CLOSE)
    for layer, plain in ((qkv, plain_qkv), (out, plain_out)):
        sum_replicated_gradients(layer)
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, **CLOSE)


@on_ranks(3)
def test_gradients_of_repeated_heads_are_added_in_float32(rank: int) -> None:
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
    with fusedcomm.force_algorithm("chunked", strict=True):
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


def test_heads_are_balanced() -> None:
    for size in range(1, 9):
        for heads in range(1, 40):
            assert head_splits(heads, size) == [len(each) for each in torch.arange(heads).tensor_split(size)]


def test_every_head_finds_what_it_reads() -> None:
    """By all numbers of heads and ranks: the interval is what is read, and each head of q has its head of k and v."""
    for size in range(1, 9):
        for kv_heads in range(1, 9):
            for group in range(1, 9):
                check_reads(size, kv_heads, kv_heads * group)


def check_reads(size: int, kv_heads: int, heads: int) -> None:
    ranges = kv_ranges(heads, kv_heads, size)
    for rank, mine in enumerate(torch.arange(heads).tensor_split(size)):
        read = mine // (heads // kv_heads)
        start, length = ranges[rank]
        assert start + length <= kv_heads
        arrived = torch.arange(start, start + length)
        assert torch.equal(arrived, read.unique())
        counts = repeats(heads, kv_heads, size, rank)
        held = arrived if counts is None else arrived.repeat_interleave(torch.tensor(counts))
        as_read = held.repeat_interleave(len(mine) // len(held)) if len(held) else held  # by enable_gqa
        assert torch.equal(as_read, read)


@on_ranks(2)
def test_the_plain_case_is_as_before(rank: int) -> None:
    """Numbers that R divides say nothing of parts: their calls are those of a layer that knows only such."""
    for kv_heads, calls in ((4, 1), (2, 2)):
        with Dispatched() as spy:
            UlyssesQKV(HIDDEN, 4, HEAD_DIM, kv_heads)(torch.ones(BATCH, 3, HIDDEN))
        pushes = [args for name, args in spy.calls if name == "fusedcomm::matmul_all_to_all"]
        assert [args[6:11] for args in pushes] == [(None,) * 5] * calls


@on_ranks(2)
def test_lengths_must_be_told(rank: int) -> None:
    """Without ``tokens`` every rank means that all have as many as itself: the ranks notice that they differ."""
    with fresh_group() as group, pytest.raises((fusedcomm.PeerMismatchError, fusedcomm.PeerTimeoutError)):
        layer = UlyssesQKV(HIDDEN, 4, HEAD_DIM, group=group)
        with fusedcomm.force_algorithm("chunked", strict=True):
            layer(torch.ones(BATCH, 3 - rank, HIDDEN))
