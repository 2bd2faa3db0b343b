"""What all cases share: a matmul whose result is exchanged, unrelated matmuls, and values that say where they are from.

On each of R ranks y = x @ w, [dim, 16 dim]; block p of its columns goes to rank p, and the blocks that arrive are
stacked: [R * dim, 16 dim / R]. Such a wide y keeps the exchange from being nothing beside the matmul.

Every element is numbered: by src_rank, dst_rank and its place in that block. Its value is the number modulo some
m <= 255, exact in every dtype. One m cannot tell all elements apart; several that are coprime can, so the checks
before timing run once with each: an element that is not in its place is wrong in one of them at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedcomm.bench.baselines import packed

WIDE = 16
LARGEST = 255  # the largest modulus: a case may add 1, and bfloat16 is exact up to 256


@dataclass(frozen=True)
class SuiteSize:
    """``dim`` is that of y, as above; ``compute`` is how many unrelated matmuls there are, each like the one for y."""

    dim: int
    compute: int
    dtype: str

    @property
    def columns(self) -> int:
        """The columns of y, which the number of ranks must divide."""
        return WIDE * self.dim

    @property
    def numel(self) -> int:
        """The elements of y."""
        return self.dim * self.columns

    @property
    def flops(self) -> int:
        """The flops of the matmul that makes y."""
        return 2 * self.numel * 2 * self.dim


def moduli(count: int) -> list[int]:
    """Moduli that are pairwise coprime, so many that no two numbers below ``count`` are equal modulo all of them."""
    found: list[int] = []
    candidate = LARGEST
    while math.prod(found) < count:
        if all(math.gcd(candidate, each) == 1 for each in found):
            found.append(candidate)
        candidate -= 1
    return found


class SuiteData:
    """One rank's data. `encode` sets which values are exchanged; ``close`` ends the two extra groups."""

    def __init__(self, size: SuiteSize, device: torch.device) -> None:
        self.size, self.device = size, device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.dtype: torch.dtype = getattr(torch, size.dtype)
        generator = torch.Generator(device).manual_seed(self.rank)
        noise = torch.randint(-2, 3, (size.dim, size.dim), generator=generator, device=device)
        self.x = self._decoder(noise)
        self.unrelated_w = torch.randn(2 * size.dim, size.columns, generator=generator, device=device).to(self.dtype)
        self.zeros = torch.zeros(size.numel, dtype=self.dtype, device=device)
        self.groups = [dist.new_group(), dist.new_group()]

    def close(self) -> None:
        for group in self.groups:
            dist.destroy_process_group(group)

    @property
    def moduli(self) -> list[int]:
        return moduli(self.num_ranks * self.size.numel)

    def encode(self, modulus: int, salt: int) -> None:
        """Set new values. ``salt`` shifts all, so that what is left in memory from another salt is wrong everywhere."""
        ranks = range(self.num_ranks)
        sent = [self._block(self.rank, dst_rank, modulus, salt) for dst_rank in ranks]
        self.w = torch.cat(sent, -1).repeat_interleave(2, 0)
        self.sent = torch.cat(sent)
        self.expected = torch.cat([self._block(src_rank, self.rank, modulus, salt) for src_rank in ranks])
        self.first = self.sent[0, :8].tolist()
        self.addend = self._addend(self.rank, modulus, salt)
        self.total = sum((self._addend(rank, modulus, salt) for rank in ranks), torch.zeros_like(self.addend))

    def produce(self) -> Tensor:
        """The matmul, and the copy that puts each rank's block together: equal to ``sent``."""
        return packed(torch.matmul(self.x, self.w), -1).flatten(0, 1)

    def unrelated(self) -> None:
        for _ in range(self.size.compute):
            torch.mm(self.x, self.unrelated_w)

    def start(self, blocks: Tensor, group: Any = None) -> tuple[Tensor, Any]:
        """An all_to_all under way: what it receives, and its work."""
        received = torch.empty_like(blocks)
        return received, dist.all_to_all_single(received, blocks, group=group, async_op=True)

    def start_sum(self, total: Tensor, group: Any) -> Any:
        """An all_reduce of ``total`` under way, in place."""
        return dist.all_reduce(total, group=group, async_op=True)

    def _block(self, src_rank: int, dst_rank: int, modulus: int, salt: int) -> Tensor:
        """[dim, 16 dim / R]: what src_rank sends to dst_rank."""
        count = self.size.numel // self.num_ranks
        start = (src_rank * self.num_ranks + dst_rank) * count + salt
        numbers = torch.arange(start, start + count, device=self.device)
        return (numbers % modulus).view(self.size.dim, -1).to(self.dtype)

    def _addend(self, rank: int, modulus: int, salt: int) -> Tensor:
        """A tensor as large as y, of values so small that their sum over ranks is exact."""
        start = rank + salt
        numbers = torch.arange(start, start + self.size.numel, device=self.device)
        return (numbers % max(2, modulus // self.num_ranks)).to(self.dtype)

    def _decoder(self, noise: Tensor) -> Tensor:
        """[dim, 2 dim] with few zeros, for which ``decoder @ rows.repeat_interleave(2, 0)`` is exactly ``rows``.

        The noise cancels between neighbours, so no partial sum is ever large.
        """
        identity = torch.eye(self.size.dim, dtype=noise.dtype, device=self.device)
        return torch.stack([identity + noise, -noise], -1).flatten(1).to(self.dtype)
