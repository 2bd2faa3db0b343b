"""DeepSpeed's Ulysses: its attention class in a block, and its route for models of Hugging Face."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import transformers_models
from tests.models.case import Case, of_this_rank, random
from tests.models.transformers_models import BATCH, TOKENS

HEADS, DIM = 4, 8


class Attention(nn.Module):
    """q, k and v are [batch, tokens, heads, head_dim]; DeepSpeed's class also takes the dim of the batch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HEADS * DIM, HEADS * DIM) for _ in range(4))
        self.q_norm, self.k_norm = (nn.RMSNorm(DIM) if normed else nn.Identity() for _ in range(2))
        self.attention: nn.Module = Attention()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (HEADS, DIM)) for each in (self.q, self.k, self.v))
        return self.out(self.attention(self.q_norm(q), self.k_norm(k), v, 0).flatten(-2))


def start() -> None:
    import deepspeed.comm

    with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):  # C++ that would be compiled for a minute
        deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def distributed_attention(blocks: Any) -> nn.Module:
    from deepspeed.sequence.layer import DistributedAttention

    start()
    for block in blocks:
        block.attention = DistributedAttention(block.attention, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return blocks


def hugging_face(model: nn.Module) -> nn.Module:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    start()
    UlyssesSPAttentionHF.register_with_transformers(
        model, "sdpa", dist.get_world_size(), BATCH, seq_length=TOKENS, seq_length_is_variable=False
    )
    return model


@contextmanager
def unchanged_attention() -> Iterator[None]:
    """DeepSpeed puts its own in the place of the attention of every model, and makes its groups only once."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping):
        yield
    parallel_state_sp._release_sequence_parallel_groups()


def _attention(normed: bool) -> Case:
    return Case(
        "deepspeed",
        lambda layers: nn.Sequential(*(Block(normed) for _ in range(layers))),
        distributed_attention,
        lambda: {"input": random(BATCH, TOKENS, HEADS * DIM).requires_grad_()},
        local=of_this_rank,
        summed=True,
    )


CASES = {
    "distributed-attention": _attention(normed=False),
    "distributed-attention-with-norms": _attention(normed=True),
    "hugging-face-llama": Case(
        "deepspeed",
        transformers_models.llama,
        hugging_face,
        lambda: transformers_models.inputs() | {"position_ids": torch.arange(TOKENS).expand(BATCH, TOKENS)},
        local=of_this_rank,
        summed=True,
        around=unchanged_attention,
    ),
}
