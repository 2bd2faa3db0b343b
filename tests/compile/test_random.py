"""Random programs through the passes: whatever they make of a graph, its values stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from fusedcomm.compile.passes import FusedcommPass, Settings
from fusedcomm.compile.reports import CompileReport
from tests.helpers.graphs import aten_graph
from tests.helpers.program_parts import all_gather, reduce_scatter, world

KINDS = ["push", "exchange", "gather", "reduce_scatter", "all_reduce"]


def rearranged(rng: random.Random, t: Tensor, steps: int, keep_last: bool = False) -> Tensor:
    """The tensor after a few views and permutes, with copies or without; with ``keep_last`` not of the last dim."""
    for _ in range(steps):
        ndim = t.ndim - keep_last
        step = rng.choice(["permute", "flatten", "unflatten", "contiguous"])
        if step == "permute" and ndim > 1:
            dims = rng.sample(range(ndim), ndim)
            t = t.permute(*dims, *range(ndim, t.ndim))
        elif step == "flatten" and ndim > 1:
            dim = rng.randrange(ndim - 1)
            t = t.flatten(dim, dim + 1)
        elif step == "unflatten" and ndim > 0:
            dim = rng.randrange(ndim)
            divisors = [d for d in range(2, t.shape[dim]) if t.shape[dim] % d == 0]
            if divisors and t.ndim < 6:
                t = t.unflatten(dim, (rng.choice(divisors), -1))
        elif step == "contiguous":
            t = t.contiguous()
    return t


def blocks_first(rng: random.Random, t: Tensor, r: int) -> Tensor:
    """The tensor cut along any dim that r divides, with the blocks first."""
    dim = rng.choice([d for d in range(t.ndim) if t.shape[d] % r == 0])
    t = t.unflatten(dim, (r, -1)).movedim(dim, 0)
    return t.flatten(0, 1) if rng.random() < 0.5 else t


def exchange(t: Tensor) -> Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single(t.contiguous(), None, None, world()))


def matmul(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return x @ w if bias is None else torch.addmm(bias, x, w) if x.ndim == 2 else x @ w + bias


def random_program(seed: int, kind: str, r: int) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    rng = random.Random(seed)
    rows = [rng.choice([1, 2, 3, 4, r, 2 * r]) for _ in range(rng.randint(1, 3))] + [r * rng.choice([1, 2])]
    rng.shuffle(rows)
    k, n = r * rng.choice([2, 4, 6]), r * rng.choice([2, 4, 6])
    with_bias, steps, again = rng.random() < 0.4, rng.randint(0, 4), rng.random() < 0.3

    def program(x: Tensor, w: Tensor, bias: Tensor) -> Any:
        draw = random.Random(seed + 1)
        add = bias if with_bias else None
        if kind in ("push", "reduce_scatter", "all_reduce"):
            y = matmul(x, w, add)
            y = rearranged(draw, y, steps)
            if kind == "all_reduce":
                return rearranged(draw, funcol.all_reduce(y, "sum", world()), 2)
            y = blocks_first(draw, y, r)
            if kind == "reduce_scatter":
                y = y if y.ndim and y.shape[0] != r else y.flatten(0, 1)
                return rearranged(draw, reduce_scatter(y.contiguous(), "sum", 0, world()), 2)
            return rearranged(draw, exchange(y), steps)
        x = rearranged(draw, x, 1, keep_last=True)
        arrived = exchange(blocks_first(draw, x, r)) if kind == "exchange" else all_gather(x.contiguous(), 0, world())
        if draw.random() < 0.7:
            arrived = arrived.unflatten(0, (r, -1)).movedim(0, draw.randrange(arrived.ndim))
        arrived = rearranged(draw, arrived, steps, keep_last=draw.random() < 0.8)
        while arrived.numel() // arrived.shape[-1] * k and arrived.shape[-1] != k and arrived.ndim > 1:
            arrived = arrived.flatten(-2, -1)
        if arrived.shape[-1] != k:
            return arrived
        y = matmul(arrived.flatten(0, -2) if arrived.ndim > 1 else arrived.unsqueeze(0), w, add)
        return (y, arrived + 1) if again else y

    return program, [(*rows, k), (k, n), (n,)]


def fused(rank: int, kind: str, seeds: list[int]) -> int:
    """How many of the programs got an op of fusedcomm. Small integers make sums exact."""
    r, report = dist.get_world_size(), CompileReport()
    for seed in seeds:
        program, shapes = random_program(seed, kind, r)
        generator = torch.Generator().manual_seed(100 * seed + rank)
        args = [torch.randint(-2, 3, shape, generator=generator).float() for shape in shapes]
        want = program(*args)
        gm = aten_graph(program, args)
        FusedcommPass(Settings(), report)(gm.graph)
        gm.graph.lint()
        gm.recompile()
        torch.testing.assert_close(gm(*args), want, rtol=0, atol=0, msg=lambda text, seed=seed: f"seed {seed}: {text}")
    assert [line.reason for line in report.collectives if "Error" in line.reason] == []
    return sum(line.status == "fused" for line in report.collectives)


@pytest.mark.parametrize("kind", KINDS)
def test_values_stay(ranks: Any, kind: str) -> None:
    counts = ranks(2).run(fused, kind, list(range(20)))
    assert len(set(counts)) == 1 and counts[0] >= 5  # not in vain


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_values_stay_for_long(ranks: Any, kind: str, world_size: int) -> None:
    for first in range(1000, 1500, 100):  # within the pool's time-out
        ranks(world_size).run(fused, kind, list(range(first, first + 100)))
