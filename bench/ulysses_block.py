"""An attention block under Ulysses sequence parallelism, forward and backward: how much of its exchanges is saved.

    python -m fusedcomm.bench.ulysses_block [--huge-pages] [--rounds N] [--json FILE]      2 CPU ranks of one thread
    torchrun --nproc-per-node 8 -m fusedcomm.bench.ulysses_block                           GPUs, NCCL

    qkv projection, exchange (tokens gathered, heads scattered), attention, exchange back, out projection

baseline   the block as users write it. q, k and v take one all_to_all_single, as xDiT has it for packed QKV
fusedcomm  the same with fusedcomm's ops
bound      a barrier of all ranks in place of each exchange, forward and backward: the same matmuls on as many elements,
           not moved. A rank needs the slower ones' data, so no exchange can win back the time until
           these have come. The barriers, by bench/rank_barrier.py, are a signal and a wait for each peer

gain = (baseline - fusedcomm) / (baseline - bound): 1 where nothing of the exchanges is left but to wait for each other.
Each difference is the median over rounds of the differences within a round. Beside it stands the spread of the gain of
rounds drawn anew, the error of this run's gain. bench/common.py explains the pages.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import fusedcomm
from fusedcomm.bench import baselines, common
from fusedcomm.bench.common import DTYPE_COLUMN, Goal, at_least, draws, ms
from fusedcomm.bench.measure import DTYPES
from fusedcomm.bench.rank_barrier import met, rank_barrier
from fusedcomm.bench.timing import Timing, check_values, measure_rounds
from fusedcomm.launch import world
from fusedcomm.launch.console import Column

BASELINE, OURS, BOUND = "baseline", "ours", "bound"
GOAL = 0.90
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # share of the norm, and of the largest element
WEIGHTS = ("w_qkv", "b_qkv", "w_out", "b_out")  # as nn.Linear keeps them


@dataclass(frozen=True)
class BlockSizes:
    batch: int = 2
    tokens: int = 1024  # each rank's
    hidden: int = 1024
    heads: int = 16

    @property
    def qkv_shape(self) -> list[int]:
        return [3, self.heads, self.hidden // self.heads]


def baseline(sizes: BlockSizes, x: Tensor, w_qkv: Tensor, b_qkv: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
    qkv = F.linear(x, w_qkv, b_qkv).unflatten(-1, sizes.qkv_shape)  # [B, S/R, 3, H, D]
    qkv = baselines.unpacked(baselines.all_to_all(baselines.packed(qkv, 3)), 1)  # [B, S, 3, H/R, D]
    out = attention(qkv)
    out = baselines.unpacked(baselines.all_to_all(baselines.packed(out, 1)), 2)  # [B, S/R, H, D]
    return F.linear(out.flatten(2), w_out, b_out)


def ours(sizes: BlockSizes, x: Tensor, w_qkv: Tensor, b_qkv: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
    qkv = fusedcomm.matmul_all_to_all(x, w_qkv.mT, 1, 3, bias=b_qkv, out_shape=sizes.qkv_shape)
    return fusedcomm.all_to_all_matmul(attention(qkv), w_out.mT, 2, 1, bias=b_out)


def bound(meet: Callable[[Tensor], Tensor], sizes: BlockSizes, x: Tensor, *weights: Tensor) -> Tensor:
    """As many elements in the shapes after the exchanges, from views alone."""
    w_qkv, b_qkv, w_out, b_out = weights
    num_ranks, (three, heads, head_dim) = dist.get_world_size(), sizes.qkv_shape
    shape = sizes.batch, sizes.tokens * num_ranks, three, heads // num_ranks, head_dim
    out = attention(meet(F.linear(x, w_qkv, b_qkv)).view(shape))
    return F.linear(meet(out).view(x.shape), w_out, b_out)


def program(sizes: BlockSizes, xs: Sequence[Tensor], weights: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Every rank's result from every rank's inputs, in one process: the oracle."""
    qkvs = [F.linear(x, w[0], w[1]).unflatten(-1, sizes.qkv_shape) for x, w in zip(xs, weights, strict=True)]
    out = attention(torch.cat(qkvs, 1)).flatten(2).chunk(len(xs), 1)
    return [F.linear(each, w[2], w[3]) for each, w in zip(out, weights, strict=True)]


def attention(qkv: Tensor) -> Tensor:
    """[B, S, 3, H, D] -> [B, S, H, D]."""
    q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class BlockData:
    """One rank's inputs and its three ways through the block. Each rank has weights of its own."""

    def __init__(self, sizes: BlockSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.x, *self.weights = self._inputs(self.rank)
        self.grad = self._grad(self.rank)

    def variants(self) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
        meet = functools.partial(met, barrier=rank_barrier(self.device))
        return {
            BASELINE: self._step(baseline),
            OURS: self._step(ours),
            BOUND: self._step(functools.partial(bound, meet)),
        }

    def check(self, name: str, results: tuple[Tensor, ...]) -> str | None:
        names = ["result", "grad x", *(f"grad {name}" for name in WEIGHTS)]
        for what, result, expected in zip(names, results, self._oracle, strict=True):
            if result.shape != expected.shape:
                return f"{what}: shape {tuple(result.shape)}, must be {tuple(expected.shape)}"
            difference = result.float() - expected
            for norm in (2.0, torch.inf):
                error = (torch.linalg.vector_norm(difference, norm) / torch.linalg.vector_norm(expected, norm)).item()
                if not error <= TOLERANCE[self.dtype]:
                    return f"{what}: relative error {error:.1e} in norm {norm:g}"
        return None

    def _step(self, fn: Callable[..., Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        def call() -> tuple[Tensor, ...]:
            y = fn(self.sizes, self.x, *self.weights)
            return y, *torch.autograd.grad(y, (self.x, *self.weights), self.grad)

        return call

    @cached_property
    def _oracle(self) -> tuple[Tensor, ...]:
        """The results in float32, from all ranks' inputs: no communication must be trusted."""
        every = [[t.detach().float().requires_grad_() for t in self._inputs(rank)] for rank in range(self.num_ranks)]
        outs = program(self.sizes, [x for x, *_ in every], [weights for _, *weights in every])
        grads = [self._grad(rank).float() for rank in range(self.num_ranks)]
        return outs[self.rank].detach(), *torch.autograd.grad(outs, every[self.rank], grads)

    def _inputs(self, rank: int) -> list[Tensor]:
        """x and the weights, of any rank."""
        n, made = self.sizes.hidden, functools.partial(self._normal, rank)
        w_qkv, w_out = made(1, 3 * n, n) * n**-0.5, made(2, n, n) * n**-0.5
        biases = made(3, 3 * n) * 0.1, made(4, n) * 0.1
        x = made(0, self.sizes.batch, self.sizes.tokens, n)
        return [t.requires_grad_() for t in (x, w_qkv, biases[0], w_out, biases[1])]

    def _grad(self, rank: int) -> Tensor:
        return self._normal(rank, 5, self.sizes.batch, self.sizes.tokens, self.sizes.hidden)

    def _normal(self, rank: int, which: int, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(16 * rank + which)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class BlockRow:
    dtype: str
    baseline: Timing
    ours: Timing
    bound: Timing
    gain: float
    drawn_anew: tuple[float, float]  # P10 and P90


COLUMNS = (
    DTYPE_COLUMN,
    Column("baseline\nms", "the block of today, forward and backward", lambda row: ms(row.baseline.median)),
    Column("fusedcomm\nms", "the block with the fused ops", lambda row: ms(row.ours.median)),
    Column("bound\nms", "the block with barriers for exchanges: no values", lambda row: ms(row.bound.median)),
    Column("speed-up", "baseline / fusedcomm", lambda row: f"{row.baseline.median / row.ours.median:.3f}"),
    Column("gain", "(baseline - fusedcomm) / (baseline - bound), within rounds", lambda row: f"{row.gain:.2f}"),
    Column(
        "gain of rounds\ndrawn anew",
        "P10 .. P90 of gain: how well this run knows it",
        lambda row: "{:.2f} .. {:.2f}".format(*row.drawn_anew),
    ),
)


def measure_block(rank: int, sizes: BlockSizes, dtype: str, device_type: str, rounds: int) -> BlockRow:
    device = world.rank_device(device_type)
    data = BlockData(sizes, DTYPES[dtype], device)
    variants = data.variants()
    check_values({name: variants[name] for name in (BASELINE, OURS)}, data.check)
    data.__dict__.pop("_oracle", None)
    seconds = measure_rounds(variants, device, rounds=rounds, warmup=2)
    today, fused, least = (Timing.of(seconds[name]) for name in (BASELINE, OURS, BOUND))
    gained, exposed = seconds[BASELINE] - seconds[OURS], seconds[BASELINE] - seconds[BOUND]
    anew = draws(rounds)
    drawn = _median(gained[anew]) / _median(exposed[anew])
    low, high = drawn.quantile(drawn.new_tensor([0.1, 0.9])).tolist()
    return BlockRow(dtype, today, fused, least, (_median(gained) / _median(exposed)).item(), (low, high))


def _median(seconds: Tensor) -> Tensor:
    return seconds.quantile(0.5, dim=-1)


def goals(row: BlockRow) -> list[Goal]:
    return [at_least(f"gain, {row.dtype}", row.gain, GOAL)]


def main(argv: Sequence[str] | None = None) -> int:
    return common.run("ulysses_block", common.parse(argv, BlockSizes, rounds=41), measure_block, COLUMNS, goals)


if __name__ == "__main__":
    sys.exit(main())
