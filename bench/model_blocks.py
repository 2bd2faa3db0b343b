"""Training steps of blocks of real models, unmodified, under torch.compile: with fusedcomm, and without.

    python -m fusedcomm.bench.model_blocks [--block NAME ...] [--huge-pages] [--json FILE] .. 2 CPU ranks of one thread
    torchrun --nproc-per-node 8 -m fusedcomm.bench.model_blocks                                GPUs, NCCL

A step is the forward of all layers and the backward, in which every stream and every parameter gets its gradient. The
blocks are those of tests/helpers/model_blocks.py, whose exchanges stand behind norms and rotary embeddings.

bound     torch.compile(model) with a barrier of all ranks in place of each exchange: what arrives is what was sent, so
          its values are others. bench/block.py says why the ranks meet there
eager     the model as it is
plain     torch.compile(model)
unmoved   the same in fusedcomm.compile.enabled(commute=False)
compiled  the same in fusedcomm.compile.enabled()

Each is compiled anew, with caches off. A ratio is the median of the ratios within a round, with their P10 and P90.
plain / bound is what exchanges cost today, so the most that there is to win. bench/common.py explains the pages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm.compile
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
from fusedcomm.bench.rank_barrier import rank_barrier
from fusedcomm.bench.start_program import Ratio, no_caches, same_program
from fusedcomm.bench.timing import Timing, ValuesDiffer, check_values, measure_rounds
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from tests.helpers import model_blocks
from tests.helpers.model_blocks import BLOCKS, Model, Size, rotary_table

BOUND, EAGER, PLAIN, UNMOVED, COMPILED = "bound", "eager", "plain", "unmoved", "compiled"
TIMED = (BOUND, EAGER, PLAIN, UNMOVED, COMPILED)
FASTER = 1.15  # plain / compiled, at least
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # share of the norm
TIMEOUT_S = 1800


lib = torch.library.Library("fusedcomm_blocks", "DEF")
lib.define("meet(Tensor x) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
_barriers: dict[torch.device, Callable[[], None]] = {}


@torch.library.impl(lib, "meet", "CPU")
@torch.library.impl(lib, "meet", "CUDA")
def _meet(x: Tensor) -> Tensor:
    """0, when all ranks have made x. To add it makes what follows wait, and compiled code adds it on the way."""
    _barriers[x.device]()
    return x.new_zeros(())


@torch.library.register_fake("fusedcomm_blocks::meet", lib=lib)
def _fake_meet(x: Tensor) -> Tensor:
    return x.new_empty(())


def _met(x: Tensor, group: Any) -> Tensor:
    return x + torch.ops.fusedcomm_blocks.meet(x)


@dataclass(frozen=True)
class StepSizes(Size):
    """Each stream is [batch, tokens, heads * head_dim] on every rank."""

    tokens: int = 1024
    text: int = 128
    heads: int = 8
    head_dim: int = 64
    layers: int = 2

    def __str__(self) -> str:
        tokens = f"{self.batch} x {self.tokens} tokens per rank, {self.text} of text"
        return f"{self.layers} layers, {tokens}, {self.heads} heads of {self.head_dim}"


class StepData:
    """One rank's part of the tokens, and the ways to train on them. All ranks have the same weights."""

    def __init__(self, block: str, sizes: StepSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.block, self.sizes, self.dtype, self.device = block, sizes, dtype, device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.exchanges = self.fused = 0
        _barriers[device] = rank_barrier(device)
        self.whole = self._of_all()
        self.streams, self.grads = (
            [each.chunk(self.num_ranks, 1)[self.rank].to(dtype).contiguous() for each in tensors]
            for tensors in self.whole
        )
        self.tables = [tuple(each.chunk(self.num_ranks)[self.rank] for each in table) for table in self._tables()]
        self.model = self._model(dist.group.WORLD).to(dtype)

    def variants(self) -> dict[str, Callable[[], list[Tensor]]]:
        with no_caches():
            in_place_of_exchanges = mock.patch.object(model_blocks, "all_to_all", _met)
            with in_place_of_exchanges:
                bound = in_place_of_exchanges(self._compiled())  # else its guards fail, and it is compiled anew
            plain = self._compiled()
            with fusedcomm.compile.enabled(commute=False) as report:
                unmoved = self._compiled()
            self.exchanges = len(report.collectives)
            with fusedcomm.compile.enabled() as report:
                compiled = self._compiled()
            self.fused = sum(each.status == "fused" for each in report.collectives)
        return {BOUND: bound, EAGER: self._step(_forward), PLAIN: plain, UNMOVED: unmoved, COMPILED: compiled}

    def check(self, name: str, results: list[Tensor]) -> str | None:
        """Gradients of weights are summed over the ranks, each of which has a part of the tokens."""
        names = [f"{kind} {i}" for kind in ("result", "grad x") for i in range(len(self.streams))]
        num_parts = len(names)
        names += [f"grad {name}" for name, _ in self.model.named_parameters()]
        got = [each.to(torch.float32, copy=True) for each in results]
        for grad in got[num_parts:]:
            dist.all_reduce(grad)
        must = [each.chunk(self.num_ranks, 1)[self.rank] for each in self._oracle[:num_parts]]
        for what, a, b in zip(names, got, must + self._oracle[num_parts:], strict=True):
            error = float((a - b).norm() / b.norm())
            if not error <= TOLERANCE[self.dtype]:
                return f"{what}: relative error {error:.1e}"
        return None

    def _compiled(self) -> Callable[[], list[Tensor]]:
        step = self._step(torch.compile(same_program(_forward), fullgraph=True))
        step()
        return step

    def _step(self, forward: Callable[..., list[Tensor]]) -> Callable[[], list[Tensor]]:
        return lambda: _train(forward, self.model, self.streams, self.tables, self.grads)

    @cached_property
    def _oracle(self) -> list[Tensor]:
        """The results in float32 of one process with all tokens, so that no communication must be trusted."""
        streams, grads = self.whole
        return _train(_forward, self._model(None), streams, self._tables(), grads)

    def _model(self, group: Any) -> Model:
        model = Model(self.block, self.sizes, group, self.sizes.layers)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data *= 5 * parameter.shape[1] ** -0.5
        return model.to(self.device)

    def _of_all(self) -> tuple[list[Tensor], list[Tensor]]:
        """The streams of all ranks, and the gradients of the results."""
        generator, size = torch.Generator().manual_seed(0), self.sizes
        shapes = [(size.batch, length, size.dim) for length in self._lengths()]
        streams, grads = ([torch.randn(s, generator=generator).to(self.device) for s in shapes] for _ in range(2))
        return streams, grads

    def _tables(self) -> list[model_blocks.Table]:
        tables = [rotary_table(BLOCKS[self.block].rotary, length, self.sizes) for length in self._lengths()]
        return [tuple(each.to(self.device) for each in table) for table in tables]

    def _lengths(self) -> list[int]:
        return [self.num_ranks * each for each in (self.sizes.tokens, self.sizes.text)][: BLOCKS[self.block].streams]


def _forward(model: Model, streams: list[Tensor], tables: list[model_blocks.Table]) -> list[Tensor]:
    return model(streams, tables)


def _train(
    forward: Callable[..., list[Tensor]],
    model: Model,
    streams: list[Tensor],
    tables: list[model_blocks.Table],
    grads: list[Tensor],
) -> list[Tensor]:
    streams = [each.detach().requires_grad_() for each in streams]
    outs = forward(model, streams, tables)
    found = torch.autograd.grad(outs, [*streams, *model.parameters()], grads)
    return [*(each.detach() for each in outs), *found]


@dataclass(frozen=True)
class StepRow:
    block: str
    dtype: str
    exchanges: int
    fused: int
    times: dict[str, Timing]
    plain_over_compiled: Ratio
    plain_over_bound: Ratio
    unmoved_over_compiled: Ratio


TIMES = {
    BOUND: "torch.compile, barriers in place of exchanges: other values",
    EAGER: "the model as it is",
    PLAIN: "torch.compile",
    UNMOVED: "in fusedcomm.compile.enabled(commute=False)",
    COMPILED: "in fusedcomm.compile.enabled()",
}
RATIOS: dict[str, Callable[[StepRow], Ratio]] = {
    "plain /\ncompiled": lambda row: row.plain_over_compiled,
    "plain /\nbound": lambda row: row.plain_over_bound,
    "unmoved /\ncompiled": lambda row: row.unmoved_over_compiled,
}


def _time_column(name: str, drop: int) -> Column:
    return Column(f"{name}\nms", TIMES[name], lambda row: ms(row.times[name].median, 1), drop=drop)


def _ratio_column(head: str, drop: int) -> Column:
    about = "median of the ratios within a round (P10 .. P90 of them)"
    return Column(head, about, lambda row: str(RATIOS[head](row)), drop=drop)


COLUMNS = (
    Column("block", "its name", lambda row: row.block, left=True),
    Column("dtype", "the dtype of weights and streams", lambda row: row.dtype, left=True),
    Column("fused", "exchanges that became fused ops, of how many", lambda row: f"{row.fused}/{row.exchanges}"),
    *map(_time_column, TIMED, (0, 4, 0, 3, 0)),
    *map(_ratio_column, RATIOS, (0, 1, 2)),
)


def measure_block(rank: int, block: str, sizes: StepSizes, dtype: str, device_type: str, rounds: int) -> StepRow:
    device = world.rank_device(device_type)
    data = StepData(block, sizes, DTYPES[dtype], device)
    variants = data.variants()
    check_values({name: each for name, each in variants.items() if name != BOUND}, data.check)
    data.__dict__.pop("_oracle", None)
    seconds = measure_rounds({name: variants[name] for name in TIMED}, device, rounds=rounds, warmup=2)
    return StepRow(
        block,
        dtype,
        data.exchanges,
        data.fused,
        {name: Timing.of(each) for name, each in seconds.items()},
        Ratio.of(seconds[PLAIN], seconds[COMPILED]),
        Ratio.of(seconds[PLAIN], seconds[BOUND]),
        Ratio.of(seconds[UNMOVED], seconds[COMPILED]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return _main(args)
    except (ValuesDiffer, RankError) as error:
        print(f"model_blocks: {error}", file=sys.stderr)
        return 1


def _main(args: argparse.Namespace) -> int:
    device_type = world.default_device_type()
    sizes = StepSizes(**{field.name: getattr(args, field.name) for field in fields(StepSizes)})
    env = world.HUGE_PAGES if args.huge_pages else None
    rows: list[StepRow] = []
    with world.ranks(device_type, world.default_world_size(device_type), TIMEOUT_S, env) as call:
        huge_pages = call(has_huge_pages)
        if world.is_rank_0():
            print(sizes, *([pages(huge_pages)] if device_type == "cpu" else []), sep="\n", flush=True)
        cases = [(block, dtype) for block in args.block for dtype in args.dtype]
        with tabulated(COLUMNS, rows, len(cases)) as add:
            for block, dtype in cases:
                row = call(measure_block, block, sizes, dtype, device_type, args.rounds)
                if row is not None:
                    add(row)
    if not rows:  # torchrun's other ranks
        return 0
    goals = [at_least(f"plain/compiled, {r.block}, {r.dtype}", r.plain_over_compiled.median, FASTER) for r in rows]
    print(*goals, sep="\n")
    if args.json:
        facts = {"program": "blocks", "sizes": asdict(sizes), "rounds": args.rounds, "huge_pages": huge_pages}
        console.write_json(args.json, run_facts() | facts | listed(rows=rows, goals=goals))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fusedcomm.bench.model_blocks", description="Values are checked before anything is timed."
    )
    parser.add_argument("--block", nargs="+", choices=BLOCKS, default=["flux_single", "wan"])
    for field in fields(StepSizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    add_common_arguments(parser, rounds=41)
    args = parser.parse_args(argv)
    refuse_wrong_pages(parser, args)
    return args


if __name__ == "__main__":
    sys.exit(main())
