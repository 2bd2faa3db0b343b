"""fusedcomm.compile: switched on and off, among other passes; caches; a pass that fails."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx import Graph

import fusedcomm
import fusedcomm.compile
from fusedcomm import files
from fusedcomm.compile.graph import attempt, normalize
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.passes import FusedcommPass, OrderPass, Settings
from fusedcomm.compile.reports import CompileReport
from fusedcomm.launch.ranks import RankPool
from fusedcomm.memory.consent import ABSENT, Answer, Consent
from tests.helpers.fragments import FRAGMENTS
from tests.helpers.graphs import aten_graph, cache_counts, run_passes, targets
from tests.helpers.merge_world import fake_world, traced
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


def test_settings_of_one_compile_leave_our_passes(config: Any) -> None:
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx

    plain, seen = compile_fx.compile_fx, []

    def compiled(gm: Any, inputs: Any, **_: Any) -> Any:
        seen.append([each if each is theirs else type(each).__name__ for each in passes_of(config)])
        return make_boxed_func(gm.forward)

    def backend(gm: Any, inputs: Any) -> Any:
        patches = {"post_grad_custom_pre_pass": theirs}
        return compile_fx.compile_fx(gm, inputs, inner_compile=compiled, config_patches=patches)

    fusedcomm.compile.enable()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    config.post_grad_custom_pre_pass = theirs  # set since
    torch.compile(lambda x: x + 2, backend=backend)(torch.ones(2))
    fusedcomm.compile.disable()
    torch.compile(lambda x: x + 3, backend=backend)(torch.ones(2))
    assert seen == [[theirs, "FusedcommPass"]] * 2 + [[theirs]] and compile_fx.compile_fx is plain


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


@pytest.mark.parametrize("part", [0, 1])  # this rank's own, and its peer's
def test_a_gather_stays_of_which_the_program_itself_takes_a_part(part: int) -> None:
    """Whose part it is shows on one rank, not on all: the first part is rank 0's own."""
    with fake_world([0, 1]):
        graph = traced(lambda x, w: all_gather(x @ w, 0, world()).chunk(2, 1)[part].contiguous(), (4, 6), (6, 8)).graph
        for node in graph.nodes:
            node.meta["source_fn_stack"] = [(node.name, node.target)]  # lines of the program, not one call of DTensor
        run_passes(graph)
    assert targets(graph, "fusedcomm") == ["all_gather"]


@pytest.mark.parametrize(
    ("owner", "function"), [(normalize, "find"), (normalize, "rewrite"), (Rewriter, "arrange"), (Rewriter, "call")]
)
def test_a_pass_that_fails_leaves_the_graph(monkeypatch: pytest.MonkeyPatch, owner: Any, function: str) -> None:
    """A bug in a pass, half way through a rewrite, leaves the matmul as it was, with a warning."""

    def broken(*args: Any) -> Any:
        raise AssertionError("on purpose")

    attempt._warn_once.cache_clear()
    report = CompileReport()
    with fake_world([0, 1]):
        fragment = next(each for each in FRAGMENTS if each.name == "start-program")
        program, shapes = fragment.make(2)
        graph = traced(program, *shapes).graph
        before = str(graph), targets(graph, "aten")
        monkeypatch.setattr(owner, function, broken)
        with pytest.warns(UserWarning, match="AssertionError: on purpose") as seen:
            FusedcommPass(Settings(), report)(graph)
    (line,) = report.collectives
    if function == "call":
        assert str(graph) == before[0] and line.status == "exposed" and len(seen) <= 2
    else:
        assert (targets(graph, "aten"), targets(graph, "fusedcomm")) == (before[1], ["all_gather"])
        assert line.status == "plain" and len(seen) == 1


def cache_hits(rank: int, tag: str, fuse: list[str] | None) -> tuple[int, int]:
    def run() -> None:
        with fusedcomm.compile.enabled(fuse):
            program = torch.compile(lambda x, w: funcol.all_reduce(x @ w, "sum", world()), fullgraph=True)
            assert (program(torch.ones(12, 3), torch.ones(3, 6)) == 3 * dist.get_world_size()).all()

    return cache_counts(f"{tag}/{rank}", run)[:2]


@pytest.mark.nightly
def test_cached_graphs(ranks: Any, tmp_path: Path) -> None:
    hit, miss = [(1, 0)] * 2, [(0, 1)] * 2
    assert ranks(2).run(cache_hits, str(tmp_path), None) == miss
    with RankPool(2) as fresh:
        assert fresh.run(cache_hits, str(tmp_path), None) == hit
        assert fresh.run(cache_hits, str(tmp_path), []) == miss
        assert fresh.run(cache_hits, str(tmp_path), []) == hit


@on_ranks(2)
@pytest.mark.thorough
def test_a_graph_without_consent_is_not_cached(rank: int, tmp_path: Path) -> None:
    """Else a rank whose peers were late once would never ask them again."""

    def heads(x: Tensor, w: Tensor) -> Tensor:
        blocks = (x @ w).view(8, 2, 3).permute(1, 0, 2).contiguous()
        return funcol.all_to_all_single(blocks, None, None, world()).view(16, 3)

    def program(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return heads(x, q) * heads(x, k)

    args = torch.ones(8, 4), torch.ones(4, 6), torch.ones(4, 6)

    def run() -> None:
        with fusedcomm.compile.enabled():
            assert (torch.compile(program, fullgraph=True)(*args) == 16).all()

    def seen() -> tuple[int, list[str]]:
        hits = cache_counts(f"{tmp_path}/{rank}", run)[0]
        return hits, [str(line.reason) for line in fusedcomm.compile.report().collectives]

    with patch.object(Consent, "ask", lambda *args, **kwargs: Answer(ABSENT, (1 - rank,), (1 - rank,))):
        hits, reasons = seen()
    assert hits == 0 and any("did not come" in each for each in reasons)
    hits, reasons = seen()
    assert hits == 0 and not any("did not come" in each for each in reasons)
    assert seen()[0] == 1


@pytest.mark.parametrize("multiplied_first", [True, False])
def test_ops_keep_the_place_of_their_collective(multiplied_first: bool) -> None:
    def program(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        gathered = all_gather(x, 0, world())
        product = gathered @ w.mT.contiguous().mT if multiplied_first else None
        reduced = funcol.all_reduce(y, "sum", world())
        return gathered @ w.mT.contiguous().mT if product is None else product, reduced

    with fake_world([0, 1]):
        graph = aten_graph(program, [torch.ones(3, 4), torch.ones(4, 5), torch.ones(7)]).graph
        run_passes(graph)
    names = [str(n.target) for n in graph.nodes if "all_" in str(n.target)]
    assert names == ["fusedcomm.all_gather_matmul.default", "fusedcomm.all_reduce.default"]


# the key of graphs that are kept
def key_of(package: Path) -> str:
    spec = importlib.util.spec_from_file_location("files_of_the_copy", package / "files.py")
    assert spec is not None and spec.loader is not None
    copy: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy.cache_key("a fact")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    source = Path(fusedcomm.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "kernels")
    return Path(shutil.copytree(source, tmp_path / "fusedcomm", ignore=ignored))


@pytest.mark.parametrize("edited", ["plan/geometry/spans.py", "plan/cost/model.py", "compile/graph/views.py", "env.py"])
def test_an_edit_of_what_makes_graphs_changes_the_key(package: Path, edited: str) -> None:
    before = key_of(package)
    with open(package / edited, "a") as file:
        file.write("# another program\n")
    assert key_of(package) != before


def test_a_new_file_changes_the_key_and_a_tool_does_not(package: Path) -> None:
    before = key_of(package)
    assert before == key_of(package) == files.cache_key("a fact") != files.cache_key("another fact")
    for edited in ("tools/explain.py", "launch/console.py", "testing.py"):
        with open(package / edited, "a") as file:
            file.write("# another tool\n")
    assert key_of(package) == before
    (package / "compile" / "new_pass.py").write_text("")
    assert key_of(package) != before


def test_all_passes_go_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[Any] = [FusedcommPass(Settings(), CompileReport()), OrderPass(Settings())]
    before = [each.uuid() for each in passes]
    assert before == [each.uuid() for each in passes]
    monkeypatch.setattr(files, "_sources_digest", lambda: "other sources")
    assert not set(before) & {each.uuid() for each in passes}
