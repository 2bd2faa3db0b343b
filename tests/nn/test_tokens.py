"""shard_tokens and unshard_tokens: torch.chunk's blocks, their way back, and the loss of the whole batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.nn import UlyssesOut, UlyssesQKV, shard_tokens, sum_replicated_gradients, unshard_tokens
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched

WORDS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, TOKENS = 11, 12, 6, 2, 2, 5
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Pair(NamedTuple):
    ids: Tensor
    positions: Tensor


def block(t: Tensor, dim: int, rank: int) -> Tensor:
    blocks = t.chunk(dist.get_world_size(), dim)
    return blocks[rank] if rank < len(blocks) else t.narrow(dim, 0, 0)


@on_ranks()
@pytest.mark.parametrize("world_size", [1, 3])
def test_blocks_are_those_of_chunk(rank: int, world_size: int) -> None:
    for tokens in range(10):
        x = torch.arange(2.0 * tokens * 3).view(2, tokens, 3)
        for dim in (1, -2):
            assert torch.equal(shard_tokens(x, dim), block(x, 1, rank))
            assert torch.equal(unshard_tokens(shard_tokens(x, dim), tokens, dim), x)
    x = torch.arange(15.0).view(1, 5, 3)  # not all backends take these dtypes, and memory knows of no lazy view
    for t in (x.short(), torch.complex(x, x).conj(), torch.complex(x, x).conj().imag, x.to(torch.float8_e5m2)):
        whole = unshard_tokens(shard_tokens(t), 5)
        assert whole.dtype == t.dtype and torch.equal(whole.to(torch.complex64), t.to(torch.complex64))
    sizes = [rank * 2 % 5 for rank in range(world_size)]
    whole = torch.arange(sum(sizes))
    assert torch.equal(unshard_tokens(whole.split(sizes)[rank], sizes, 0), whole)
    own = torch.ones(5, requires_grad=True)
    unshard_tokens(own, 5 * world_size, 0).mul_(2)
    assert (own == 1).all()


@on_ranks(3)
def test_trees(rank: int) -> None:
    ids, cu_seqlens = torch.arange(7), torch.tensor([0, 3, 4, 7])
    packed = {"ids": ids, "more": [ids.unsqueeze(1), "name"], "cu_seqlens": cu_seqlens, "max_seqlen": 3}
    dims = {"ids": 0, "more": 0, "cu_seqlens": None, "max_seqlen": None}
    mine = shard_tokens(packed, dims)
    assert mine["cu_seqlens"] is cu_seqlens and mine["max_seqlen"] == 3
    assert torch.equal(mine["ids"], block(ids, 0, rank)) and mine["more"][1] == "name"
    whole = unshard_tokens(mine, 7, dims)
    assert torch.equal(whole["ids"], ids) and torch.equal(whole["more"][0], ids.unsqueeze(1))
    assert whole["cu_seqlens"] is cu_seqlens

    pair = shard_tokens(Pair(ids.view(1, 7), ids.expand(2, 7)))
    assert isinstance(pair, Pair) and torch.equal(pair.positions, block(ids.expand(2, 7), 1, rank))
    with pytest.raises(ValueError, match="mismatch"):
        shard_tokens(packed, {"ids": 0})
    with pytest.raises(IndexError):
        shard_tokens(ids)
    with pytest.raises(ValueError, match=r"what tokens=12 gives rank \d, 4 tokens, got"):
        unshard_tokens(block(ids, 0, rank), 12, 0)


@on_ranks(4)
def test_groups(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tokens"))
    x = torch.arange(5.0).view(1, 5) + 10 * (rank // 2)
    mine = shard_tokens(x, group=mesh["tokens"])
    assert torch.equal(mine, x.chunk(2, 1)[rank % 2])
    assert torch.equal(unshard_tokens(mine, 5, group=(mesh, "tokens")), x)


@on_ranks(3)
def test_the_derivative_by_a_block_is_a_block_of_the_own_one(rank: int) -> None:
    """Nothing is communicated, and nothing added up: it holds for a loss that is the same on all ranks."""
    for compiled in (False, True):
        x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
        loss = (x.sin() * torch.arange(24.0).view(2, 4, 3)).sum()
        loss.backward()
        mine = shard_tokens(x.detach()).clone().requires_grad_()
        unshard = torch.compile(unshard_tokens, backend="aot_eager", fullgraph=True) if compiled else unshard_tokens
        whole = unshard(mine, 4).sin() * torch.arange(24.0).view(2, 4, 3)
        with Dispatched() as spy:
            whole.sum().backward()
        assert not spy.names("_c10d_functional")
        assert torch.equal(mine.grad, block(x.grad, 1, rank))
        own = torch.autograd.grad((unshard_tokens(mine, 4) * rank).sum(), mine)[0]
        assert (own == rank).all()


class Model(nn.Module):
    """Attention with grouped queries between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, WORDS)
        self.qkv: Any = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out: Any = nn.Linear(HEADS * HEAD_DIM, HIDDEN)

    def parallel(self) -> Model:
        self.qkv = UlyssesQKV.from_linear(self.qkv, HEADS, KV_HEADS)
        self.out = UlyssesOut.from_linear(self.out, HEADS)
        return self

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        parallel = isinstance(self.qkv, UlyssesQKV)
        if parallel:
            heads = self.qkv(x, TOKENS)
        else:
            heads = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], -2)
        q, k, v = (t.transpose(1, 2) for t in heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        return self.head(x + self.out(attended if parallel else attended.flatten(-2)))


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The sum over tokens that are not masked."""
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")


def plain_and_parallel() -> tuple[Model, Model, Tensor, Tensor]:
    torch.manual_seed(3)
    ids, labels = torch.randint(WORDS, (2, 2, TOKENS))
    labels[:, :3] = -100  # none of rank 0 counts, and on 4 ranks the last has no tokens
    models = []
    for _ in range(2):
        torch.manual_seed(4)
        models.append(Model())
    return models[0], models[1].parallel(), ids, labels


def gradients_are_right(model: nn.Module, plain: Model) -> bool:
    return all(
        torch.allclose(parameter.grad, plain.get_parameter(name).grad, **CLOSE)
        for name, parameter in model.named_parameters()
    )


@on_ranks()
@pytest.mark.parametrize("averaged", [False, True], ids=["summed", "averaged"])
@pytest.mark.parametrize("world_size", [3, 4])
def test_the_loss_of_the_whole_batch(rank: int, world_size: int, averaged: bool) -> None:
    """Uneven blocks with masked tokens: a rank's sum over the count of all ranks, times R where gradients are averaged.

    The control is the mean over a rank's own tokens, whose average over ranks is another loss.
    """
    plain, model, ids, labels = plain_and_parallel()
    count = (labels != -100).sum()
    want = loss_of(plain, ids, labels) / count
    want.backward()
    run: nn.Module = DistributedDataParallel(model) if averaged else model
    mine, my_labels = shard_tokens((ids, labels))
    my_count = (my_labels != -100).sum()
    factor = world_size if averaged else 1
    for divisor, right in ((count / factor, True), (my_count.clamp(min=1) * (1 if averaged else world_size), False)):
        run.zero_grad()
        loss = loss_of(run, mine, my_labels) / divisor
        loss.backward()
        if not averaged:
            others = [*model.embedding.parameters(), *model.head.parameters()]
            sum_replicated_gradients(model, also=others)
        total = loss.detach() / factor
        dist.all_reduce(total)
        if right:
            torch.testing.assert_close(total, want.detach(), **CLOSE)
        assert gradients_are_right(model, plain) == right


@on_ranks(3)
def test_a_loss_of_joined_results(rank: int) -> None:
    """Where every rank makes the loss of all tokens, it is divided by nothing, and gradients are still summed."""
    plain, model, ids, labels = plain_and_parallel()
    loss_of(plain, ids, labels).backward()
    logits = unshard_tokens(model(shard_tokens(ids)), TOKENS)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    sum_replicated_gradients(model, also=[*model.embedding.parameters(), *model.head.parameters()])
    assert gradients_are_right(model, plain)
