"""The passes over one graph, as one pass of Inductor's: find, match, rewrite, and a line of the report each."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from fusedcomm.compile import (
    chain,
    collectives,
    fuse_all_gather_matmul,
    fuse_all_to_all_matmul,
    fuse_matmul_all_reduce,
    fuse_matmul_all_to_all,
    fuse_matmul_reduce_scatter,
    gathered,
    layout,
    lowering,
    normalize,
    parts,
    product,
    reduced,
    rewrite,
)
from fusedcomm.compile.layout import CannotFuse
from fusedcomm.compile.reports import Call, CollectiveReport, Report, source_of
from fusedcomm.compile.rewrite import Rewriter, held_outputs
from fusedcomm.compile.saving import saving_us

log = logging.getLogger(__name__)

FUSE = (  # where two want one collective, the first takes it
    fuse_matmul_all_to_all,
    fuse_all_to_all_matmul,
    fuse_all_gather_matmul,
    fuse_matmul_reduce_scatter,
    fuse_matmul_all_reduce,
)
OPS = tuple(module.OP for module in FUSE)
_SOURCES = (chain, collectives, *FUSE, gathered, layout, lowering, normalize, parts, product, reduced, rewrite)


@dataclass(frozen=True)
class Settings:
    """What changes the graphs that come out."""

    fuse: tuple[str, ...] = OPS


class FusedcommPass(CustomGraphPass):
    """Never breaks a program: what cannot be done, for whatever reason, leaves the graph as it was."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self.settings = settings
        self.report = report

    def __call__(self, graph: Graph) -> None:
        if any(collectives.kind_of(node) for node in graph.nodes):
            lines = _Run(graph, _phase(graph), self.settings).lines()
            for line in lines:
                log.debug("%s", line)
            self.report.collectives += lines

    def uuid(self) -> Any:
        files = (__file__, *(str(module.__file__) for module in _SOURCES))
        return get_hash_for_files(files, repr((self.settings, collectives.memberships(), torch.__version__)))


class _Run:
    """Over one graph."""

    def __init__(self, graph: Graph, phase: str, settings: Settings) -> None:
        self.graph, self.phase, self.settings = graph, phase, settings
        self.rewriter = Rewriter(graph)
        self.reasons: dict[Node, list[str]] = {}

    def lines(self) -> list[CollectiveReport]:
        with held_outputs(self.graph):
            return self._lines()

    def _lines(self) -> list[CollectiveReport]:
        for exchange in self._try("normalize", normalize.find, self.graph) or []:
            self._try("normalize", normalize.rewrite, self.rewriter, exchange)
        starts = {node: source_of(node) for node in self.graph.nodes if collectives.kind_of(node) is not None}
        kinds = {start: str(collectives.kind_of(start)) for start in starts}
        fused: dict[Node, CollectiveReport] = {}
        for module in FUSE:
            if module.OP in self.settings.fuse:
                for start in collectives.find(self.graph, module.KIND):
                    done = self._try(module.OP, self._fuse, module, start)
                    for each, saving, call in done or []:
                        line = CollectiveReport(self.phase, "fused", kinds[each], starts[each], each.name)
                        fused[each] = replace(line, op=module.OP, saving_us=saving, call=call)
        if fused:
            stable_topological_sort(self.graph)
        return [fused.get(start) or self._left(start, kinds[start], starts[start]) for start in starts]

    def _fuse(self, module: ModuleType, start: Node) -> list[tuple[Node, float, Call]]:
        match = module.match(start)
        savings = [(each.start, saving_us(each, match.products)) for each in match.collectives]
        node = module.rewrite(self.rewriter, match)
        return [(each, saving, Call.of(module.OP, node)) for each, saving in savings]

    def _left(self, start: Node, kind: str, source: str) -> CollectiveReport:
        reason = "; ".join(self.reasons.get(start, [])) or f"no op of ours fuses {kind}"
        return CollectiveReport(self.phase, "exposed", kind, source, start.name, reason=reason)

    def _try(self, what: str, act: Callable[..., Any], *args: Any) -> Any:
        """None where it cannot be done, and the reason noted for the collective that args end with."""
        try:
            return act(*args)
        except CannotFuse as reason:
            text = f"{what}: {reason}"
        except Exception as error:
            text = f"{what}: {type(error).__name__}: {error}"
            _warn_once(what, f"{type(error).__name__}: {error}")
        if isinstance(args[-1], Node):
            self.reasons.setdefault(args[-1], []).append(text)
        return None


def _phase(graph: Graph) -> str:
    """By the names that AOTAutograd gives to inputs; torch 2.11 tells passes nothing else."""
    names = " ".join(node.name for node in graph.find_nodes(op="placeholder"))
    return "backward" if "tangents_" in names else "forward" if "primals_" in names else "inference"


@functools.cache
def _warn_once(what: str, error: str) -> None:
    warnings.warn(
        f"fusedcomm.compile: {what} failed, and the graph is left as it was: {error}. Please report it", stacklevel=2
    )
