"""Lengths and heads that the ranks do not divide: the ops beside what users do today, which is to pad, call and slice.

    python -m fusedcomm.bench.uneven [--tokens N] [--heads N] [--kv-heads N] [--ranks N] [--splits N ...] [--backward]
                                [--rounds N] [--json FILE]                                             2 CPU ranks
    torchrun --nproc-per-node 8 -m fusedcomm.bench.uneven                                                   GPUs, NCCL

q     the projection of q, tokens gathered and balanced heads scattered: matmul_all_to_all
kv    that of k and v, of whose heads each rank gets those that its heads of q read
out   the projection behind attention, heads gathered and tokens scattered: all_to_all_matmul

uneven  the op with the sizes as they are
padded  tokens and heads padded to the next number that the ranks divide, the same op, and a slice
plain   so, with torch's matmul and all_to_all_single in place of the op
even    the op with the sizes of padded, without pad and slice
roofs   the local matmul of uneven, and of even

A ratio is the median of the ratios within a round, with its 95% interval from rounds drawn anew. The first says what
unevenness costs: time over roof, uneven / even. What several ranks get of kv is multiplied once, and then copied: even
has more heads in its roof there, and no more to send. With --backward a program is its forward and its backward.
bench/common.py explains the pages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import fusedcomm
from fusedcomm.bench import baselines
from fusedcomm.bench.common import (
    DTYPES,
    PairedRatio,
    add_common_arguments,
    at_least,
    at_most,
    has_huge_pages,
    listed,
    ms,
    pages,
    refuse_wrong_pages,
    tabulated,
)
from fusedcomm.bench.timing import Timing, ValuesDiffer, check_values, measure_rounds
from fusedcomm.geometry.cut import chunk_parts
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from fusedcomm.nn.heads import head_splits, kv_ranges

UNEVEN, PADDED, PLAIN, EVEN, UNEVEN_ROOF, EVEN_ROOF = "uneven", "padded", "plain", "even", "uneven roof", "even roof"
PROGRAMS = ("q", "kv", "out")
MOST_COST, TOLERANCE = 1.05, {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # a share of the norm
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Sizes:
    """Those of all ranks together."""

    tokens: int = 4099
    heads: int = 15
    kv_heads: int = 3
    head_dim: int = 64
    hidden: int = 1024
    splits: tuple[int, ...] = ()  # tokens of each rank, or those that torch.chunk gives it


class Attention:
    """One rank's tensors, with weights that all ranks have alike."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device, trains: bool = False) -> None:
        self.trains = trains  # whether what is timed has a backward
        self.sizes, self.rank, self.num_ranks = sizes, dist.get_rank(), dist.get_world_size()
        self.all_tokens = sizes.splits or chunk_parts(sizes.tokens, self.num_ranks).sizes
        self.tokens, self.most_tokens = self.all_tokens[self.rank], max(self.all_tokens)
        self.most_heads = -(-sizes.heads // self.num_ranks)
        self.splits = head_splits(sizes.heads, self.num_ranks)
        self.ranges = kv_ranges(sizes.heads, sizes.kv_heads, self.num_ranks)
        self.like = torch.empty(0, dtype=dtype, device=device)

    def variants(self, program: str) -> dict[str, Callable[[], Tensor]]:
        return {"q": self._q, "kv": self._kv, "out": self._out}[program]()

    def _randn(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.like)

    def _leaf(self, t: Tensor) -> Tensor:
        return t.detach().clone().requires_grad_(self.trains)

    def _into(self, w: Tensor, padded_w: Tensor, columns: list[int], scatter: dict[str, Any]) -> dict[str, Any]:
        """The projections into attention. ``columns``: those of w, of which the one before the last are heads."""
        x = self._leaf(self._randn(self.tokens, self.sizes.hidden, seed=self.rank + 1))
        even_x = self._leaf(F.pad(x, (0, 0, 0, self.most_tokens - self.tokens)))
        w, padded_w = self._leaf(w), self._leaf(padded_w)
        padded_columns = [*columns[:-2], padded_w.shape[1] // (w.shape[1] // columns[-2]), columns[-1]]
        dim = len(columns) - 1

        def uneven() -> Tensor:
            given = {"gather_splits": self.all_tokens, **scatter}
            return fusedcomm.matmul_all_to_all(x, w, 0, dim, out_shape=columns, **given)

        def longer() -> Tensor:
            return F.pad(x, (0, 0, 0, self.most_tokens - self.tokens))

        def padded() -> Tensor:
            y = fusedcomm.matmul_all_to_all(longer(), padded_w, 0, dim, out_shape=padded_columns)
            return self._without_padding(y)

        def plain() -> Tensor:
            y = (longer() @ padded_w).unflatten(-1, padded_columns)
            return self._without_padding(baselines.unpacked(baselines.all_to_all(baselines.packed(y, dim)), 0))

        return {
            UNEVEN: uneven,
            PADDED: padded,
            PLAIN: plain,
            EVEN: lambda: fusedcomm.matmul_all_to_all(even_x, padded_w, 0, dim, out_shape=padded_columns),
            UNEVEN_ROOF: lambda: x @ w,
            EVEN_ROOF: lambda: even_x @ padded_w,
        }

    def _without_padding(self, y: Tensor) -> Tensor:
        """The tokens of all ranks, without the padding behind those of each."""
        if not self.sizes.splits:
            return y[: self.sizes.tokens]  # torch.chunk's last ranks alone have less
        blocks = y.split(self.most_tokens)
        return torch.cat([block[:size] for block, size in zip(blocks, self.all_tokens, strict=True)])

    def _with_padding(self, x: Tensor, heads: int) -> Tensor:
        """What ``_without_padding`` takes away, and heads, before tokens are scattered."""
        if not self.sizes.splits:
            return F.pad(x, (0, 0, 0, heads, 0, self.most_tokens * self.num_ranks - self.sizes.tokens))
        parts = x.split(self.all_tokens)
        return torch.cat([F.pad(part, (0, 0, 0, heads, 0, self.most_tokens - part.shape[0])) for part in parts])

    def _q(self) -> dict[str, Any]:
        d, (sizes, most) = self.sizes.head_dim, (self.sizes, self.most_heads)
        w = self._randn(sizes.hidden, sizes.heads, d, seed=0)
        blocks = [F.pad(block, (0, 0, 0, most - block.shape[1])) for block in w.split(self.splits, 1)]
        padded_w = torch.cat(blocks, 1).flatten(1)
        return self._into(w.flatten(1), padded_w, [sizes.heads, d], {"scatter_splits": self.splits})

    def _kv(self) -> dict[str, Any]:
        sizes, d = self.sizes, self.sizes.head_dim
        w = self._randn(sizes.hidden, 2, sizes.kv_heads, d, seed=0)
        most = max(length for _, length in self.ranges)
        blocks = [F.pad(w.narrow(2, *each), (0, 0, 0, most - each[1])) for each in self.ranges]
        padded_w = torch.cat(blocks, 2).flatten(1)
        return self._into(w.flatten(1), padded_w, [2, sizes.kv_heads, d], {"scatter_ranges": self.ranges})

    def _out(self) -> dict[str, Any]:
        sizes, d, most = self.sizes, self.sizes.head_dim, self.most_heads
        own = self.splits[self.rank]
        x = self._leaf(self._randn(sizes.tokens, own, d, seed=self.rank + 1))
        w = self._randn(sizes.heads, d, sizes.hidden, seed=0)
        blocks = [F.pad(block, (0, 0, 0, 0, 0, most - block.shape[0])) for block in w.split(self.splits)]
        w, padded_w = self._leaf(w.flatten(0, 1)), self._leaf(torch.cat(blocks).flatten(0, 1))
        even_x = self._leaf(self._with_padding(x, most - own))
        arrived = self._leaf(self._randn(self.tokens, w.shape[0], seed=2))
        even_arrived = self._leaf(self._randn(self.most_tokens, padded_w.shape[0], seed=2))
        given: dict[str, Any] = {"gather_splits": self.splits, "scatter_splits": self.all_tokens}

        def padded() -> Tensor:
            return fusedcomm.all_to_all_matmul(self._with_padding(x, most - own), padded_w, 1, 0)[: self.tokens]

        def plain() -> Tensor:
            blocks = baselines.all_to_all(baselines.packed(self._with_padding(x, most - own), 0))
            return (baselines.unpacked(blocks, 1).flatten(1) @ padded_w)[: self.tokens]

        return {
            UNEVEN: lambda: fusedcomm.all_to_all_matmul(x, w, 1, 0, **given),
            PADDED: padded,
            PLAIN: plain,
            EVEN: lambda: fusedcomm.all_to_all_matmul(even_x, padded_w, 1, 0),
            UNEVEN_ROOF: lambda: arrived @ w,
            EVEN_ROOF: lambda: even_arrived @ padded_w,
        }

    def check(self, name: str, result: Tensor, program: str) -> str | None:
        """What is not padding, against the plain collectives."""
        with fusedcomm.force_algorithm("unfused"):
            want = self.variants(program)[UNEVEN]()
        if program != "out":
            result = result.narrow(-2, 0, want.shape[-2])
        error = float((result.float() - want.float()).norm() / want.float().norm())
        return None if error <= TOLERANCE[result.dtype] else f"relative error {error:.1e}"


@dataclass(frozen=True)
class UnevenRow:
    program: str
    dtype: str
    times: dict[str, Timing]
    cost: PairedRatio  # time over roof, uneven / even
    padded_over_uneven: PairedRatio
    plain_over_uneven: PairedRatio


def _time_column(name: str) -> Column:
    return Column(f"{name}\nms", "see above", lambda row: ms(row.times[name].median, 2), drop=2)


SPREAD = "median of the ratios within a round (its 95% interval, from rounds drawn anew)"
COLUMNS = (
    Column("program", "what is projected", lambda row: row.program, left=True),
    Column("dtype", "the dtype of weights and tokens", lambda row: row.dtype, left=True),
    *map(_time_column, (UNEVEN, PADDED, PLAIN, EVEN, UNEVEN_ROOF, EVEN_ROOF)),
    Column("over roof,\nuneven / even", SPREAD, lambda row: str(row.cost)),
    Column("padded /\nuneven", SPREAD, lambda row: str(row.padded_over_uneven)),
    Column("plain /\nuneven", SPREAD, lambda row: str(row.plain_over_uneven)),
)


def measure_program(
    rank: int, program: str, sizes: Sizes, dtype: str, device_type: str, rounds: int, backward: bool
) -> UnevenRow:
    device = world.rank_device(device_type)
    data = Attention(sizes, DTYPES[dtype], device, trains=backward)
    variants = data.variants(program)
    checked = {name: variants[name] for name in (UNEVEN, PADDED, PLAIN)}
    check_values(checked, lambda name, result: data.check(name, result, program))
    if backward:
        variants = {name: _with_backward(variant) for name, variant in variants.items()}
    seconds = measure_rounds(variants, device, rounds=rounds, warmup=3)
    return UnevenRow(
        program,
        dtype,
        {name: Timing.of(each) for name, each in seconds.items()},
        PairedRatio.of(seconds[UNEVEN] * seconds[EVEN_ROOF], seconds[UNEVEN_ROOF] * seconds[EVEN]),
        PairedRatio.of(seconds[PADDED], seconds[UNEVEN]),
        PairedRatio.of(seconds[PLAIN], seconds[UNEVEN]),
    )


def _with_backward(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    grad = torch.ones_like(forward())

    def both() -> Tensor:
        out = forward()
        out.backward(grad)
        return out.detach()

    return both


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return _main(args)
    except (ValuesDiffer, RankError) as error:
        print(f"uneven: {error}", file=sys.stderr)
        return 1


def _main(args: argparse.Namespace) -> int:
    device_type = world.default_device_type()
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)} | {"splits": tuple(args.splits)})
    env = world.HUGE_PAGES if args.huge_pages else None
    rows: list[UnevenRow] = []
    num_ranks = world.world_size_of(args.ranks, device_type)
    if sizes.splits and (len(sizes.splits) != num_ranks or sum(sizes.splits) != sizes.tokens):
        print(f"uneven: --splits must be {num_ranks} sizes that add up to --tokens {sizes.tokens}", file=sys.stderr)
        return 2
    with world.ranks(device_type, num_ranks, TIMEOUT_S, env) as call:
        huge_pages = call(has_huge_pages)
        if world.is_rank_0():
            print(sizes, *([pages(huge_pages)] if device_type == "cpu" else []), sep="\n", flush=True)
        cases = [(program, dtype) for program in PROGRAMS for dtype in args.dtype]
        with tabulated(COLUMNS, rows, len(cases)) as add:
            for program, dtype in cases:
                row = call(measure_program, program, sizes, dtype, device_type, args.rounds, args.backward)
                if row is not None:
                    add(row)
    if not rows:  # torchrun's other ranks
        return 0
    goals = [at_most(f"cost of unevenness, {r.program}, {r.dtype}", r.cost.median, MOST_COST) for r in rows]
    goals += [at_least(f"padded / uneven, {r.program}, {r.dtype}", r.padded_over_uneven.median, 1.0) for r in rows]
    goals += [at_least(f"plain / uneven, {r.program}, {r.dtype}", r.plain_over_uneven.median, 1.0) for r in rows]
    print(*goals, sep="\n")
    if args.json:
        facts = {"program": "uneven", "sizes": asdict(sizes), "rounds": args.rounds, "huge_pages": huge_pages}
        facts |= {"ranks": num_ranks, "backward": args.backward}
        console.write_json(args.json, run_facts() | facts | listed(rows=rows, goals=goals))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    text = "Values are checked before anything is timed."
    parser = argparse.ArgumentParser(prog="fusedcomm.bench.uneven", description=text)
    for field in fields(Sizes)[:-1]:
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--splits", type=int, nargs="+", default=[], metavar="N", help="tokens of each rank")
    parser.add_argument("--ranks", type=int, metavar="N", help="CPU ranks, or GPUs (default: 2, or all GPUs)")
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    add_common_arguments(parser, rounds=41)
    args = parser.parse_args(argv)
    refuse_wrong_pages(parser, args)
    return args


if __name__ == "__main__":
    sys.exit(main())
