"""Programs through torch.compile with the passes: their graphs after Inductor's passes, and their values."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fusedcomm.compile
from fusedcomm.compile.passes import FusedcommPass, Settings
from fusedcomm.compile.reports import CompileReport
from tests.helpers.fragments import FRAGMENTS, Fragment


def aten_graph(program: Callable[..., Any], args: Sequence[Tensor]) -> GraphModule:
    """The program as Inductor hands it to its first pass: decomposed, with reshapes for views."""
    from torch._inductor.compile_fx import view_to_reshape
    from torch._inductor.decomposition import select_decomp_table

    gm = make_fx(program, select_decomp_table(), tracing_mode="fake")(*args)
    view_to_reshape(gm)  # strides may change
    return gm


def run_passes(graph: Graph, **settings: Any) -> CompileReport:
    report = CompileReport()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusedcomm")  # a pass that fails says so
        FusedcommPass(Settings(**settings), report)(graph)
    graph.lint()
    graph.owning_module.recompile()
    return report


def rewritten(program: Callable[..., Any], args: Sequence[Tensor]) -> tuple[GraphModule, CompileReport]:
    gm = aten_graph(program, args)
    return gm, run_passes(gm.graph)


@contextmanager
def recorded_graphs() -> Iterator[list[Graph]]:
    """Every graph that Inductor compiles, forward before backward. Nothing comes from a cache."""
    import torch._functorch.config as functorch_config
    from torch._inductor import config

    graphs: list[Graph] = []

    def record(graph: Graph) -> None:
        copy = Graph()
        copy.graph_copy(graph, {})
        graphs.append(copy)

    torch._dynamo.reset()
    # no cached graphs; but cached kernels, as C++ takes long
    settings = {"fx_graph_cache": False, "post_grad_custom_post_pass": record}
    with config.patch(settings), functorch_config.patch(enable_autograd_cache=False):
        yield graphs


def cache_counts(tag: str, run: Callable[[], Any]) -> tuple[int, int, int]:
    """Hits, misses and bypasses of Inductor's cache in a run, of entries that only runs of this tag hit."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    settings: Any = torch.compiler.config
    with settings.patch(cache_key_tag=tag):
        run()
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], found["fxgraph_cache_bypass"]


def targets(graph: Graph, namespace: str) -> list[str]:
    """The ops of a namespace in a graph, but for the question whether all ranks have changed theirs."""
    ops = (node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    return [op._opname for op in ops if op.namespace == namespace and op._opname != "same_moves"]


def collectives_of(graph: Graph) -> list[str]:
    names = targets(graph, "_c10d_functional") + targets(graph, "_dtensor")
    return [name for name in names if name != "wait_tensor"]


def arguments(fragment: Fragment, shapes: list[tuple[int, ...]], rank: int) -> list[Tensor]:
    """Small integers, so that every sum is exact in float32, and sums in half precision are the same in any order."""
    generator = torch.Generator().manual_seed(rank)
    args = [torch.randint(-2, 3, shape, generator=generator).float() for shape in shapes]
    return [arg.requires_grad_(fragment.grad and i not in fragment.frozen) for i, arg in enumerate(args)]


def run(fragment: Fragment, program: Callable[..., Any], args: list[Tensor]) -> list[Tensor]:
    """The outputs, then the gradients of a loss that weighs every element differently."""
    params = list(program.parameters()) if isinstance(program, nn.Module) else []
    inputs = [t for t in (*args, *params) if t.requires_grad]
    with ExitStack() as stack:
        if fragment.autocast:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        out = program(*args)
    outs = [out] if isinstance(out, Tensor) else list(out)
    if not fragment.grad:
        return outs
    loss = sum((o * (torch.arange(o.numel()) % 5 - 2).to(o.dtype).view(o.shape)).sum() for o in outs)
    grads = torch.autograd.grad(loss, inputs)
    return [o.detach() for o in outs] + [g.to_local() if hasattr(g, "to_local") else g for g in grads]


def check_fragment(rank: int, name: str, backend: Any) -> None:
    """Values and strides are the plain program's; the graphs have the ops, and no collectives."""
    fragment = next(each for each in FRAGMENTS if each.name == name)
    program, shapes = fragment.make(torch.distributed.get_world_size())
    args = arguments(fragment, shapes, rank)
    for dim in fragment.dynamic:
        torch._dynamo.mark_dynamic(args[0], dim)
    want = run(fragment, program, args)
    with recorded_graphs() as graphs, fusedcomm.compile.enabled() as report:
        compiled = torch.compile(program, fullgraph=True, backend=backend)
        if isinstance(program, nn.Module):
            compiled.parameters = program.parameters  # type: ignore[attr-defined]
        got = run(fragment, compiled, args)
    check_graphs(fragment, graphs, report)
    tolerance = {"rtol": 0, "atol": 0} if fragment.exact else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(got, want, **tolerance)
    assert list(map(strides, got)) == list(map(strides, want))


def strides(t: Tensor) -> list[int]:
    """The strides of the dims that have more than one element."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def check_graphs(fragment: Fragment, graphs: list[Graph], report: CompileReport) -> None:
    ops = [fragment.forward, fragment.backward] if fragment.grad else [fragment.forward]
    text = "\n".join(map(str, report.collectives))
    assert [targets(graph, "fusedcomm") for graph in graphs] == ops, text
    assert not any(map(collectives_of, graphs)), text
    alone = [line for line in report.collectives if line.status != "fused"]
    assert [line.op for line in alone] == [op for each in ops for op in each if "matmul" not in op], text
    assert all(line.reason for line in alone), text
    phases = ["forward", "backward"] if fragment.grad else ["inference"]
    assert {line.graph for line in report.collectives} <= set(phases), text
    fused = [line for line in report.collectives if line.status == "fused"]
    assert all(line.saving_us > 0 and line.plan for line in fused), text
    assert all(line.source.rpartition(":")[0].endswith(".py") for line in report.collectives), text
