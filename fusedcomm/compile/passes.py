"""Everything that is done to one graph, as one pass of Inductor's, with a line of the report per collective."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from fusedcomm import files
from fusedcomm.compile.commute import digests
from fusedcomm.compile.commute.commuter import CARRIES, commute, erase_copies, note_of
from fusedcomm.compile.fuse.fuser import OPS, Fused, Fuser
from fusedcomm.compile.graph import breaks, collectives, opaque
from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.merge.flattened_mesh import FlattenedMesh
from fusedcomm.compile.merge.merger import Merger
from fusedcomm.compile.merge.sums import SumMerger
from fusedcomm.compile.overlap import inductor_order
from fusedcomm.compile.overlap.estimator import Estimator, device_type_of
from fusedcomm.compile.overlap.scheduler import OverlapReport, order_again, schedule_graph
from fusedcomm.compile.reports import CollectiveReport, CompileReport, FusedCall, source_of

log = logging.getLogger(__name__)

_OPAQUE = "an opaque op with a group: fusedcomm.compile.register_collective says what it stands for"


@dataclass(frozen=True)
class Settings:
    """Everything that changes the graphs that come out."""

    fuse: tuple[str, ...] = OPS
    overlap: tuple[Estimator, ...] = ()  # one per type of device, agreed on by all ranks; none: no scheduling
    merge: tuple[FlattenedMesh, ...] = ()  # collectives are merged over the dims of these
    commute: bool = True  # exchanges move towards matmuls

    def estimator(self, graph: Graph) -> Estimator | None:
        """The Estimator for the device of the graph, if there is one."""
        device_type = device_type_of(graph)
        return next((each for each in self.overlap if each.device_type == device_type), None)

    def uuid(self) -> str:
        overlap = [estimator.digest() for estimator in self.overlap]
        programs, groups = opaque.registered(), collectives.memberships()
        return files.cache_key(self.fuse, overlap, self.merge, self.commute, programs, groups, torch.__version__)


class FusedcommPass(CustomGraphPass):
    """All of fusedcomm's passes. They never break a program: what cannot be done leaves the graph as it was."""

    def __init__(self, settings: Settings, report: CompileReport) -> None:
        self.settings = settings
        self.report = report

    def __call__(self, graph: Graph) -> None:
        if any(collectives.kind_of(node) or opaque.name_of(node) for node in graph.nodes):
            lines = _Run(graph, self.settings).lines()
            for line in lines:
                log.debug("%s", line)
            self.report.collectives += lines

    def uuid(self) -> Any:
        return self.settings.uuid()


class CommutePass(CustomGraphPass):
    """Moves exchanges towards matmuls, in the graph that holds forward and backward."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, graph: Graph) -> None:
        attempt("expand", opaque.expand, graph)
        attempt("commute", commute, graph, self.settings.fuse)

    def uuid(self) -> Any:
        return self.settings.uuid()


class OrderPass(CustomGraphPass):
    """Schedules once more after Inductor's patterns, which, for example, make an addition and a matmul one node."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, graph: Graph) -> None:
        if inductor_order.is_marked(graph):
            attempt("overlap", order_again, graph, self.settings.estimator(graph))
            inductor_order.mark(graph)

    def uuid(self) -> Any:
        return self.settings.uuid()


class _Run:
    """The passes over one graph, and the lines of its report."""

    def __init__(self, graph: Graph, settings: Settings) -> None:
        self.graph, self.settings = graph, settings
        self.phase = _phase(graph)
        self.fuser = Fuser(graph)
        self.merger = Merger(graph, settings.fuse)
        self.sums = SumMerger(graph, settings.fuse)

    def lines(self) -> list[CollectiveReport]:
        found = digests.find(self.graph)
        erase_copies(self.graph, of_backward=self.phase == "backward")
        attempt("expand", opaque.expand, self.graph)
        lines = self._of_collectives()
        digests.check_first(self.graph, found)
        return lines + [
            CollectiveReport(self.phase, "exposed", name, source_of(node), node.name, reason=_OPAQUE)
            for node in self.graph.nodes
            if (name := opaque.name_of(node))
        ]

    def _of_collectives(self) -> list[CollectiveReport]:
        self.fuser.normalize(gathers=True)
        before = self._starts()
        self.notes = {node.name: note_of(node) for node in self.graph.nodes if collectives.kind_of(node)}
        attempt("merge", self.sums.merge)
        for mesh in self.settings.merge:
            attempt("merge", self.merger.merge, mesh)
        starts = self._starts()
        scheduled = self._schedule()
        found = self.fuser.fuse(self.settings.fuse) if scheduled is None else scheduled.fused
        fused = {start: each for each in found for start in each.savings_us}
        self.hints = breaks.hints(self.graph)
        return [self._merged(start, *before[start]) for start in before if start not in starts] + [
            self._fused(start, *facts, fused[start]) if start in fused else self._left(start, *facts, scheduled)
            for start, facts in starts.items()
        ]

    def _starts(self) -> dict[str, tuple[str, str]]:
        """Kind and source of every collective, by name."""
        return {
            node.name: (str(kind), source_of(node)) for node in self.graph.nodes if (kind := collectives.kind_of(node))
        }

    def _schedule(self) -> OverlapReport | None:
        """The scheduler's report, or None where scheduling is not wanted, or has failed."""
        estimator = self.settings.estimator(self.graph)
        if estimator is None:
            return None
        report = attempt("overlap", schedule_graph, self.graph, estimator, None, True, self.settings.fuse)
        if report is not None:
            self.fuser.reasons = report.reasons
            inductor_order.mark(self.graph)
        return report

    def _merged(self, start: str, kind: str, source: str) -> CollectiveReport:
        gone = self.sums.into | self.merger.into
        into = gone[start]
        while into in gone:  # it may have been merged several times
            into = gone[into]
        return CollectiveReport(self.phase, "merged", kind, source, start, reason=f"into {into}")

    def _fused(self, start: str, kind: str, source: str, fused: Fused) -> CollectiveReport:
        call, saving = FusedCall.of(fused.op, fused.node), fused.savings_us[start]
        reason = self.notes.get(start, "")
        return CollectiveReport(self.phase, "fused", kind, source, start, fused.op, reason, saving, call)

    def _left(self, start: str, kind: str, source: str, scheduled: OverlapReport | None) -> CollectiveReport:
        note = self.notes.get(start, "")
        reasons = self.merger.reasons.get(start, []) + self.fuser.reasons.get(start, [])
        if note:
            reasons = [note] if note.startswith(CARRIES) else [*reasons, note]
        reason = "; ".join(reasons) or f"no op of fusedcomm fuses {kind}"
        reason += self.hints.get(start, "")
        line = None if scheduled is None else scheduled.line(start)
        if line is None:
            return CollectiveReport(self.phase, "exposed", kind, source, start, reason=reason)
        saving = (line.alone_ms - line.exposed_ms) * 1e3
        if line.hidden:
            together = "" if line.node == start else f", as part of {line.node}"
            reason = f"beside {len(line.hidden_by)} kernels{together}"
            return CollectiveReport(self.phase, "overlapped", kind, source, start, reason=reason, saving_us=saving)
        reason = f"{line.exposed_ms * 1e3:.0f} of {line.alone_ms * 1e3:.0f} us exposed; {reason}"
        return CollectiveReport(self.phase, "exposed", kind, source, start, reason=reason, saving_us=saving)


def _phase(graph: Graph) -> str:
    """The phase, by the names that AOTAutograd gives to inputs: torch 2.11 tells passes nothing else."""
    names = " ".join(node.name for node in graph.find_nodes(op="placeholder"))
    return "backward" if "tangents_" in names else "forward" if "primals_" in names else "inference"
