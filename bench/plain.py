"""A plain collective of torch.distributed at one size, beside a copy of as many bytes in local memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fusedcomm.bench import baselines
from fusedcomm.bench.measure import BUS, DTYPES, Options, captured, timed
from fusedcomm.bench.timing import Timing, check_values
from fusedcomm.launch import console, world
from fusedcomm.ops.exact_problem import difference

COPY = "copy"
COLLECTIVES = {  # by their names in torch.distributed
    "all_to_all_single": "all_to_all",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
}
BASELINES: dict[str, Callable[[Tensor], Tensor]] = {
    "all_to_all": baselines.all_to_all,
    "all_gather": baselines.all_gather,
    "reduce_scatter": baselines.reduce_scatter,
    "all_reduce": baselines.all_reduce,
}


@dataclass(frozen=True)
class CollectiveRow:
    """A collective at one size. Times are the slowest rank's, in seconds; bytes are counted as in nccl-tests."""

    op: str
    dtype: str
    group_size: int
    num_bytes: int
    copy: Timing
    time: Timing

    @property
    def over_copy(self) -> float:
        return self.time.median / self.copy.median

    @property
    def algbw(self) -> float:
        """The bytes over the time, in GB/s."""
        return self.num_bytes / self.time.median / 1e9

    @property
    def busbw(self) -> float:
        return self.algbw * BUS[COLLECTIVES[self.op]](self.group_size)


def block_numel(num_bytes: int, dtype: torch.dtype, num_ranks: int) -> int:
    """The elements of each rank's block, where all blocks together have at least ``num_bytes``."""
    return max(math.ceil(num_bytes / dtype.itemsize / num_ranks), 1)


def measure_collective(rank: int, op: str, num_bytes: int, dtype: str, options: Options) -> list[CollectiveRow]:
    device = world.rank_device(options.device_type)
    data = CollectiveData(COLLECTIVES[op], num_bytes, DTYPES[dtype], device)
    variants = {COPY: data.copy, op: data.collective}
    with console.progress(rank == 0, options.rounds + options.warmup, f"{op}: checking values", op) as on_round:
        check_values(variants, data.check)
        if options.graph:
            variants = {name: captured(variant) for name, variant in variants.items()}
            check_values(variants, data.check)
        if not options.check:
            data.local.normal_()
        times = timed(variants, device, options, on_round, data.check)
    return [CollectiveRow(op, dtype, data.num_ranks, data.num_bytes, times[COPY], times[op])]


class CollectiveData:
    """One rank's input: integers that tell ranks and places apart, so small that sums over ranks are exact."""

    def __init__(self, kind: str, num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.kind, self.dtype, self.device = kind, dtype, device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.block = block_numel(num_bytes, dtype, self.num_ranks)
        self.num_bytes = self.block * self.num_ranks * dtype.itemsize
        self.local = self._of(self.rank)
        self.source = self._integers(self.block * self.num_ranks, self.rank)
        self.moved = torch.empty_like(self.source)

    def copy(self) -> Tensor:
        return self.moved.copy_(self.source)

    def collective(self) -> Tensor:
        return BASELINES[self.kind](self.local).flatten()

    def check(self, name: str, result: Tensor) -> str | None:
        if name == COPY:
            return difference(result, self.source)
        wrong = difference(result, self._expected())
        if self.kind == "all_reduce":  # it is in place
            self.local.copy_(self._of(self.rank))
        return wrong

    def _expected(self) -> Tensor:
        """What this rank must get, made from the ranks' inputs, one after the other."""
        every = (self._of(rank) for rank in range(self.num_ranks))
        if self.kind == "all_gather":
            return torch.cat(list(every))
        if self.kind == "all_to_all":
            return torch.cat([t[self.rank].clone() for t in every])
        total = functools.reduce(torch.add, every)
        return total if self.kind == "all_reduce" else total[self.rank]

    def _of(self, rank: int) -> Tensor:
        """What a rank gives: [block], [R * block], or [R, block] where each rank gets a part."""
        if self.kind == "all_gather":
            return self._integers(self.block, rank)
        t = self._integers(self.block * self.num_ranks, rank)
        return t if self.kind == "all_reduce" else t.view(self.num_ranks, self.block)

    def _integers(self, numel: int, rank: int) -> Tensor:
        below = max(256 // self.num_ranks, 2)  # bfloat16 is exact up to 256
        places = torch.arange(numel, device=self.device, dtype=torch.int32)
        return places.mul_(7).add_(3 * rank).remainder_(below).to(self.dtype)
