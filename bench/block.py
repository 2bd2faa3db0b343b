"""The benches of whole blocks, forward and backward: how much of the time for exchanges is saved.

    python -m fusedcomm.bench.<block> [--huge-pages] [--rounds N] [--json FILE]      2 CPU ranks of one thread
    torchrun --nproc-per-node 8 -m fusedcomm.bench.<block>                           GPUs, NCCL

baseline   the block as users write it, with plain collectives
fusedcomm  the same with fusedcomm's ops
bound      the block with a barrier of all ranks in place of each exchange, forward and backward: the same matmuls on as
           many elements, which nothing has moved

A rank needs what the slower ones send, so no exchange can win back the time until these have come. Without barriers the
bound would leave that wait out. They are those of bench/rank_barrier.py, a signal and a wait for each peer.

gain = (baseline - fusedcomm) / (baseline - bound): 1 where nothing of the exchanges is left but to wait for each other.
Each difference is the median over rounds of the differences within a round. Two spreads stand beside it: that of the
gain of rounds drawn anew, which says how well this run knows the gain, and that of the gains of single rounds.
bench/common.py explains the pages.
"""

from __future__ import annotations

import abc
import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from fusedcomm.bench.common import (
    DTYPES,
    add_common_arguments,
    at_least,
    draws,
    has_huge_pages,
    listed,
    ms,
    pages,
    refuse_wrong_pages,
    tabulated,
)
from fusedcomm.bench.rank_barrier import met, rank_barrier
from fusedcomm.bench.timing import Timing, ValuesDiffer, check_values, measure_rounds
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError

BASELINE, OURS, BOUND = "baseline", "ours", "bound"
Meet = Callable[[Tensor], Tensor]  # the tensor itself, when all ranks have come
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # share of the norm, and of the largest element
TIMEOUT_S = 3600


@dataclass(frozen=True)
class Block(abc.ABC):
    """One block; its fields are its sizes, and options of the command. Weights are as nn.Linear keeps them."""

    @property
    @abc.abstractmethod
    def name(self) -> str: ...

    @property
    @abc.abstractmethod
    def goal(self) -> float | None:
        """What the gain must reach, or None."""

    @abc.abstractmethod
    def x_shape(self, num_ranks: int) -> tuple[int, ...]: ...

    @abc.abstractmethod
    def bound_x_shape(self, num_ranks: int) -> tuple[int, ...]: ...

    @abc.abstractmethod
    def weight_shapes(self, num_ranks: int) -> dict[str, tuple[int, ...]]: ...

    @abc.abstractmethod
    def baseline(self, x: Tensor, *weights: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def ours(self, x: Tensor, *weights: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def bound(self, meet: Meet, x: Tensor, *weights: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def program(self, xs: Sequence[Tensor], weights: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Every rank's result from every rank's inputs, in one process: the oracle."""


class BlockData:
    """One rank's inputs and its three ways through the block. Each rank has weights of its own."""

    def __init__(self, block: Block, dtype: torch.dtype, device: torch.device) -> None:
        self.block, self.dtype, self.device = block, dtype, device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.grads: dict[tuple[int, torch.Size], Tensor] = {}
        self.x, *self.weights = self._inputs(self.rank)
        self.bound_x = self._normal(block.bound_x_shape(self.num_ranks), self.rank, 1).requires_grad_()

    def variants(self) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
        meet = functools.partial(met, barrier=rank_barrier(self.device))
        return {
            BASELINE: self._step(self.block.baseline, self.x),
            OURS: self._step(self.block.ours, self.x),
            BOUND: self._step(functools.partial(self.block.bound, meet), self.bound_x),
        }

    def check(self, name: str, results: tuple[Tensor, ...]) -> str | None:
        names = ["result", "grad x", *(f"grad {name}" for name in self.block.weight_shapes(self.num_ranks))]
        for what, result, expected in zip(names, results, self._oracle, strict=True):
            difference = result.float() - expected
            if result.shape != expected.shape:
                return f"{what}: shape {tuple(result.shape)}, must be {tuple(expected.shape)}"
            for norm in (2.0, torch.inf):
                error = (torch.linalg.vector_norm(difference, norm) / torch.linalg.vector_norm(expected, norm)).item()
                if not error <= TOLERANCE[self.dtype]:
                    return f"{what}: relative error {error:.1e} in norm {norm:g}"
        return None

    def _step(self, fn: Callable[..., Tensor], x: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        def call() -> tuple[Tensor, ...]:
            y = fn(x, *self.weights)
            return y, *torch.autograd.grad(y, (x, *self.weights), self._grad(y.shape, self.rank))

        return call

    @cached_property
    def _oracle(self) -> tuple[Tensor, ...]:
        """The results in float32, computed here from all ranks' inputs, so that no communication must be trusted."""
        every = [[t.detach().float().requires_grad_() for t in self._inputs(rank)] for rank in range(self.num_ranks)]
        outs = self.block.program([x for x, *_ in every], [weights for _, *weights in every])
        grads = [self._grad(out.shape, rank).float() for rank, out in enumerate(outs)]
        return outs[self.rank].detach(), *torch.autograd.grad(outs, every[self.rank], grads)

    def _inputs(self, rank: int) -> list[Tensor]:
        """x and the weights, of any rank."""
        tensors = [self._normal(self.block.x_shape(self.num_ranks), rank, 0)]
        for i, shape in enumerate(self.block.weight_shapes(self.num_ranks).values()):
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
            tensors.append(self._normal(shape, rank, 3 + i) * scale)
        return [t.requires_grad_() for t in tensors]

    def _grad(self, shape: torch.Size, rank: int) -> Tensor:
        key = (rank, shape)
        if key not in self.grads:
            self.grads[key] = self._normal(shape, rank, 2)
        return self.grads[key]

    def _normal(self, shape: Sequence[int], rank: int, which: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(16 * rank + which)
        return torch.randn(tuple(shape), generator=generator, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class BlockRow:
    dtype: str
    baseline: Timing
    ours: Timing
    bound: Timing
    gain: float
    # P10 and P90 of the gain
    drawn_anew: tuple[float, float]
    single_rounds: tuple[float, float]


SPREAD = "P10 .. P90 of gain"
COLUMNS = (
    Column("dtype", "the dtype of all tensors", lambda row: row.dtype, left=True),
    Column("baseline\nms", "the block of today, forward and backward", lambda row: ms(row.baseline.median, 1)),
    Column("fusedcomm\nms", "the block with the fused ops", lambda row: ms(row.ours.median, 1)),
    Column("bound\nms", "the block with barriers for exchanges: no values", lambda row: ms(row.bound.median, 1)),
    Column("speed-up", "baseline / fusedcomm", lambda row: f"{row.baseline.median / row.ours.median:.3f}"),
    Column("gain", "(baseline - fusedcomm) / (baseline - bound), within rounds", lambda row: f"{row.gain:.2f}"),
    Column("gain of rounds\ndrawn anew", f"{SPREAD}: how well this run knows it", lambda row: _range(row.drawn_anew)),
    Column("gain of\nsingle rounds", f"{SPREAD} of each round", lambda row: _range(row.single_rounds), drop=1),
)


def _range(spread: tuple[float, float]) -> str:
    return f"{spread[0]:.2f} .. {spread[1]:.2f}"


def measure_block(rank: int, block: Block, dtype: str, device_type: str, rounds: int) -> BlockRow:
    device = world.rank_device(device_type)
    data = BlockData(block, DTYPES[dtype], device)
    variants = data.variants()
    check_values({name: variants[name] for name in (BASELINE, OURS)}, data.check)
    data.__dict__.pop("_oracle", None)
    seconds = measure_rounds(variants, device, rounds=rounds, warmup=2)
    baseline, ours, bound = (Timing.of(seconds[name]) for name in (BASELINE, OURS, BOUND))
    gained, exposed = seconds[BASELINE] - seconds[OURS], seconds[BASELINE] - seconds[BOUND]
    anew = draws(rounds)
    drawn = _median(gained[anew]) / _median(exposed[anew])
    gain = (_median(gained) / _median(exposed)).item()
    return BlockRow(dtype, baseline, ours, bound, gain, _spread(drawn), _spread(gained / exposed))


def _median(seconds: Tensor) -> Tensor:
    return seconds.quantile(0.5, dim=-1)


def _spread(gains: Tensor) -> tuple[float, float]:
    low, high = gains.quantile(gains.new_tensor([0.1, 0.9])).tolist()
    return low, high


def main(block_type: type[Block], argv: Sequence[str] | None = None) -> int:
    args = parse(block_type, argv)
    block = block_type(**{field.name: getattr(args, field.name) for field in dataclasses.fields(block_type)})
    try:
        return _main(block, args)
    except (ValuesDiffer, RankError) as error:
        print(f"{block.name}: {error}", file=sys.stderr)
        return 1


def _main(block: Block, args: argparse.Namespace) -> int:
    device_type = world.default_device_type()
    env = world.HUGE_PAGES if args.huge_pages else None
    rows: list[BlockRow] = []
    with world.ranks(device_type, world.default_world_size(device_type), TIMEOUT_S, env) as call:
        huge_pages = call(has_huge_pages)
        if world.is_rank_0():
            print(block, *([pages(huge_pages)] if device_type == "cpu" else []), sep="\n", flush=True)
        with tabulated(COLUMNS, rows, len(args.dtype)) as add:
            for dtype in args.dtype:
                row = call(measure_block, block, dtype, device_type, args.rounds)
                if row is not None:
                    add(row)
    if not rows:  # torchrun's other ranks
        return 0
    goals = [at_least(f"gain, {row.dtype}", row.gain, block.goal) for row in rows]
    print(*goals, sep="\n")
    if args.json:
        facts = {"block": block.name, "sizes": asdict(block), "rounds": args.rounds, "huge_pages": huge_pages}
        console.write_json(args.json, run_facts() | facts | listed(rows=rows, goals=goals))
    return 0


def parse(block_type: type[Block], argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Values are checked before anything is timed.")
    for field in dataclasses.fields(block_type):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    add_common_arguments(parser, rounds=41)
    args = parser.parse_args(argv)
    refuse_wrong_pages(parser, args)
    return args
