"""What the passes make of the blocks of tests/helpers/model_blocks.py, and whether the values stay.

    python -m tests.helpers.block_checks wan --layers 2 --dynamic
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

import fusedcomm.compile
from fusedcomm.launch.ranks import RankPool
from tests.helpers.graphs import recorded_graphs
from tests.helpers.model_blocks import BLOCKS, ROTARIES, Model, Size, Table, rotary_table

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    block: str
    size: Size = Size()
    layers: int = 1
    rotary: str = ""  # as the block has it
    checkpointed: bool = False
    dynamic: bool = False  # in the number of tokens
    autocast: bool = False
    training: bool = True
    generated: bool = True  # runs what Inductor generates; else its graphs, op by op, which takes less time

    def __str__(self) -> str:
        said = [f"{f.name} {getattr(self, f.name)}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return ", ".join([self.block, *said])


@dataclass
class Outcome:
    """What a rank found. Differences are relative to the largest value."""

    lines: list[str]  # of the report
    fused: dict[str, Counter[str]]  # by graph: ops, each as often as it stands for an exchange
    left: dict[str, list[tuple[str, str]]]  # by graph: the other collectives, their names and shapes
    from_eager: dict[str, float]  # by value: of the compiled program from the same program in eager, on this rank
    from_one: dict[str, float]  # from one process that has all tokens, gradients of weights summed over the ranks

    def __str__(self) -> str:
        parts = [f"{graph}: fused {dict(ops)}, left {self.left[graph]}" for graph, ops in self.fused.items()]
        worst = [f"{max(by.values()):.1e} ({max(by, key=by.__getitem__)})" for by in (self.from_eager, self.from_one)]
        return "\n".join([*parts, f"worst difference from eager {worst[0]}, from one process {worst[1]}"])


def interpreted(gm: Any, inputs: list[Any]) -> Any:
    """A backend: Inductor with all its passes, and the graphs run op by op."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx
    from torch._inductor.virtualized import V

    def after_passes(gm: Any, inputs: list[Any], is_inference: bool = False, **_: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            _recursive_post_grad_passes(gm, is_inference)
        return make_boxed_func(gm.forward)

    return compile_fx(gm, inputs, inner_compile=after_passes)


@dataclass(frozen=True)
class Data:
    """The whole program's input and what weighs its output; ``of`` gives a rank's part."""

    streams: list[Tensor]  # [b, R t, dim]
    weights: list[Tensor]
    tables: list[Table]  # [R t, ...]

    @staticmethod
    def of_case(case: Case, size: Size, world_size: int) -> Data:
        generator = torch.Generator().manual_seed(2)
        block = BLOCKS[case.block]
        lengths = [size.tokens * world_size, size.text * world_size][: block.streams]
        streams, weights = (
            [torch.randn(size.batch, length, size.dim, generator=generator) for length in lengths] for _ in range(2)
        )
        return Data(streams, weights, [rotary_table(case.rotary or block.rotary, n, size) for n in lengths])

    def of_rank(self, rank: int, world_size: int) -> Data:
        def part(t: Tensor, dim: int) -> Tensor:
            return t.chunk(world_size, dim)[rank].contiguous()

        tables = [tuple(part(t, 0) for t in table) for table in self.tables]
        return Data([part(t, 1) for t in self.streams], [part(t, 1) for t in self.weights], tables)


def run(case: Case, program: Callable[..., Any], model: Model, data: Data) -> Values:
    """Outputs; in training the gradients of every input and parameter too."""
    streams = [each.clone().requires_grad_(case.training) for each in data.streams]
    if case.dynamic:
        for each, dim in [*((s, 1) for s in streams), *((t, 0) for table in data.tables for t in table)]:
            torch._dynamo.mark_dynamic(each, dim)
    with torch.set_grad_enabled(case.training), autocast(case):
        outs = program(streams, data.tables)
    values = {f"y{i}": out.detach() for i, out in enumerate(outs)}
    if case.training:
        names = [f"grad x{i}" for i in range(len(streams))] + [f"grad {name}" for name, _ in model.named_parameters()]
        loss = sum((out * weight).sum() for out, weight in zip(outs, data.weights, strict=True))
        values |= zip(names, torch.autograd.grad(loss, [*streams, *model.parameters()]), strict=True)
    return values


def autocast(case: Case) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext()


def differences(got: Values, want: Values) -> dict[str, float]:
    assert got.keys() == want.keys()
    return {
        name: float((value - want[name]).abs().max() / (1 + want[name].abs().max())) for name, value in got.items()
    }


def outcome(rank: int, case: Case) -> Outcome:
    """Compile the case on this rank of WORLD, run it, and compare."""
    world = dist.group.WORLD
    model = make(case, world)
    backend = "inductor" if case.generated else interpreted
    with recorded_graphs() as graphs, fusedcomm.compile.enabled() as report:
        program = torch.compile(model, fullgraph=True, backend=backend)
        found = compare(case, case.size, program, model)
        compiled = len(graphs)
        if case.dynamic:
            larger = replace(case.size, tokens=case.size.tokens + 3, text=case.size.text + 5)
            for by, more in zip(found, compare(case, larger, program, model), strict=True):
                by |= {f"{name} of more tokens": value for name, value in more.items()}
            assert len(graphs) == compiled, "other sizes must not compile again"
    phases = ["forward", "backward"] if case.training else ["inference"]
    fused = {
        phase: Counter(str(c.op) for c in report.collectives if (c.graph, c.status) == (phase, "fused"))
        for phase in phases
    }
    left = {phase: collectives_left(graph) for phase, graph in zip(phases, graphs, strict=True)}
    return Outcome([str(line) for line in report.collectives], fused, left, *found)


def make(case: Case, group: Any) -> Model:
    return Model(case.block, case.size, group, case.layers, case.rotary, case.checkpointed)


def compare(case: Case, size: Size, program: Any, model: Model) -> list[dict[str, float]]:
    """How far the compiled program is from eager here, and from one process."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = Data.of_case(case, size, world_size)
    data = whole.of_rank(rank, world_size)
    got, eager = run(case, program, model, data), run(case, model, model, data)
    alone = make(case, None)
    one = run(replace(case, autocast=False), alone, alone, whole)
    summed = {name: value.clone() for name, value in got.items()}
    for name, value in summed.items():
        if value.shape == one[name].shape:
            dist.all_reduce(value)
        else:
            one[name] = one[name].chunk(world_size, 1)[rank]
    return [differences(got, eager), differences(summed, one)]


def collectives_left(graph: Graph) -> list[tuple[str, str]]:
    nodes = [node for node in graph.nodes if getattr(node.target, "namespace", "") in ("_c10d_functional", "_dtensor")]
    named = [(node.target._opname, str([*node.meta["val"].shape])) for node in nodes]
    return [each for each in named if each[0] != "wait_tensor"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("block", choices=[*BLOCKS, "all"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--rotary", default="", choices=["", *ROTARIES])
    for flag in ("checkpointed", "dynamic", "autocast", "inference", "interpreted", "lines"):
        parser.add_argument(f"--{flag}", action="store_true")
    for name in (each.name for each in fields(Size)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Size(), name))
    args = vars(parser.parse_args())
    size = Size(**{each.name: args[each.name] for each in fields(Size)})
    shared = {name: args[name] for name in ("layers", "rotary", "checkpointed", "dynamic", "autocast")}
    with RankPool(args["ranks"]) as pool:
        for block in BLOCKS if args["block"] == "all" else [args["block"]]:
            case = Case(block, size, **shared, training=not args["inference"], generated=not args["interpreted"])
            found = pool.run(outcome, case)[0]
            print(case, found, *(found.lines if args["lines"] else ()), sep="\n", flush=True)


if __name__ == "__main__":
    main()
