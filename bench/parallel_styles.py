"""Training steps of a Llama layer under tensor and sequence parallelism: torch's styles, and those of this package.

    python -m fusedcomm.bench.parallel_styles [--huge-pages] [--rounds N] [--json FILE]      2 CPU ranks of one thread
    torchrun --nproc-per-node 8 -m fusedcomm.bench.parallel_styles                           GPUs, NCCL

A step is the forward and the backward, eager; the two differ in the import of the styles alone.

removed   a plain layer of a rank's share of heads and features on all tokens: the same matmuls, and no exchange
torch     torch.distributed.tensor.parallel
fused     fusedcomm.parallel

A ratio is the median of the ratios within a round, with their P10 and P90. torch / removed is what exchanges and
DTensors cost today, so the most that there is to win. bench/common.py explains the pages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import fusedcomm.parallel as our_parallel
from fusedcomm.bench.common import (
    DTYPES,
    add_common_arguments,
    at_least,
    has_huge_pages,
    listed,
    ms,
    pages,
    refuse_wrong_pages,
    tabulated,
)
from fusedcomm.bench.start_program import Ratio
from fusedcomm.bench.timing import Timing, ValuesDiffer, check_values, measure_rounds
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError

REMOVED, TORCH, FUSED = "removed", "torch", "fused"
FASTER = {"mlp": 1.15, "layer": 1.1}  # torch / fused, at least
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # share of the norm
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Sizes:
    """x is [batch, tokens, hidden] on every rank; heads and intermediate are those of one rank.

    A rank has an eighth of Llama 3 8B, as on a node of 8 GPUs, with hidden size and features divided by 4.
    """

    batch: int = 2
    tokens: int = 512
    hidden: int = 1024
    heads: int = 2
    head_dim: int = 64
    intermediate: int = 448


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, shares: int) -> None:
        super().__init__()
        self.head_dim, inner = sizes.head_dim, sizes.heads * sizes.head_dim * shares
        self.wq, self.wk, self.wv = (nn.Linear(sizes.hidden, inner, bias=False) for _ in range(3))
        self.wo = nn.Linear(inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x)))
        y: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes, shares: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(sizes.hidden, sizes.intermediate * shares, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.intermediate * shares, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, shares: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention, self.feed_forward = Attention(sizes, shares), FeedForward(sizes, shares)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


MODELS: dict[str, Callable[[Sizes, int], nn.Module]] = {"mlp": FeedForward, "layer": Layer}


def styled(model: str, sizes: Sizes, styles: Any, device: torch.device, **options: Any) -> nn.Module:
    """The plan of PyTorch's tensor parallel examples. ``options`` are those of parallelize_module."""
    prepare = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    mlp = {
        "w1": styles.ColwiseParallel(),
        "w3": styles.ColwiseParallel(),
        "w2": styles.RowwiseParallel(output_layouts=Shard(1)),
    }
    module, mesh = (
        MODELS[model](sizes, dist.get_world_size()).to(device),
        init_device_mesh(device.type, (dist.get_world_size(),)),
    )
    if model == "mlp":
        styles.parallelize_module(module, mesh, styles.PrepareModuleInput(**prepare), **options)
        return styles.parallelize_module(module, mesh, mlp, **options)
    plan = {
        "attention_norm": styles.SequenceParallel(),
        "attention": styles.PrepareModuleInput(**prepare),
        **{f"attention.w{each}": styles.ColwiseParallel() for each in "qkv"},
        "attention.wo": styles.RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": styles.SequenceParallel(),
        "feed_forward": styles.PrepareModuleInput(**prepare),
        **{f"feed_forward.{name}": style for name, style in mlp.items()},
    }
    return styles.parallelize_module(module, mesh, plan, **options)


class StepData:
    """One rank's tokens, and the ways to train on them. All ranks have the same weights."""

    def __init__(self, model: str, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.sizes, self.dtype, self.device = model, sizes, dtype, device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        shape = (sizes.batch, sizes.tokens * self.num_ranks, sizes.hidden)
        generator = torch.Generator().manual_seed(0)
        self.whole_x, self.whole_grad = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
        self.x, self.grad = (
            each.chunk(self.num_ranks, 1)[self.rank].contiguous() for each in (self.whole_x, self.whole_grad)
        )

    def variants(self) -> dict[str, Callable[[], list[Tensor]]]:
        torch.manual_seed(0)
        removed = MODELS[self.model](self.sizes, 1).to(self.device, self.dtype)
        made = {REMOVED: self._step(removed, self.whole_x, self.whole_grad)}
        for name, styles in ((TORCH, torch_parallel), (FUSED, our_parallel)):
            torch.manual_seed(0)
            module = styled(self.model, self.sizes, styles, self.device).to(self.dtype)
            made[name] = self._step(module, self.x, self.grad)
        return made

    def check(self, name: str, results: list[Tensor]) -> str | None:
        """Against one process with all tokens in float32."""
        torch.manual_seed(0)
        plain = MODELS[self.model](self.sizes, self.num_ranks).to(self.device)
        y, grad_x, *grads = self._step(plain, self.whole_x.float(), self.whole_grad.float())()
        wants = [*(each.chunk(self.num_ranks, 1)[self.rank] for each in (y, grad_x)), *grads]
        names = ["result", "grad x", *(f"grad {name}" for name, _ in plain.named_parameters())]
        for what, result, want in zip(names, results, wants, strict=True):
            found = result.full_tensor() if isinstance(result, DTensor) else result
            error = float((found.float() - want).norm() / want.norm())
            if not error <= TOLERANCE[self.dtype]:
                return f"{what}: relative error {error:.1e}"
        return None

    @staticmethod
    def _step(module: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], list[Tensor]]:
        def call() -> list[Tensor]:
            given = x.detach().requires_grad_()
            y = module(given)
            y = y.to_local() if isinstance(y, DTensor) else y
            return [y.detach(), *torch.autograd.grad(y, [given, *module.parameters()], grad)]

        return call


@dataclass(frozen=True)
class StyleRow:
    model: str
    dtype: str
    times: dict[str, Timing]
    torch_over_fused: Ratio
    torch_over_removed: Ratio


TIMES = {
    REMOVED: "a plain layer of a rank's share on all tokens: no exchange",
    TORCH: "torch.distributed.tensor.parallel",
    FUSED: "fusedcomm.parallel",
}


def _time_column(name: str) -> Column:
    return Column(f"{name}\nms", TIMES[name], lambda row: ms(row.times[name].median, 1))


SPREAD = "median of the ratios within a round (P10 .. P90 of them)"
COLUMNS = (
    Column("model", "a gated MLP, or a whole layer", lambda row: row.model, left=True),
    Column("dtype", "the dtype of weights and tokens", lambda row: row.dtype, left=True),
    *map(_time_column, TIMES),
    Column("torch /\nfused", SPREAD, lambda row: str(row.torch_over_fused)),
    Column("torch /\nremoved", SPREAD, lambda row: str(row.torch_over_removed), drop=1),
)


def measure_model(rank: int, model: str, sizes: Sizes, dtype: str, device_type: str, rounds: int) -> StyleRow:
    device = world.rank_device(device_type)
    data = StepData(model, sizes, DTYPES[dtype], device)
    variants = data.variants()
    check_values({name: variants[name] for name in (TORCH, FUSED)}, data.check)
    seconds = measure_rounds(variants, device, rounds=rounds, warmup=2)
    return StyleRow(
        model,
        dtype,
        {name: Timing.of(each) for name, each in seconds.items()},
        Ratio.of(seconds[TORCH], seconds[FUSED]),
        Ratio.of(seconds[TORCH], seconds[REMOVED]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return _main(args)
    except (ValuesDiffer, RankError) as error:
        print(f"parallel_styles: {error}", file=sys.stderr)
        return 1


def _main(args: argparse.Namespace) -> int:
    device_type = world.default_device_type()
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    env = world.HUGE_PAGES if args.huge_pages else None
    rows: list[StyleRow] = []
    with world.ranks(device_type, world.default_world_size(device_type), TIMEOUT_S, env) as call:
        huge_pages = call(has_huge_pages)
        if world.is_rank_0():
            print(sizes, *([pages(huge_pages)] if device_type == "cpu" else []), sep="\n", flush=True)
        cases = [(model, dtype) for model in args.model for dtype in args.dtype]
        with tabulated(COLUMNS, rows, len(cases)) as add:
            for model, dtype in cases:
                row = call(measure_model, model, sizes, dtype, device_type, args.rounds)
                if row is not None:
                    add(row)
    if not rows:  # torchrun's other ranks
        return 0
    goals = [at_least(f"torch/fused, {r.model}, {r.dtype}", r.torch_over_fused.median, FASTER[r.model]) for r in rows]
    print(*goals, sep="\n")
    if args.json:
        facts = {"program": "parallel_styles", "sizes": asdict(sizes), "rounds": args.rounds, "huge_pages": huge_pages}
        console.write_json(args.json, run_facts() | facts | listed(rows=rows, goals=goals))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fusedcomm.bench.parallel_styles", description="Values are checked before anything is timed."
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    add_common_arguments(parser, rounds=41)
    args = parser.parse_args(argv)
    refuse_wrong_pages(parser, args)
    return args


if __name__ == "__main__":
    sys.exit(main())
