"""Scheduled graphs on real ranks: the values of the graphs as they were, bit by bit, in one order on every rank."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm.compile.overlap.estimator import Estimator
from fusedcomm.compile.overlap.scheduler import schedule
from fusedcomm.launch.ranks import RankPool
from tests.helpers.order_checks import is_start
from tests.helpers.random_graphs import Peers, build, inputs

Ranks = Callable[[int], RankPool]
functional = torch.ops._c10d_functional


class GatherIntoOut(TorchDispatchMode):
    """gloo of torch 2.13 corrupts the heap where several functional all_gathers are in flight, as in most graphs here
    (docs/troubleshooting.md). The variant with ``out`` sends and gives the same, by another path in gloo.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.all_gather_into_tensor.default:
            return self._gather(*args)
        if func is functional.all_gather_into_tensor_coalesced.default:
            xs, *group = args
            return [self._gather(x, *group) for x in xs]
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _gather(x: Tensor, group_size: int, group_name: str) -> Tensor:
        out = x.new_empty(group_size * x.shape[0], *x.shape[1:])
        return functional.all_gather_into_tensor_out(x, group_size, group_name, out=out)


@contextlib.contextmanager
def several_groups() -> Iterator[list[Peers]]:
    """A group of all ranks, a second one of all ranks, and pairs of neighbours."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    made = [dist.new_group(), *(dist.new_group([i, i + 1]) for i in range(0, world_size, 2))]
    try:
        own = [dist.group.WORLD, made[0], made[1 + rank // 2]]
        yield [Peers(group.group_name, group.size(), group.rank()) for group in own]
    finally:
        dist.barrier()  # gloo on another rank may still be sending what this one has received
        for group in [made[0], made[1 + rank // 2]]:
            dist.destroy_process_group(group)


def told(rng: random.Random, gm: GraphModule) -> Estimator:
    names = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    slow = {node.name for node in gm.graph.nodes if is_start(node)}
    return Estimator("cpu", times={name: rng.random() * (5 if name in slow else 1) for name in names})


def values(gm: GraphModule, args: list[Tensor]) -> list[Tensor]:
    """The results, and the inputs afterwards."""
    own = [tensor.clone() for tensor in args]
    torch.manual_seed(dist.get_rank())
    with GatherIntoOut():
        results = gm(*own)
    return [*(leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)), *own]


def scheduled(rank: int, seeds: list[int], steps: int) -> tuple[int, int, int]:
    """How many graphs got another order, buckets, or ops of fusedcomm."""
    moved = merged = fused = 0
    with several_groups() as groups:
        for seed in seeds:
            rng = random.Random(seed)
            gm = build(rng, groups, rng.randint(3, steps))
            args, names = inputs(gm, 1000 * seed + rank), [node.name for node in gm.graph.nodes]
            want = values(gm, args)
            estimator = (
                told(rng, gm) if rng.random() < 0.5 else Estimator("cpu")
            )  # what is told is not fused nor merged
            report = schedule(gm, estimator=estimator, memory_budget_bytes=rng.choice([None, 0, 1 << 40]))
            moved += [node.name for node in gm.graph.nodes] != names
            merged += len(report.buckets)
            fused += len(report.fused)
            for got, expected in zip(values(gm, args), want, strict=True):
                assert got.dtype == expected.dtype and torch.equal(got, expected), f"{seed=}"
    return moved, merged, fused


@pytest.mark.parametrize(("world_size", "num_graphs"), [(2, 25), pytest.param(4, 8, marks=pytest.mark.thorough)])
def test_values_stay(ranks: Ranks, world_size: int, num_graphs: int) -> None:
    counts = ranks(world_size).run(scheduled, list(range(num_graphs)), 15)
    assert len(set(counts)) == 1
    moved, merged, fused = counts[0]
    assert moved > num_graphs // 2 and merged > 0 and fused > 0  # not in vain


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_values_stay_for_long(ranks: Ranks) -> None:
    pool = ranks(2)
    for first in range(1000, 2000, 100):  # within the pool's time-out
        pool.run(scheduled, list(range(first, first + 100)), 50)
