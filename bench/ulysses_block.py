"""An attention block under Ulysses sequence parallelism, forward and backward. What is measured: bench/block.py.

    qkv projection, exchange (tokens gathered, heads scattered), attention, exchange back, out projection

The baseline exchanges q, k and v in one all_to_all_single, as xDiT does for packed QKV; DeepSpeed-Ulysses takes three.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import fusedcomm
from fusedcomm.bench import baselines, block


@dataclass(frozen=True)
class UlyssesBlock(block.Block):
    batch: int = 2
    tokens: int = 1024  # each rank's
    hidden: int = 1024
    heads: int = 16

    name = "ulysses_block"
    goal = 0.90

    @property
    def qkv_shape(self) -> list[int]:
        return [3, self.heads, self.hidden // self.heads]

    def x_shape(self, num_ranks: int) -> tuple[int, ...]:
        return self.batch, self.tokens, self.hidden

    bound_x_shape = x_shape

    def weight_shapes(self, num_ranks: int) -> dict[str, tuple[int, ...]]:
        n = self.hidden
        return {"w_qkv": (3 * n, n), "b_qkv": (3 * n,), "w_out": (n, n), "b_out": (n,)}

    def baseline(self, x: Tensor, *weights: Tensor) -> Tensor:
        w_qkv, b_qkv, w_out, b_out = weights
        qkv = F.linear(x, w_qkv, b_qkv).unflatten(-1, self.qkv_shape)  # [B, S/R, 3, H, D]
        qkv = baselines.unpacked(baselines.all_to_all(baselines.packed(qkv, 3)), 1)  # [B, S, 3, H/R, D]
        out = attention(qkv)
        out = baselines.unpacked(baselines.all_to_all(baselines.packed(out, 1)), 2)  # [B, S/R, H, D]
        return F.linear(out.flatten(2), w_out, b_out)

    def ours(self, x: Tensor, *weights: Tensor) -> Tensor:
        w_qkv, b_qkv, w_out, b_out = weights
        qkv = fusedcomm.matmul_all_to_all(x, w_qkv.mT, 1, 3, bias=b_qkv, out_shape=self.qkv_shape)
        return fusedcomm.all_to_all_matmul(attention(qkv), w_out.mT, 2, 1, bias=b_out)

    def bound(self, meet: block.Meet, x: Tensor, *weights: Tensor) -> Tensor:
        """As many elements in the shapes after the exchanges, from views alone."""
        w_qkv, b_qkv, w_out, b_out = weights
        num_ranks = torch.distributed.get_world_size()
        three, heads, head_dim = self.qkv_shape
        shape = self.batch, self.tokens * num_ranks, three, heads // num_ranks, head_dim
        out = attention(meet(F.linear(x, w_qkv, b_qkv)).view(shape))
        return F.linear(meet(out).view(x.shape), w_out, b_out)

    def program(self, xs: Sequence[Tensor], weights: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        qkvs = [F.linear(x, w[0], w[1]).unflatten(-1, self.qkv_shape) for x, w in zip(xs, weights, strict=True)]
        out = attention(torch.cat(qkvs, 1)).flatten(2).chunk(len(xs), 1)
        return [F.linear(each, w[2], w[3]) for each, w in zip(out, weights, strict=True)]


def attention(qkv: Tensor) -> Tensor:
    """[B, S, 3, H, D] -> [B, S, H, D]."""
    q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def main(argv: Sequence[str] | None = None) -> int:
    return block.main(UlyssesBlock, argv)


if __name__ == "__main__":
    sys.exit(main())
