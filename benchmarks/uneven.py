"""Lengths and heads that the ranks do not divide: the ops beside what users do today, which is to pad, call and slice.

    python -m benchmarks.uneven [--tokens N] [--heads N] [--kv-heads N] [--rounds N] [--json FILE]     2 CPU ranks
    torchrun --nproc-per-node 8 -m benchmarks.uneven                                                   GPUs, NCCL

q     the projection of q, tokens gathered and balanced heads scattered: matmul_all_to_all
kv    that of k and v, of whose heads each rank gets those that its heads of q read
out   the projection behind attention, heads gathered and tokens scattered: all_to_all_matmul

uneven  the op with the sizes as they are
padded  tokens and heads padded to the next number that the ranks divide, the same op, and a slice
even    the op with the sizes of padded, without pad and slice
roofs   the local matmul of uneven, and of even

A ratio is the median of the ratios within a round, with their P10 and P90. The first says what unevenness costs: time
over roof, uneven / even. What several ranks get of kv is multiplied once, and then copied. benchmarks/common.py
explains the pages.
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
from benchmarks.common import (
    DTYPES,
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
from benchmarks.start_program import Ratio
from fusedcomm.bench.timing import Timing, ValuesDiffer, check_values, measure_rounds
from fusedcomm.geometry.cut import chunk_parts
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from fusedcomm.nn.heads import head_splits, kv_ranges

UNEVEN, PADDED, EVEN, UNEVEN_ROOF, EVEN_ROOF = "uneven", "padded", "even", "uneven roof", "even roof"
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


class Attention:
    """One rank's tensors, with weights that all ranks have alike."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.rank, self.num_ranks = sizes, dist.get_rank(), dist.get_world_size()
        self.most_tokens = -(-sizes.tokens // self.num_ranks)
        self.most_heads = -(-sizes.heads // self.num_ranks)
        self.tokens = chunk_parts(sizes.tokens, self.num_ranks).sizes[self.rank]
        self.splits = head_splits(sizes.heads, self.num_ranks)
        self.ranges = kv_ranges(sizes.heads, sizes.kv_heads, self.num_ranks)
        self.like = torch.empty(0, dtype=dtype, device=device)

    def variants(self, program: str) -> dict[str, Callable[[], Tensor]]:
        return {"q": self._q, "kv": self._kv, "out": self._out}[program]()

    def _randn(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.like)

    def _into(self, w: Tensor, padded_w: Tensor, columns: list[int], scatter: dict[str, Any]) -> dict[str, Any]:
        """The projections into attention. ``columns``: those of w, of which the one before the last are heads."""
        x = self._randn(self.tokens, self.sizes.hidden, seed=self.rank + 1)
        even_x = F.pad(x, (0, 0, 0, self.most_tokens - self.tokens))
        padded_columns = [*columns[:-2], padded_w.shape[1] // (w.shape[1] // columns[-2]), columns[-1]]
        dim = len(columns) - 1

        def uneven() -> Tensor:
            given = {"gather_size": self.sizes.tokens, **scatter}
            return fusedcomm.matmul_all_to_all(x, w, 0, dim, out_shape=columns, **given)

        def padded() -> Tensor:
            longer = F.pad(x, (0, 0, 0, self.most_tokens - self.tokens))
            y = fusedcomm.matmul_all_to_all(longer, padded_w, 0, dim, out_shape=padded_columns)
            return y[: self.sizes.tokens]

        return {
            UNEVEN: uneven,
            PADDED: padded,
            EVEN: lambda: fusedcomm.matmul_all_to_all(even_x, padded_w, 0, dim, out_shape=padded_columns),
            UNEVEN_ROOF: lambda: x @ w,
            EVEN_ROOF: lambda: even_x @ padded_w,
        }

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
        x = self._randn(sizes.tokens, own, d, seed=self.rank + 1)
        w = self._randn(sizes.heads, d, sizes.hidden, seed=0)
        blocks = [F.pad(block, (0, 0, 0, 0, 0, most - block.shape[0])) for block in w.split(self.splits)]
        w, padded_w = w.flatten(0, 1), torch.cat(blocks).flatten(0, 1)
        padding = (0, 0, 0, most - own, 0, self.most_tokens * self.num_ranks - sizes.tokens)
        even_x = F.pad(x, padding)
        arrived = self._randn(self.tokens, w.shape[0], seed=2)
        even_arrived = self._randn(self.most_tokens, padded_w.shape[0], seed=2)
        return {
            UNEVEN: lambda: fusedcomm.all_to_all_matmul(x, w, 1, 0, gather_splits=self.splits),
            PADDED: lambda: fusedcomm.all_to_all_matmul(F.pad(x, padding), padded_w, 1, 0)[: self.tokens],
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
    cost: Ratio  # time over roof, uneven / even
    padded_over_uneven: Ratio


def _time_column(name: str) -> Column:
    return Column(f"{name}\nms", "see above", lambda row: ms(row.times[name].median, 2), drop=2)


SPREAD = "median of the ratios within a round (P10 .. P90 of them)"
COLUMNS = (
    Column("program", "what is projected", lambda row: row.program, left=True),
    Column("dtype", "the dtype of weights and tokens", lambda row: row.dtype, left=True),
    *map(_time_column, (UNEVEN, PADDED, EVEN, UNEVEN_ROOF, EVEN_ROOF)),
    Column("over roof,\nuneven / even", SPREAD, lambda row: str(row.cost)),
    Column("padded /\nuneven", SPREAD, lambda row: str(row.padded_over_uneven)),
)


def measure_program(rank: int, program: str, sizes: Sizes, dtype: str, device_type: str, rounds: int) -> UnevenRow:
    device = world.rank_device(device_type)
    data = Attention(sizes, DTYPES[dtype], device)
    variants = data.variants(program)
    checked = {name: variants[name] for name in (UNEVEN, PADDED)}
    check_values(checked, lambda name, result: data.check(name, result, program))
    seconds = measure_rounds(variants, device, rounds=rounds, warmup=3)
    return UnevenRow(
        program,
        dtype,
        {name: Timing.of(each) for name, each in seconds.items()},
        Ratio.of(seconds[UNEVEN] * seconds[EVEN_ROOF], seconds[UNEVEN_ROOF] * seconds[EVEN]),
        Ratio.of(seconds[PADDED], seconds[UNEVEN]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return _main(args)
    except (ValuesDiffer, RankError) as error:
        print(f"uneven: {error}", file=sys.stderr)
        return 1


def _main(args: argparse.Namespace) -> int:
    device_type = world.default_device_type()
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    env = world.HUGE_PAGES if args.huge_pages else None
    rows: list[UnevenRow] = []
    with world.ranks(device_type, world.default_world_size(device_type), TIMEOUT_S, env) as call:
        huge_pages = call(has_huge_pages)
        if world.is_rank_0():
            print(sizes, *([pages(huge_pages)] if device_type == "cpu" else []), sep="\n", flush=True)
        cases = [(program, dtype) for program in PROGRAMS for dtype in args.dtype]
        with tabulated(COLUMNS, rows, len(cases)) as add:
            for program, dtype in cases:
                row = call(measure_program, program, sizes, dtype, device_type, args.rounds)
                if row is not None:
                    add(row)
    if not rows:  # torchrun's other ranks
        return 0
    goals = [at_most(f"cost of unevenness, {r.program}, {r.dtype}", r.cost.median, MOST_COST) for r in rows]
    goals += [at_least(f"padded / uneven, {r.program}, {r.dtype}", r.padded_over_uneven.median, 1.0) for r in rows]
    print(*goals, sep="\n")
    if args.json:
        facts = {"program": "uneven", "sizes": asdict(sizes), "rounds": args.rounds, "huge_pages": huge_pages}
        console.write_json(args.json, run_facts() | facts | listed(rows=rows, goals=goals))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    text = "Values are checked before anything is timed."
    parser = argparse.ArgumentParser(prog="benchmarks.uneven", description=text)
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    add_common_arguments(parser, rounds=41)
    args = parser.parse_args(argv)
    refuse_wrong_pages(parser, args)
    return args


if __name__ == "__main__":
    sys.exit(main())
