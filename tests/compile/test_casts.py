"""Random programs through the passes, with casts, or views, between a matmul and its collective: values stay."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from fusedcomm.compile.graph.views import is_one_cast
from tests.helpers.graphs import rewritten
from tests.helpers.on_ranks import on_ranks
from tests.helpers.program_parts import all_gather, reduce_scatter, world
from tests.helpers.tiers import nightly_but

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
EIGHTHS = (torch.float8_e4m3fn, torch.float8_e5m2)
INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
DTYPES = (*FLOATS, torch.float64, *EIGHTHS, *INTS)
KINDS = ("all_to_all_matmul", "all_gather_matmul", "matmul_all_to_all", "matmul_reduce_scatter", "matmul_all_reduce")


def values_of(dtype: torch.dtype) -> Tensor:
    """Every value of a small dtype, and edges and random ones of a large one."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15).short().view(dtype)
    generator = torch.Generator().manual_seed(1)
    if dtype.is_floating_point:
        return torch.randn(999, generator=generator, dtype=dtype) * 10.0 ** torch.arange(-30, 30)[:, None].to(dtype)
    edges = [f * (1 << n) + d for n in (7, 8, 11, 15, 16, 24, 30) for f in (-1, 1) for d in (-1, 0, 1)]
    return torch.tensor([*edges, torch.iinfo(dtype).min, torch.iinfo(dtype).max], dtype=dtype)


def test_one_cast_gives_what_the_chain_gives() -> None:
    passed = 0
    for first, between, last in itertools.product(DTYPES, repeat=3):
        if is_one_cast((first, between, last)):
            x, passed = values_of(first), passed + 1
            torch.testing.assert_close(x.to(between).to(last), x.to(last), rtol=0, atol=0, equal_nan=True)
    assert passed > 300  # of 1728
    assert not is_one_cast((torch.bfloat16, torch.float16, torch.bfloat16))
    assert is_one_cast((torch.float16, torch.float32, torch.float32, torch.bfloat16)) and is_one_cast((torch.int8,))


def cast(rng: random.Random, t: Tensor, ends: Sequence[torch.dtype]) -> Tensor:
    """``t`` after some casts, roundings, clamps, and views as integers, in a dtype of ``ends``."""
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        t = t.to(rng.choice(DTYPES))
        if t.dtype.is_floating_point and t.dtype.itemsize > 1 and rng.random() < 0.3:
            integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize]
            t = rng.choice([t.round(), t.clamp(-1, 1), (t.view(integer) & -16).view(t.dtype)])
    return t if t.dtype in ends and rng.random() < 0.3 else t.to(rng.choice(ends))


def program_of(kind: str, seed: int, r: int) -> Callable[[Tensor, Tensor], Any]:
    def program(x: Tensor, w: Tensor) -> Any:
        rng = random.Random(seed)
        dtype = rng.choice(FLOATS)
        if kind in KINDS[:2]:
            x = x.to(rng.choice(DTYPES)).to(rng.choice([torch.int8, torch.int64, torch.float64, *FLOATS]))
            blocks = x.unflatten(1, (r, -1)).movedim(1, 0).contiguous()
            arrived = all_gather(x, 0, world())
            if kind == KINDS[0]:
                arrived = funcol.wait_tensor(funcol.all_to_all_single(blocks, None, None, world())).flatten(0, 1)
            rows = cast(rng, arrived, [dtype]).flatten(1)
            y = rows @ w[: rows.shape[1]].to(dtype)
            return (y, cast(rng, arrived, DTYPES)) if rng.random() < 0.4 else y
        x = x.flatten(1).to(dtype)
        y = cast(rng, x @ w[: x.shape[1]].to(dtype), FLOATS)
        if kind == "matmul_all_reduce":
            return cast(rng, funcol.all_reduce(y, "sum", world()), FLOATS)
        if kind == "matmul_reduce_scatter":
            return cast(rng, reduce_scatter(y.contiguous(), "sum", 0, world()), FLOATS)
        blocks = y.unflatten(1, (r, -1)).movedim(1, 0).contiguous()
        return cast(rng, funcol.wait_tensor(funcol.all_to_all_single(blocks, None, None, world())), FLOATS)

    return program


@on_ranks(2)
@pytest.mark.parametrize("seeds", nightly_but([range(6)], [range(6), range(6, 60)]))
@pytest.mark.parametrize("kind", KINDS)
def test_random_casts_keep_values(rank: int, kind: str, seeds: range) -> None:
    r, lines = dist.get_world_size(), []
    for seed in seeds:
        program, generator = program_of(kind, seed, r), torch.Generator().manual_seed(100 * seed + rank)
        shapes = (2 * r, 2 * r, 4), (8 * r, 4 * r)
        args = [torch.randint(-40, 40, shape, generator=generator) / 16 for shape in shapes]  # sums are exact
        want = program(*args)
        gm, report = rewritten(program, args)
        lines += report.collectives
        got, wants = ([*each] if isinstance(each, (tuple, list)) else [each] for each in (gm(*args), want))
        for a, b in zip(got, wants, strict=True):
            near = {"rtol": 1e-2, "atol": 0.2} if b.dtype in FLOATS[1:] else {"rtol": 1e-5, "atol": 1e-3}
            assert a.dtype == b.dtype
            text = f"{kind}, seed {seed}: {lines[-1]}"
            torch.testing.assert_close(a.double(), b.double(), equal_nan=True, msg=lambda m, t=text: t + m, **near)
    assert any(line.status == "fused" for line in lines) or len(seeds) < 50


VIEWED = ["push", "exchange", "gather", "reduce_scatter", "all_reduce"]


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
    r, lines = dist.get_world_size(), []
    for seed in seeds:
        program, shapes = random_program(seed, kind, r)
        generator = torch.Generator().manual_seed(100 * seed + rank)
        args = [torch.randint(-2, 3, shape, generator=generator).float() for shape in shapes]
        want = program(*args)
        gm, report = rewritten(program, args)
        lines += report.collectives
        torch.testing.assert_close(gm(*args), want, rtol=0, atol=0, msg=lambda text, seed=seed: f"seed {seed}: {text}")
    assert [line.reason for line in lines if "Error" in line.reason] == []
    return sum(line.status == "fused" for line in lines)


@pytest.mark.parametrize("kind", VIEWED)
def test_values_stay(ranks: Any, kind: str) -> None:
    counts = ranks(2).run(fused, kind, list(range(20)))
    assert len(set(counts)) == 1 and counts[0] >= 5  # not in vain


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", VIEWED)
def test_values_stay_for_long(ranks: Any, kind: str, world_size: int) -> None:
    ranks(world_size).run(fused, kind, list(range(1000, 1100)))
