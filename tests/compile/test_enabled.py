"""fusedcomm.compile: switched on and off, among other passes; the start program; caches; what happens when it fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx import Graph

import fusedcomm.compile
from fusedcomm.launch.ranks import RankPool
from tests.compile.test_lowering import called, codes_of
from tests.helpers.fragments import FRAGMENTS
from tests.helpers.graphs import collectives_of, recorded_graphs, targets
from tests.helpers.on_ranks import on_ranks
from tests.helpers.program_parts import all_gather, world


def theirs(graph: Graph) -> None:
    """A pass of somebody else."""


def others(graph: Graph) -> None:
    """Another pass of somebody else."""


@pytest.fixture
def config() -> Iterator[Any]:
    from torch._inductor import config

    with config.patch(post_grad_custom_pre_pass=None):
        yield config
        fusedcomm.compile.disable()


def passes_of(config: Any) -> list[Any]:
    from fusedcomm.compile import inductor

    return inductor._passes(config.post_grad_custom_pre_pass)


@pytest.mark.parametrize("before", [None, theirs, [theirs, others]], ids=["none", "one", "several"])
def test_what_was_set_before_comes_back(config: Any, before: Any) -> None:
    config.post_grad_custom_pre_pass = before
    settings = config.save_config_portable()
    fusedcomm.compile.enable()
    assert type(passes_of(config)[-1]).__name__ == "FusedcommPass"
    fusedcomm.compile.enable()  # again changes nothing
    fusedcomm.compile.disable()
    assert config.post_grad_custom_pre_pass is before
    assert config.save_config_portable() == settings
    fusedcomm.compile.disable()
    assert config.post_grad_custom_pre_pass is before


def test_passes_set_since_stay(config: Any) -> None:
    config.post_grad_custom_pre_pass = theirs
    fusedcomm.compile.enable()
    config.post_grad_custom_pre_pass = [*passes_of(config), others]
    fusedcomm.compile.disable()
    assert passes_of(config) == [theirs, others]
    fusedcomm.compile.enable()
    config.post_grad_custom_pre_pass = others  # the passes of fusedcomm thrown out
    fusedcomm.compile.disable()
    assert config.post_grad_custom_pre_pass is others


def test_a_with_statement_inside_an_enabled_program(config: Any) -> None:
    import torch._functorch.config as functorch_config

    lazy = functorch_config.force_non_lazy_backward_lowering
    fusedcomm.compile.enable()
    outer, outside = fusedcomm.compile.report(), config.post_grad_custom_pre_pass
    with fusedcomm.compile.enabled(fuse=["matmul_all_reduce"]) as inner:
        assert inner is fusedcomm.compile.report() is not outer
        assert config.post_grad_custom_pre_pass.settings.fuse == ("matmul_all_reduce",)
        assert functorch_config.force_non_lazy_backward_lowering
    assert fusedcomm.compile.report() is outer and config.post_grad_custom_pre_pass is outside
    assert functorch_config.force_non_lazy_backward_lowering == lazy


def test_unknown_ops_are_refused(config: Any) -> None:
    with pytest.raises(ValueError, match=r"fuse must name ops of .*, got 'all_reduce'"):
        fusedcomm.compile.enable(fuse=["all_reduce"])
    assert config.post_grad_custom_pre_pass is None


def test_where_inductor_takes_one_pass_only(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.12, there is one slot for a pass: both run, in order, and a cache key needs both."""
    from fusedcomm.compile import inductor

    monkeypatch.setattr(inductor, "_LISTS", False)
    config.post_grad_custom_pre_pass = theirs
    fusedcomm.compile.enable()
    both = config.post_grad_custom_pre_pass
    assert both.passes[0] is theirs and both.uuid() is None  # theirs has none, so nothing is cached
    both(Graph())
    fusedcomm.compile.disable()
    assert config.post_grad_custom_pre_pass is theirs


def matmul_and_reshard_heads(xs: Any, ws: Any, device_mesh: Any, num_heads: int = 16, async_op: bool = True) -> Any:
    """The start program, as users write it with DTensor."""
    from torch.distributed.tensor import DTensor, Shard

    ys = []
    for x, w in zip(xs, ws, strict=True):
        y = torch.matmul(x, w)
        batch, tokens, hidden = y.shape
        y = y.view(batch, tokens, num_heads, hidden // num_heads)
        d = DTensor.from_local(y, device_mesh=device_mesh, placements=(Shard(1),))
        d = d.redistribute(device_mesh=device_mesh, placements=(Shard(-2),), async_op=async_op)
        ys.append(d.to_local())
    return ys


@pytest.mark.thorough
@on_ranks()
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_the_start_program(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh, num_pairs = init_device_mesh("cpu", (world_size,)), 3
    generator = torch.Generator().manual_seed(rank)
    shapes = [(2, 6, 8)] * num_pairs + [(2, 8, 32)] * num_pairs
    args = [torch.randint(-2, 3, s, generator=generator).float().requires_grad_() for s in shapes]

    def run(program: Callable[..., Any]) -> list[Tensor]:
        outs = program(args[:num_pairs], args[num_pairs:], mesh)
        grads = torch.autograd.grad(outs, args, [torch.arange(o.numel()).view(o.shape) % 3.0 for o in outs])
        return [o.detach() for o in outs] + list(grads)

    want = run(matmul_and_reshard_heads)
    with fusedcomm.compile.enabled() as report:
        got, codes = codes_of(run, matmul_and_reshard_heads)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert [t.stride() for t in got] == [t.stride() for t in want]
    assert [called(code) for code in codes] == [
        ["matmul_all_to_all.default"] * num_pairs,
        ["all_to_all_matmul.default"] * num_pairs,
    ]
    assert [line.status for line in report.collectives] == ["fused"] * 2 * num_pairs
    assert [line.plan for line in report.collectives] == ["chunked"] * 2 * num_pairs
    assert not any("wait_tensor" in code or "all_gather" in code for code in codes)


def own_part_of_a_gather(index: int) -> Callable[[Tensor, Tensor], Tensor]:
    def program(x: Tensor, w: Tensor) -> Tensor:
        gathered = all_gather(x @ w, 0, world())
        return gathered.chunk(2, 1)[index].contiguous()

    return program


@pytest.mark.thorough
@on_ranks(2)
@pytest.mark.parametrize("part", ["own", "first", "other"])
def test_a_gather_stays_of_which_the_program_itself_takes_a_part(rank: int, part: str) -> None:
    """Whose part it is shows on one rank, not on all: the first part is rank 0's own.

    DTensor's own calls become exchanges.
    """
    x, w = torch.randn(4, 6) + rank, torch.randn(6, 8)
    program = own_part_of_a_gather({"own": rank, "first": 0, "other": 1 - rank}[part])
    with recorded_graphs() as graphs, fusedcomm.compile.enabled():
        out = torch.compile(program, fullgraph=True)(x, w)
    torch.testing.assert_close(out, program(x, w))
    assert targets(graphs[0], "fusedcomm") == []
    assert collectives_of(graphs[0]) == ["all_gather_into_tensor"]


@on_ranks(2)
@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("normalize", "find"),
        pytest.param("normalize", "rewrite", marks=pytest.mark.thorough),
        pytest.param("rewrite", "arrange", marks=pytest.mark.thorough),
        pytest.param("rewrite", "call", marks=pytest.mark.thorough),
    ],
)
def test_a_pass_that_fails_leaves_the_graph(rank: int, module: str, function: str) -> None:
    """A bug in a pass, half way through a rewrite, leaves the graph as it was: right values, and one warning."""
    import importlib

    from fusedcomm.compile.graph import attempt
    from fusedcomm.compile.graph.rewrite import Rewriter

    attempt._warn_once.cache_clear()
    fragment = next(each for each in FRAGMENTS if each.name == "three-pairs")
    program, shapes = fragment.make(dist.get_world_size())
    args = [torch.randn(shape) for shape in shapes]
    with recorded_graphs() as plain:
        want = torch.compile(program, fullgraph=True)(*args)

    def broken(*args: Any) -> Any:
        raise AssertionError("on purpose")

    with (
        pytest.MonkeyPatch.context() as patch,
        recorded_graphs() as graphs,
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        if module == "rewrite":
            patch.setattr(Rewriter, function, broken)
        else:
            patch.setattr(importlib.import_module(f"fusedcomm.compile.graph.{module}"), function, broken)
        with fusedcomm.compile.enabled() as report:
            got = torch.compile(program, fullgraph=True)(*args)
    torch.testing.assert_close(got, want)
    assert (
        [collectives_of(graph) for graph in graphs]
        == [["all_gather_into_tensor"] * 3]
        == list(map(collectives_of, plain))
    )
    assert not targets(graphs[0], "fusedcomm") and len(graphs[0].nodes) == len(plain[0].nodes)
    messages = [str(w.message) for w in seen if "fusedcomm" in str(w.message)]
    assert len(messages) == 1 and "AssertionError: on purpose" in messages[0]
    assert all(line.status == "exposed" for line in report.collectives)


def cache_hits(rank: int, tag: str, fuse: list[str] | None) -> tuple[int, int]:
    from torch._dynamo.utils import counters

    def program(x: Tensor, w: Tensor) -> Tensor:
        return funcol.all_reduce(x @ w, "sum", world())

    torch._dynamo.reset()
    counters.clear()
    settings: Any = torch.compiler.config
    # nothing but this test hits its entries, all ranks alike
    with settings.patch(cache_key_tag=f"{tag}/{rank}"), fusedcomm.compile.enabled(fuse):
        out = torch.compile(program, fullgraph=True)(torch.ones(12, 3), torch.ones(3, 6))
    assert (out == 3 * dist.get_world_size()).all()
    return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.thorough
def test_cached_graphs(ranks: Any, tmp_path: Path) -> None:
    """A second process hits the cache; with another setting it misses, and so does a group of another size."""
    hit, miss = [(1, 0)] * 2, [(0, 1)] * 2
    assert ranks(2).run(cache_hits, str(tmp_path), None) == miss
    assert ranks(3).run(cache_hits, str(tmp_path), None) == [(0, 1)] * 3
    with RankPool(2) as fresh:
        assert fresh.run(cache_hits, str(tmp_path), None) == hit
        assert fresh.run(cache_hits, str(tmp_path), []) == miss
        assert fresh.run(cache_hits, str(tmp_path), []) == hit


@on_ranks(2)
def test_ops_keep_the_place_of_their_collective(rank: int) -> None:
    """The ranks multiply at different times what they gather; their collectives keep the one order that both have."""

    def program(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        gathered = all_gather(x, 0, world())
        if rank == 0:
            return gathered @ w.mT.contiguous().mT, funcol.all_reduce(y, "sum", world())
        reduced = funcol.all_reduce(y, "sum", world())
        return gathered @ w.mT.contiguous().mT, reduced

    x, w, y = torch.randn(3, 4) + rank, torch.randn(4, 5), torch.randn(7) + rank
    want = program(x, w, y)
    with recorded_graphs() as graphs, fusedcomm.compile.enabled():
        got = torch.compile(program, fullgraph=True)(x, w, y)
    torch.testing.assert_close(got, want)
    names = [str(n.target) for n in graphs[0].nodes if "all_" in str(n.target)]
    assert names == ["fusedcomm.all_gather_matmul.default", "_c10d_functional.all_reduce.default"]
