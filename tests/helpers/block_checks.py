"""What the passes make of the blocks of tests/helpers/model_blocks.py, and whether all values stay:
`python -m tests.helpers.block_checks wan --layers 2 --dynamic` prints it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

import fusedcomm.compile
from fusedcomm.launch.ranks import RankPool
from fusedcomm.plan.cost.model import DEFAULTS
from tests.helpers.graphs import recorded_graphs
from tests.helpers.groups import left_as_found
from tests.helpers.model_blocks import BLOCKS, ROTARIES, Model, Size, Table, rotary_table

Values = dict[str, Tensor]
Differences = dict[str, float]
TINY = Size()


@dataclass(frozen=True)
class Case:
    block: str
    size: Size = TINY
    layers: int = 1
    rotary: str = ""  # as the block has it
    whole_tables: bool = False  # the rank's part of a rotary table is cut out in the program
    checkpointed: bool = False
    dynamic: bool = False  # in the number of tokens
    autocast: bool = False
    bfloat16: bool = False
    inference: bool = False
    unequal: bool = False  # each rank has weights of its own
    pairs: bool = False  # groups of two ranks that are not neighbours
    unmoved: bool = False  # exchanges stay where the block has them
    interpreted: bool = False  # graphs are run op by op: Inductor's code takes longer to compile

    def __str__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self)[1:] if getattr(self, f.name) != f.default}
        return " ".join([self.block, *(name if value is True else f"{name}={value}" for name, value in shown.items())])


FLAGS = [each.name for each in fields(Case) if each.type == "bool"]


@dataclass
class Outcome:
    """What a rank found. Each difference is relative to the largest value."""

    lines: list[str]  # the report's
    ops: dict[str, Counter[str]]  # by graph: fusedcomm's, each as often as it stands for a collective
    left: dict[str, list[tuple[str, str]]]  # by graph: the other collectives, their names and shapes
    saved_bytes: int  # what the compiled forward keeps for the backward, besides its inputs
    from_eager: Differences  # by value: from the same program in eager, on this rank
    from_one: Differences  # from one process in float32 that has all tokens; gradients of weights are summed over ranks

    def __str__(self) -> str:
        parts = []
        for graph, ops in self.ops.items():
            left = ", ".join(f"{n} {name} {shape}" for (name, shape), n in Counter(self.left[graph]).items())
            parts.append(f"{graph}: {dict(ops)}; left: {left or 'none'}")
        for other, by in (("eager", self.from_eager), ("one process", self.from_one)):
            if by:
                parts.append(f"worst difference from {other}: {max(by.values()):.1e}, {max(by, key=by.__getitem__)}")
        if self.saved_bytes:
            parts.append(f"saved for the backward: {self.saved_bytes} bytes")
        return "\n".join(parts)


def interpreted(gm: Any, inputs: list[Any]) -> Any:
    """A backend: Inductor with all its passes, forward and backward, without its code."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx, fake_tensor_prop, view_to_reshape
    from torch._inductor.fx_passes.control_dependencies import control_deps
    from torch._inductor.virtualized import V

    if torch._C.DispatchKey.CompositeExplicitAutograd not in control_deps.py_kernels:  # torch 2.11
        control_deps.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda deps, each, *args: each(*args))

    def after_passes(gm: Any, inputs: list[Any], is_inference: bool = False, **_: Any) -> Any:
        view_to_reshape(gm)
        with torch.no_grad():
            fake_tensor_prop(gm, inputs)  # a reshape's strides may be others than the view's
        with V.set_fake_mode(detect_fake_mode(inputs)):
            _recursive_post_grad_passes(gm, is_inference)
        return make_boxed_func(gm.forward)

    return compile_fx(gm, inputs, inner_compile=after_passes)


@dataclass(frozen=True)
class Data:
    """Input, and what weighs each element of the output."""

    streams: list[Tensor]  # [b, tokens, dim]
    weights: list[Tensor]
    tables: list[Table]  # [tokens, ...]

    @staticmethod
    def whole(case: Case, size: Size, ranks: int, seed: int) -> Data:
        generator = torch.Generator().manual_seed(seed)
        block = BLOCKS[case.block]
        lengths = [ranks * size.tokens, ranks * size.text][: block.streams]
        streams, weights = (
            [torch.randn(size.batch, length, size.dim, generator=generator) for length in lengths] for _ in range(2)
        )
        return Data(streams, weights, [rotary_table(case.rotary or block.rotary, n, size) for n in lengths])

    def part(self, case: Case, group: Any) -> Data:
        """This rank's; the streams in the dtype of the case."""
        ranks, rank, dtype = group.size(), group.rank(), torch.bfloat16 if case.bfloat16 else torch.float32
        streams, weights = (
            [each.chunk(ranks, 1)[rank].to(dtype) for each in tensors] for tensors in (self.streams, self.weights)
        )
        tables = [tuple(each.chunk(ranks)[rank] for each in table) for table in self.tables]
        return Data(streams, weights, self.tables if case.whole_tables else tables)


def outcome(rank: int, case: Case) -> Outcome:
    with left_as_found():
        group = dist.group.WORLD
        if case.pairs:
            half = dist.get_world_size() // 2
            groups = [dist.new_group([i, i + half]) for i in range(half)]
            group = groups[rank % half]
        return outcome_of(case, group, seed=rank % half if case.pairs else 0)


def outcome_of(case: Case, group: Any, seed: int) -> Outcome:
    model = make(case, group)
    saved: list[int] = []
    with no_latency(), recorded_graphs() as graphs, fusedcomm.compile.enabled(commute=not case.unmoved) as report:
        compiled = torch.compile(model, fullgraph=True, backend=interpreted if case.interpreted else "inductor")

        def program(streams: list[Tensor], tables: list[Table]) -> Any:
            with saved_tensors([*streams, *(t for table in tables for t in table), *model.parameters()]) as kept:
                outs = compiled(streams, tables)
            saved.append(sum(kept.values()))
            return outs

        found = compare(case, case.size, program, model, seed)
        if case.dynamic:
            num_graphs, larger = len(graphs), replace(case.size, tokens=case.size.tokens + 3, text=case.size.text + 5)
            for by, more in zip(found, compare(case, larger, program, model, seed), strict=True):
                by |= {f"{name} of more tokens": value for name, value in more.items()}
            assert len(graphs) == num_graphs, "another number of tokens must not compile the program again"
    phases = ["inference"] if case.inference else ["forward", "backward"]
    left = dict(zip(phases, map(collectives_left, graphs), strict=True))
    ops: dict[str, Counter[str]] = {phase: Counter() for phase in left}
    for line in report.collectives:
        if line.op is not None:
            ops[line.graph][line.op] += 1
    return Outcome([str(line) for line in report.collectives], ops, left, saved[0], *found)


@contextmanager
def saved_tensors(given: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """The bytes of each storage that autograd keeps of what runs meanwhile, besides what is given."""
    own, saved = {storage_of(t) for t in given}, {}

    def keep(t: Tensor) -> Tensor:
        if storage_of(t) not in own:
            saved[storage_of(t)] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        yield saved


def storage_of(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def no_latency() -> AbstractContextManager[object]:
    """Let the passes decide as for large tensors, whose bytes alone count."""
    constants = DEFAULTS["cpu"]
    free = replace(constants, backend_latency=dict.fromkeys(constants.backend_latency, 1e-9))
    return patch.dict(DEFAULTS, {"cpu": free})


def make(case: Case, group: Any) -> Model:
    model = Model(case.block, case.size, group, case.layers, case.rotary, case.checkpointed, case.whole_tables)
    if case.unequal:
        for parameter in model.parameters():
            parameter.data += 0.1 * group.rank() * torch.randn_like(parameter)
    return model.bfloat16() if case.bfloat16 and group is not None else model


def compare(case: Case, size: Size, program: Any, model: Model, seed: int) -> list[Differences]:
    group = model.group
    whole = Data.whole(case, size, group.size(), seed)
    data = whole.part(case, group)
    got, eager = run(case, program, model, data), run(case, model, model, data)
    if case.unequal:
        return [differences(got, eager), {}]
    alone = make(case, None)
    one = run(replace(case, autocast=False), alone, alone, whole)
    summed = {name: value.to(torch.float32, copy=True) for name, value in got.items()}
    for name, value in summed.items():
        if value.shape == one[name].shape:
            dist.all_reduce(value, group=group)
        else:
            one[name] = one[name].chunk(group.size(), 1)[group.rank()]
    return [differences(got, eager), differences(summed, one)]


def run(case: Case, program: Callable[..., Any], model: Model, data: Data) -> Values:
    streams = [each.clone().requires_grad_(not case.inference) for each in data.streams]
    if case.dynamic:
        for each, dim in [*((s, 1) for s in streams), *((t, 0) for table in data.tables for t in table)]:
            torch._dynamo.mark_dynamic(each, dim)
    autocast = torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext()
    with torch.set_grad_enabled(not case.inference), autocast:
        outs = program(streams, data.tables)
    values = {f"y{i}": out.detach() for i, out in enumerate(outs)}
    if not case.inference:
        names = [f"grad x{i}" for i in range(len(streams))] + [f"grad {name}" for name, _ in model.named_parameters()]
        loss = sum((out * weight).sum() for out, weight in zip(outs, data.weights, strict=True))
        values |= zip(names, torch.autograd.grad(loss, [*streams, *model.parameters()]), strict=True)
    return values


def differences(got: Values, want: Values) -> Differences:
    assert got.keys() == want.keys()
    return {name: float((got[name] - t).abs().max() / (1 + t.abs().max())) for name, t in want.items()}


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
    parser.add_argument("--lines", action="store_true", help="print the report too")
    for flag in FLAGS:
        parser.add_argument(f"--{flag.replace('_', '-')}", action="store_true")
    for each in fields(Size):
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=int, default=each.default)
    args = vars(parser.parse_args())
    size = Size(**{each.name: args[each.name] for each in fields(Size)})
    options = {name: args[name] for name in ("layers", "rotary", *FLAGS)}
    with RankPool(args["ranks"]) as pool:
        for block in BLOCKS if args["block"] == "all" else [args["block"]]:
            case = Case(block, size, **options)
            found = pool.run(outcome, case)[0]
            print(case, found, *(found.lines if args["lines"] else ()), sep="\n", flush=True)


if __name__ == "__main__":
    main()
