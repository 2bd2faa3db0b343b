"""What the passes add to the time that a transformer takes to compile, and that it grows as the graph does.

    python -m fusedcomm.bench.compile_time [--layers L ...] [--whole L] [--quick] [--json FILE]

The transformer: --layers with tensor and sequence parallelism over 8 ranks, the functional collectives written by hand.

    norm, gather tokens, q k v, attention, out projection, reduce-scatter tokens
    norm, gather tokens, gate and up, silu, down, reduce-scatter tokens

One process of a fake group: it is compiled, forward and backward, and never run.

pass      FusedcommPass over the forward and the backward graph as Inductor gets them; nothing is lowered. It is the
          median over rounds; every round takes all sizes in turn, on new copies of their graphs. It is processor
          time, which other load changes little, without Python's garbage collector, which would meet one size and not
          another
compile   torch.compile with Inductor, from the call until the last kernel is compiled and loaded, caches off:
          plain     without fusedcomm
          compiled  in fusedcomm.compile.enabled(), and the part of that time that FusedcommPass takes
          share = pass / (compiled - pass), both from that one compilation: the two are slow or fast together
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

import fusedcomm.compile
from fusedcomm.bench.common import Goal, at_most, ms
from fusedcomm.bench.timing import Timing
from fusedcomm.compile.reports import CompileReport
from fusedcomm.launch import console
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts

NUM_RANKS = 8
BATCH, TOKENS, HIDDEN, HEADS, INTERMEDIATE = 2, 4, 64, 8, 256  # tokens are each rank's, the rest all ranks'
LAYERS, WHOLE = (8, 16, 32, 64, 128), 32
QUICK_LAYERS, QUICK_WHOLE = (8, 16, 32), 8
SHARE = 5.0  # at most, in percent
GROWTH = 1.25  # at most, of the time per layer from the smallest to the largest size

# torch 2.13 has new names and warns about the old ones
_all_gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
_reduce_scatter = getattr(funcol, "reduce_scatter_single_autograd", None) or funcol.reduce_scatter_tensor_autograd


class Layer(nn.Module):
    """x_shard_s [B, S/R, H], or [S/R, B, H] with tokens_dim 0; in between the heads and the columns are cut."""

    def __init__(self, tokens_dim: int) -> None:
        super().__init__()
        assert dist.group.WORLD is not None
        self.tokens_dim, self.group = tokens_dim, dist.group.WORLD
        columns, width = HIDDEN // NUM_RANKS, INTERMEDIATE // NUM_RANKS
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, columns, bias=False) for _ in range(3))
        self.out = nn.Linear(columns, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, x_shard_s: Tensor) -> Tensor:
        x_shard_s = x_shard_s + self._scattered(self.attention(self._gathered(self.attention_norm(x_shard_s))))
        return x_shard_s + self._scattered(self.mlp(self._gathered(self.mlp_norm(x_shard_s))))

    def attention(self, x: Tensor) -> Tensor:
        # [B, S, h, d] -> [B, h, S, d] and back; with tokens first [S, B, h, d]
        there, back = ((0, 2, 1, 3), (0, 2, 1, 3)) if self.tokens_dim == 1 else ((1, 2, 0, 3), (2, 0, 1, 3))
        q, k, v = (each(x).unflatten(-1, (HEADS // NUM_RANKS, -1)).permute(there) for each in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(back).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def _gathered(self, x_shard_s: Tensor) -> Tensor:
        return _all_gather(x_shard_s, self.tokens_dim, self.group)

    def _scattered(self, x: Tensor) -> Tensor:
        return _reduce_scatter(x, "sum", self.tokens_dim, self.group)


@contextlib.contextmanager
def fake_group() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Compiled(Exception):
    """Raised in place of the first run, when all is compiled."""


def compile_transformer(num_layers: int, tokens_dim: int, compile_graph: Callable[..., None]) -> float:
    """The seconds it takes. ``compile_graph(gm, inputs, **options)`` gets the forward's and the backward's graph."""
    from torch._dynamo.backends.common import aot_autograd  # noqa: F401  registers what compile_fx needs
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.utils import fresh_cache

    def stop(*args: Any) -> None:
        raise _Compiled

    stop._boxed_call = True  # type: ignore[attr-defined]

    def inner_compile(gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        compile_graph(gm, inputs, **options)
        return stop

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(gm, inputs, inner_compile=inner_compile)

    shape = [BATCH, HIDDEN]
    shape.insert(tokens_dim, TOKENS)
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    model = nn.Sequential(*(Layer(tokens_dim) for _ in range(num_layers))).to(torch.bfloat16)
    torch._dynamo.reset()
    with (
        warnings.catch_warnings(),
        fresh_cache(),
        config.patch(force_disable_caches=True),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
    ):
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        start = time.perf_counter()
        with contextlib.suppress(_Compiled):
            compiled(x)
        return time.perf_counter() - start


def generate_code(gm: GraphModule, inputs: Sequence[Any], **options: Any) -> None:
    from torch._inductor.compile_fx import compile_fx_inner

    compile_fx_inner(gm, inputs, **options)


class Graphs:
    """The forward and the backward graph of so many layers."""

    def __init__(self, num_layers: int, tokens_dim: int) -> None:
        self.num_layers = num_layers
        self._found: list[tuple[Any, Graph]] = []
        compile_transformer(num_layers, tokens_dim, self._keep)
        assert len(self._found) == 2

    def _keep(self, gm: GraphModule, inputs: Sequence[Any], **options: Any) -> None:
        from torch._inductor.compile_fx import view_to_reshape

        view_to_reshape(gm)
        self._found.append((torch._guards.detect_fake_mode(inputs), gm.graph))

    @property
    def num_nodes(self) -> int:
        return sum(len(graph.nodes) for _, graph in self._found)

    def run_pass(self) -> tuple[float, CompileReport]:
        """Run the pass on copies. Returns the seconds of processor time, and what the pass did."""
        from torch._inductor.virtualized import V

        from fusedcomm.compile.passes import FusedcommPass, Settings

        report, seconds = CompileReport(), 0.0
        ours = FusedcommPass(Settings(), report)
        for fake_mode, graph in self._found:
            graph = copy.deepcopy(graph)
            with V.set_fake_mode(fake_mode), _no_garbage_collector():
                start = time.thread_time()
                ours(graph)
                seconds += time.thread_time() - start
        return seconds, report


@contextlib.contextmanager
def _no_garbage_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class PassRow:
    layers: int
    nodes: int  # in both graphs
    collectives: int
    fused: int
    seconds: Timing

    @property
    def ms_per_layer(self) -> float:
        return self.seconds.median * 1e3 / self.layers


COLUMNS = (
    Column("layers", "layers of the transformer", lambda row: str(row.layers)),
    Column("nodes", "nodes of both graphs, forward and backward", lambda row: str(row.nodes)),
    Column("fused", "how many of the collectives are fused", lambda row: f"{row.fused} of {row.collectives}"),
    Column("pass\nms", "median over rounds", lambda row: ms(row.seconds.median, 1)),
    Column(
        "pass\nms / layer", "the same per layer: constant if the pass scales", lambda row: f"{row.ms_per_layer:.2f}"
    ),
)


@dataclass(frozen=True)
class WholeRow:
    """Whole compilations, in seconds."""

    layers: int
    fused: int
    plain: float
    compiled: float
    in_pass: float

    @property
    def share(self) -> float:
        """The time in the pass, in percent of the rest."""
        return 100 * self.in_pass / (self.compiled - self.in_pass)

    def __str__(self) -> str:
        times = f"plain {self.plain:.1f} s, compiled {self.compiled:.1f} s, of it the pass {self.in_pass:.2f} s"
        return f"compile, {self.layers} layers, {self.fused} fused: {times}"


def measure_pass(layers: Sequence[int], tokens_dim: int, rounds: int) -> list[PassRow]:
    Graphs(1, tokens_dim).run_pass()  # imports, and what is computed once
    every = [Graphs(num_layers, tokens_dim) for num_layers in layers]
    seconds = torch.zeros(rounds, len(every), dtype=torch.float64)
    reports = {}
    for round_ in range(rounds):
        for i, graphs in enumerate(every):
            seconds[round_, i], reports[graphs] = graphs.run_pass()
    rows = []
    for graphs, each in zip(every, seconds.unbind(1), strict=True):
        report = reports[graphs]
        facts = graphs.num_nodes, len(report.collectives), num_fused(report)
        rows.append(PassRow(graphs.num_layers, *facts, Timing.of(each)))
    return rows


def measure_whole(num_layers: int, tokens_dim: int) -> WholeRow:
    from fusedcomm.compile.passes import FusedcommPass

    in_pass = 0.0
    unclocked = FusedcommPass.__call__

    def clocked(*args: Any) -> None:
        nonlocal in_pass
        start = time.perf_counter()
        unclocked(*args)
        in_pass += time.perf_counter() - start

    compile_transformer(1, tokens_dim, generate_code)  # imports, a first look at the C++ compiler
    plain = compile_transformer(num_layers, tokens_dim, generate_code)
    with fusedcomm.compile.enabled() as report, mock.patch.object(FusedcommPass, "__call__", clocked):
        compiled = compile_transformer(num_layers, tokens_dim, generate_code)
    return WholeRow(num_layers, num_fused(report), plain, compiled, in_pass)


def num_fused(report: CompileReport) -> int:
    return sum(collective.status == "fused" for collective in report.collectives)


def summary(rows: Sequence[PassRow], whole: WholeRow | None) -> list[Goal]:
    found = []
    if len(rows) > 1:
        growth = rows[-1].ms_per_layer / rows[0].ms_per_layer
        found.append(at_most(f"pass per layer, {rows[-1].layers} / {rows[0].layers} layers", growth, GROWTH))
    if whole is not None:
        found.append(at_most(f"pass, % of compile, {whole.layers} layers", whole.share, SHARE))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with fake_group():
        rows = measure_pass(args.layers, args.tokens_dim, args.rounds)
        console.show(Table(COLUMNS, rows))
        whole = measure_whole(args.whole, args.tokens_dim) if args.whole else None
    if whole is not None:
        print(whole)
    goals = summary(rows, whole)
    print("", *goals, sep="\n")
    if args.json:
        facts = {"tokens_dim": args.tokens_dim, "rounds": args.rounds, "num_ranks": NUM_RANKS}
        passes = [asdict(row) | {"ms_per_layer": row.ms_per_layer} for row in rows]
        compiles = None if whole is None else asdict(whole) | {"share": whole.share}
        goal_facts = [asdict(goal) for goal in goals]
        console.write_json(args.json, run_facts() | facts | {"pass": passes, "compile": compiles, "goals": goal_facts})
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fusedcomm.bench.compile_time", description="The pass; whole compilations.")
    parser.add_argument("--layers", nargs="+", type=int, metavar="L", help=f"layers for the pass alone: {LAYERS}")
    parser.add_argument("--whole", type=int, metavar="L", help=f"layers compiled down to kernels: {WHOLE}; 0: none")
    parser.add_argument("--tokens-dim", type=int, choices=(0, 1), default=1, help="1: [batch, tokens, hidden]")
    parser.add_argument("--quick", action="store_true", help=f"layers {QUICK_LAYERS}, and {QUICK_WHOLE} compiled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    args.layers = args.layers or (QUICK_LAYERS if args.quick else LAYERS)
    if args.whole is None:
        args.whole = QUICK_WHOLE if args.quick else WHOLE
    return args


if __name__ == "__main__":
    sys.exit(main())
