"""All passes over one graph, as one pass of Inductor's, with a line of the report per collective."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fusedcomm import files
from fusedcomm.compile import inductor
from fusedcomm.compile.commute import digests
from fusedcomm.compile.commute.commuter import CARRIES, REFUSED, commute, erase_copies, note_of
from fusedcomm.compile.commute.digests import Check
from fusedcomm.compile.commute.prepare import restore
from fusedcomm.compile.fuse import wire
from fusedcomm.compile.fuse.fuser import OPS, Fused, Fuser
from fusedcomm.compile.graph import breaks, collectives, opaque, sequence
from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.graph.sequence import Digest, communicating
from fusedcomm.compile.graph.strides import settle
from fusedcomm.compile.merge.flattened_mesh import FlattenedMesh
from fusedcomm.compile.merge.merger import Merger
from fusedcomm.compile.merge.sums import SumMerger
from fusedcomm.compile.overlap import inductor_order
from fusedcomm.compile.overlap.estimator import Estimator, device_type_of
from fusedcomm.compile.overlap.scheduler import OverlapReport, order_again, schedule_graph
from fusedcomm.compile.reports import CollectiveReport, CompileReport, FusedCall, source_of
from fusedcomm.memory.consent import YES

log = logging.getLogger(__name__)

_OPAQUE = "an opaque op with a group: fusedcomm.compile.register_collective says what it stands for"


@dataclass(frozen=True)
class Settings:
    """Everything that changes the graphs that come out."""

    fuse: tuple[str, ...] = OPS
    overlap: tuple[Estimator, ...] = ()  # one per type of device, agreed on by all ranks; none: no scheduling
    merge: tuple[FlattenedMesh, ...] = ()  # collectives are merged over the dims of these
    commute: bool = False  # exchanges move towards matmuls

    def estimator(self, graph: Graph) -> Estimator | None:
        device_type = device_type_of(graph)
        return next((each for each in self.overlap if each.device_type == device_type), None)

    def uuid(self) -> str:
        overlap = [estimator.digest() for estimator in self.overlap]
        programs, groups = opaque.registered(), collectives.memberships()
        return files.cache_key(self.fuse, overlap, self.merge, self.commute, programs, groups, torch.__version__)


class _SettingsPass(CustomGraphPass):
    """A pass whose result depends on the graph and the settings alone."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def uuid(self) -> Any:
        return self.settings.uuid()


class FusedcommPass(_SettingsPass):
    """All of fusedcomm's passes. They never break a program: a failure leaves the graph as it was."""

    def __init__(self, settings: Settings, report: CompileReport) -> None:
        super().__init__(settings)
        self.report = report

    def __call__(self, graph: Graph) -> None:
        inductor.leave_out_of_caches(any(node.meta.get(REFUSED) for node in graph.nodes))
        if any(collectives.kind_of(node) or opaque.name_of(node) for node in graph.nodes):
            lines = _Run(graph, self.settings).lines()
            for line in lines:
                log.debug("%s", line)
            self.report.collectives += lines


class CommutePass(_SettingsPass):
    """Moves exchanges towards matmuls, in the graph that holds forward and backward."""

    def __call__(self, graph: Graph) -> None:
        attempt("expand", opaque.expand, graph)
        attempt("commute", commute, graph, self.settings.fuse)


class OrderPass(_SettingsPass):
    """Schedules once more after Inductor's patterns, as they join nodes, for example an addition and a matmul."""

    def __call__(self, graph: Graph) -> None:
        if inductor_order.is_marked(graph):
            attempt("overlap", order_again, graph, self.settings.estimator(graph))
            attempt("order", inductor_order.keep, graph)


class _Run:
    """The passes over one graph, and the lines of its report."""

    def __init__(self, graph: Graph, settings: Settings) -> None:
        self.graph, self.settings = graph, settings
        self.phase = _phase(graph)
        self._begin()

    def _begin(self) -> None:
        self.fuser = Fuser(self.graph)
        self.merger = Merger(self.graph, self.settings.fuse)
        plain = bool(self.settings.overlap or self.settings.merge)
        self.sums = SumMerger(self.graph, self.settings.fuse, plain)
        self.scheduled: OverlapReport | None = None
        self.together: list[Fused] = []  # by consent of all ranks
        self.changed: set[str] = set()  # the collectives that all ranks changed alike
        self.before = self.starts = self._starts()

    def lines(self) -> list[CollectiveReport]:
        checks = digests.find(self.graph)
        erase_copies(self.graph, of_backward=self.phase == "backward")
        attempt("expand", opaque.expand, self.graph)
        attempt("normalize", self.fuser.normalize, False)
        self.notes = {node.name: note_of(node) for node in self.graph.nodes if collectives.kind_of(node)}
        checks += self._change_together()
        fused, plain = (self.scheduled.fused, []) if self.scheduled is not None else self._fuse()
        ops = {start: each for each in plain + fused for start in each.savings_us}  # fused, unread parts may be plain
        self.hints = breaks.hints(self.graph)
        gone = {start: facts for start, facts in self.before.items() if start not in self.starts}
        lines = [
            self._line(start, *facts, ops.get(start), ops.get(start) in plain)
            for start, facts in (gone | self.starts).items()
        ]
        digests.check_first(self.graph, checks)
        return lines + [
            CollectiveReport(self.phase, "exposed", name, source_of(node), node.name, reason=_OPAQUE)
            for node in self.graph.nodes
            if (name := opaque.name_of(node))
        ]

    def _change_together(self) -> list[Check]:
        """Change the sequence of collectives, if all ranks do; returns the digests that they agreed to."""
        graph, stock, before = self.graph, copy.deepcopy(self.graph), sequence.Sequence(self.graph, self.phase)
        self._begin()
        why_not: list[str] = []
        digest = attempt("change", self._change, before, reasons=why_not)
        if digest is None:
            before.pass_by()
        else:
            answer = before.ask(*digest)
            if answer.kind == YES:
                found = communicating(graph)
                self.changed = {node.name for node in found} if self.scheduled else {*before.changed(graph)}
                wire.agreed((node for node in found if node.name in self.changed), digest[0].text)
                results = pytree.tree_leaves([node.meta["val"] for node in found])  # some have several
                device_type = next(each.device.type for each in results if isinstance(each, torch.Tensor))
                return [Check(digest[0], device_type, digest[1])] if before.has_peers(digest[1]) else []
            inductor.leave_out_of_caches(True)  # from a cache it would never ask again
            why_not = [f"{'overlap' if self.scheduled else 'merge'}: {answer}"]
        if why_not:
            changed = {*before.starts} if self.scheduled else {*before.changed(graph)}
            restore(graph, stock)
            self._begin()
            for name in self.before.keys() & changed:
                self.notes[name] = "; ".join(filter(None, [self.notes.get(name), *why_not]))
        return []

    def _change(self, before: sequence.Sequence) -> tuple[Digest, str] | None:
        """Merge and order; returns (digest to agree on, group to ask), or None if nothing needs consent."""
        known = set(self.graph.nodes)
        self.fuser.normalize(gathers=True)
        written = dict(self.fuser.written)
        self.before = self._starts()
        self.notes |= {new: self.notes[old] for old, new in written.items()}
        attempt("merge", self.sums.merge)
        for mesh in self.settings.merge:
            attempt("merge", self.merger.merge, mesh)
        self.starts = self._starts()
        self.scheduled = self._schedule()
        if self.scheduled is None:
            changed = before.changed(self.graph)
            self.together = Fuser(self.graph).fuse(self.settings.fuse, changes=True, changed=changed)
        settle(self.graph)
        changed = before.changed(self.graph)
        if not changed and self.scheduled is None:
            return None
        gone = written | self.sums.into | self.merger.into
        if self.scheduled is not None:
            gone |= {name: new for new, names in self.scheduled.buckets.items() for name in names}
        fused = self.together if self.scheduled is None else self.scheduled.fused
        gone |= {name: each.node.name for each in fused for name in each.savings_us}

        def origin(node: Node) -> list[int]:
            return [i for i, name in enumerate(before.starts) if _last(name, gone) == node.name]

        digest = before.digest(self.graph, lambda node: node not in known, origin)
        return digest, before.voter(before.groups(self.graph, None if self.scheduled else changed))

    def _fuse(self) -> tuple[list[Fused], list[Fused]]:
        """Fuse each collective with its matmul, without the peers' consent; returns (fused, plain).

        Collectives of the program without a matmul become plain ops, also where fusing fails, as this rank alone knows.
        """
        reasons: list[str] = []
        for ops in (self.settings.fuse, ()):
            stock = copy.deepcopy(self.graph)
            found = attempt("fuse", self._fused_and_settled, ops, reasons=reasons)
            if found is not None:
                return self.together + found[0], found[1]
            restore(self.graph, stock)
            nodes = {node.name: node for node in self.graph.nodes}
            self.together = [replace(each, node=nodes[each.node.name]) for each in self.together]
            self.fuser = Fuser(self.graph)
            self.fuser.reasons = {name: list(reasons) for name in self.starts}
        return self.together, []

    def _fused_and_settled(self, ops: Sequence[str]) -> tuple[list[Fused], list[Fused]]:
        fused = self.fuser.fuse(ops, changes=False, changed=self.changed)
        plain: list[Fused] = []
        if not inductor.reorders_collectives():
            plain = self.fuser.plain(self.settings.fuse, self.changed)
        else:
            for name in self.starts:
                self.fuser.reasons.setdefault(name, []).append("Inductor is set to overlap or bucket it")
        settle(self.graph)
        return fused, plain

    def _starts(self) -> dict[str, tuple[str, str]]:
        """Name -> (kind, source) of every collective."""
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

    def _line(self, start: str, kind: str, source: str, op: Fused | None, is_plain: bool) -> CollectiveReport:
        of = partial(CollectiveReport, self.phase, collective=kind, source=source, node=start)
        note = self.notes.get(start, "")
        if start not in self.starts:
            return of("merged", reason=f"into {_last(start, self.sums.into | self.merger.into)}")
        if op is not None:
            of = partial(of, op=op.op, call=FusedCall.of(op.op, op.node), saving_us=op.savings_us[start])
            if not is_plain:
                return of("fused", reason=note)
        reasons = self.merger.reasons.get(start, []) + self.fuser.reasons.get(start, [])
        if note:
            reasons = [note] if note.startswith(CARRIES) else [*reasons, note]
        reason = ("; ".join(reasons) or f"no op of fusedcomm fuses {kind}") + self.hints.get(start, "")
        line = None if self.scheduled is None else self.scheduled.line(start)
        if is_plain or line is None:
            return of("plain" if is_plain else "exposed", reason=reason)
        of = partial(of, saving_us=(line.alone_ms - line.exposed_ms) * 1e3)
        if line.hidden:
            together = "" if line.node == start else f", as part of {line.node}"
            return of("overlapped", reason=f"beside compute{together}")
        return of("exposed", reason=f"{line.exposed_ms * 1e3:.0f} of {line.alone_ms * 1e3:.0f} us exposed; {reason}")


def _last(name: str, gone: dict[str, str]) -> str:
    while name in gone:  # it may have been merged several times
        name = gone[name]
    return name


def _phase(graph: Graph) -> str:
    """The phase, by the names that AOTAutograd gives to inputs: torch 2.11 tells passes nothing else."""
    names = " ".join(node.name for node in graph.find_nodes(op="placeholder"))
    return "backward" if "tangents_" in names else "forward" if "primals_" in names else "inference"
