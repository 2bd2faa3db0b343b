"""Collectives beside compute: fused beside matmuls where it pays, else started early and waited for late."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch.fx import Graph, GraphModule, Node

from fusedcomm.compile.fuse.fuser import OPS, Fused, Fuser
from fusedcomm.compile.graph.collectives import functional
from fusedcomm.compile.graph.effects import differs_by_rank, writes_before_end
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.sequence import communicating
from fusedcomm.compile.graph.split_cat import argument_of
from fusedcomm.compile.graph.strides import settle
from fusedcomm.compile.graph.views import merge_views, path_back, value
from fusedcomm.compile.overlap import buckets
from fusedcomm.compile.overlap.estimator import Estimator
from fusedcomm.compile.overlap.list_scheduler import defer, reorder
from fusedcomm.compile.overlap.program import Program
from fusedcomm.compile.overlap.simulator import run
from fusedcomm.compile.overlap.timeline import Line, Timeline

aten = torch.ops.aten

_ROUNDS = 3
_MORE_PERCENT, _MORE_BYTES = 5, 1 << 30  # allowed rise of the peak: the larger of the two, as in torch's scheduler
_NEAR = 8  # successive collectives that the same compute can hide
_ROUNDING = 1e-6  # ms


@dataclass(frozen=True)
class OverlapReport:
    """The outcome of `schedule`; ``str()`` is a table.

    Attributes:
        before: the `Timeline` of the graph as it came.
        after: the `Timeline` of the graph as it is now.
        fused: the ops that replace collectives and their matmuls; each has ``op``, its name, and ``savings_us``.
        buckets: merged collectives: the name of the merged start -> the names of the former starts.
        reasons: why a collective is not fused, by the name of the node that starts it.
    """

    before: Timeline
    after: Timeline
    fused: list[Fused] = field(default_factory=list)
    buckets: dict[str, buckets.Bucket] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)

    def line(self, start: str) -> Line | None:
        """Return the line in ``after`` of the collective started by the node of this name; None if it is fused."""
        return self._lines.get(start)

    @cached_property
    def _lines(self) -> dict[str, Line]:
        lines = {line.node: line for line in self.after.collectives}
        merged = {start: lines[name] for name, starts in self.buckets.items() for start in starts}
        return lines | merged

    def __str__(self) -> str:
        ops = Counter(each.op for each in self.fused)
        merged = sum(map(len, self.buckets.values()))
        lines = [f"{'':8}{'collectives':>12}{'hidden':>8}{'exposed ms':>12}{'total ms':>12}{'peak MiB':>12}"]
        for name, each in (("before", self.before), ("after", self.after)):
            counts = f"{name:8}{len(each.collectives):12}{_hidden(each):8}"
            lines.append(f"{counts}{each.exposed_ms:12.3f}{each.total_ms:12.3f}{each.peak_bytes / 2**20:12.1f}")
        lines += [f"fused: {count} {op}" for op, count in ops.items()]
        lines += [f"merged: {merged} collectives into {len(self.buckets)}"] if merged else []
        return "\n".join(lines)


def schedule(
    gm: GraphModule,
    *,
    estimator: Estimator | None = None,
    memory_budget_bytes: int | None = None,
    bucket: bool = True,
    fuse: bool = True,
) -> OverlapReport:
    """Change an FX graph in place so that it has the same values in less time, as the simulator counts it.

    Collectives are moved, merged, or fused with the matmuls beside them. The new graph is never slower than the old
    one, as far as the estimates are right.

    Args:
        gm: plain FX, of aten ops and functional collectives, with fake or real tensors in ``meta["val"]``. Fake process
            groups do.
        estimator: times of nodes; None: ``Estimator.of(gm.graph)``. It must be equal on all ranks
            (`Estimator.agreed`). Nodes with times of the user's own are moved only, neither fused nor merged.
        memory_budget_bytes: bytes that the peak must not exceed, as `simulate` counts it; where it is already higher,
            it does not rise. None: 5 % or 1 GiB more than the peak of gm as it comes, whichever is more.
        bucket: whether collectives may be merged.
        fuse: whether ops of fusedcomm may replace collectives and matmuls.

    Returns:
        An `OverlapReport` with the timelines before and after.

    Raises:
        ValueError: memory_budget_bytes is negative.
    """
    if memory_budget_bytes is not None and memory_budget_bytes < 0:
        raise ValueError(f"memory_budget_bytes must be at least 0, got {memory_budget_bytes}")
    if not writes_before_end(gm.graph):
        merge_views(gm.graph)
    estimator = estimator or Estimator.of(gm.graph)
    report = schedule_graph(gm.graph, estimator, memory_budget_bytes, bucket, OPS if fuse else ())
    gm.recompile()
    return report


def schedule_graph(
    graph: Graph, estimator: Estimator, budget: int | None, bucket: bool, ops: Sequence[str]
) -> OverlapReport:
    """`schedule`, where ``ops`` are the ops of fusedcomm that may be used."""
    program = Program(graph, estimator.cost)
    before = run(program, range(len(program)))
    if budget is None:
        budget = before.peak_bytes + max(before.peak_bytes * _MORE_PERCENT // 100, _MORE_BYTES)
    budget = max(budget, before.peak_bytes)
    fuser, plan = Fuser(graph), _Plan.of(program, estimator, budget)
    fused: list[Fused] = []
    merged: dict[str, buckets.Bucket] = {}
    if ops:
        plan, fused = _fuse_exposed(fuser, plan, ops)
    plan.apply()
    if bucket:
        plan, merged = _bucket_exposed(plan)
    return OverlapReport(before, plan.timeline, fused, merged, fuser.reasons)


def order_again(graph: Graph, estimator: Estimator) -> None:
    """Put the graph in the best order after others have changed it, in no more memory than it needs as it is.

    Its collectives keep the order agreed by all ranks. An addmm that adds a collective's result is taken apart: the
    matmul could not run beside the collective otherwise.
    """
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        _take_apart(graph, node)
    program = Program(graph, estimator.cost)
    plan = _Plan.of(program, estimator, run(program, range(len(program))).peak_bytes)
    first = range(_end_of_checks(program.nodes))
    plan = replace(plan, order=[*first, *(i for i in plan.order if i not in first)])
    agreed = communicating(graph)
    if [node for i in plan.order if (node := program.nodes[i]) in agreed] == agreed:
        plan.apply()
    settle(graph)


def _end_of_checks(nodes: Sequence[Node]) -> int:
    """The number of nodes up to the last `same_moves`: these checks come first."""
    asked = torch.ops.fusedcomm.same_moves.default
    found = (i for i, node in enumerate(nodes) if asked in {each.target for each in (node, *node.all_input_nodes)})
    return 1 + max(found, default=-1)


def _take_apart(graph: Graph, addmm: Node) -> None:
    added, x, w = addmm.args[:3]
    assert isinstance(added, Node)
    if addmm.kwargs or len(addmm.args) > 3 or value(added).shape != value(addmm).shape:
        return
    if path_back(added, through_casts=True)[0].target is not functional.wait_tensor.default:
        return
    rewriter = Rewriter(graph)
    with rewriter.before(addmm, like=addmm):
        result = rewriter.call(aten.add.Tensor, rewriter.call(aten.mm.default, x, w), added)
    rewriter.replace(addmm, result)


@dataclass(frozen=True)
class _Plan:
    """A graph, and the best order for it."""

    program: Program
    estimator: Estimator
    budget: int
    order: list[int]
    timeline: Timeline

    @staticmethod
    def of(program: Program, estimator: Estimator, budget: int) -> _Plan:
        return _Plan(program, estimator, budget, *_best_order(program, budget))

    @property
    def graph(self) -> Graph:
        return self.program.graph

    def of_trial(self, graph: Graph) -> _Plan:
        """The plan of a changed copy of the graph."""
        return _Plan.of(Program(graph, self.estimator.cost), self.estimator, self.budget)

    def better_than(self, other: _Plan) -> bool:
        return self.timeline.total_ms < other.timeline.total_ms and self.timeline.peak_bytes <= self.budget

    def apply(self) -> None:
        nodes = [self.program.nodes[i] for i in self.order]
        for last, node in pairwise(nodes):
            if last.next is not node:
                last.append(node)


def _best_order(program: Program, budget: int) -> tuple[list[int], Timeline]:
    """The order as it is, or a faster one within the budget; if as fast, the one that hides more collectives."""
    base = list(range(len(program)))
    best, before = base, run(program, base)
    timeline = before
    index = {node.name: i for i, node in enumerate(program.nodes)}
    starts = set(program.starts)
    for _ in range(_ROUNDS):
        order = reorder(program, base, budget)
        after = run(program, order)
        gain = (timeline.total_ms - after.total_ms) / timeline.total_ms if timeline.total_ms else 0.0
        fits = after.peak_bytes <= budget and after.total_ms < before.total_ms
        if fits and (gain > buckets.LEAST_GAIN or (gain > -buckets.LEAST_GAIN and _hidden(after) > _hidden(timeline))):
            best, timeline = order, after
        elif fits:
            break
        exposed = {index[line.node]: line.exposed_ms for line in after.collectives if not line.hidden}
        deferred = defer(program, base, order, {i: ms for i, ms in exposed.items() if i in starts}, budget)
        if deferred == base:
            break
        base = deferred
    return best, timeline


def _hidden(timeline: Timeline) -> int:
    return sum(line.hidden for line in timeline.collectives)


def _fuse_exposed(fuser: Fuser, plan: _Plan, ops: Sequence[str]) -> tuple[_Plan, list[Fused]]:
    """Fuse the collectives for which it pays. Returns the plan of the graph with the fused ops."""
    if differs_by_rank(plan.program.nodes):
        return _unfused(fuser, plan, ops, lambda start: "graphs of ranks differ: what pays on one may not on another")
    lines = {line.node: line for line in plan.timeline.collectives}

    def reject(start: Node) -> str | None:
        if start.name in plan.estimator.times:
            return "its time is the user's own"
        is_known = plan.estimator.can_fuse(str(argument_of(start, "group_name")))
        return None if is_known else "its group is not known"

    compute_ms = {node.name: cost.compute_ms for node, cost in zip(plan.program.nodes, plan.program.costs, strict=True)}
    told: dict[str, str] = {}
    losses: dict[str, float] = {}  # excess of an op over the compute that it replaces
    all_fused = copy.deepcopy(plan.graph)
    for each in Fuser(all_fused).fuse(ops, reject):
        if any(name in plan.estimator.times for name in each.erased):
            told.update(dict.fromkeys(each.savings_us, "the time of its matmul is the user's own"))
        lost = sum(plan.estimator.cost(node).ms for node in each.created)
        lost -= sum(compute_ms.get(name, 0.0) for name in each.erased)
        losses.update({start: lost / len(each.savings_us) for start in each.savings_us if start in lines})
    best, chosen = plan, None
    for keep in (told | each for each in _sets_to_keep(losses, lines)):

        def reject_kept(start: Node, keep: dict[str, str] = keep) -> str | None:
            return keep.get(start.name) or reject(start)

        graph = copy.deepcopy(plan.graph) if keep else all_fused
        if keep:
            Fuser(graph).fuse(ops, reject_kept)
        trial = plan.of_trial(graph)
        if trial.better_than(best):
            best, chosen = trial, reject_kept
    if chosen is None:
        return _unfused(fuser, plan, ops, lambda start: told.get(start.name) or reject(start) or "it would not pay")
    fused = [_with_savings(each, losses, lines) for each in fuser.fuse(ops, chosen)]
    return plan.of_trial(plan.graph), fused


def _unfused(fuser: Fuser, plan: _Plan, ops: Sequence[str], reason: Callable[[Node], str]) -> tuple[_Plan, list[Fused]]:
    """The plan as it is, with each collective's reasons noted: its own, or ``reason`` where it could be fused."""
    fuser.fuse(ops, reason)
    return plan, []


def _with_savings(fused: Fused, losses: dict[str, float], lines: dict[str, Line]) -> Fused:
    saved = {start: max(0.0, lines[start].exposed_ms - losses[start]) for start in fused.savings_us if start in losses}
    return replace(fused, savings_us=fused.savings_us | {start: ms * 1e3 for start, ms in saved.items()})


def _sets_to_keep(losses: dict[str, float], lines: dict[str, Line]) -> list[dict[str, str]]:
    """Collectives to leave unfused, and why: either the slowest to fuse among the hideable ones, or none.

    In each window of 8 successive collectives: the ones that fusing slows most, up to the time that compute hides in
    that window today.
    """
    longer = {
        name: "the op would take longer than what it stands for"
        for name in losses
        if losses[name] >= lines[name].alone_ms
    }
    names = sorted(losses, key=lambda name: lines[name].start_ms)
    as_much: dict[str, str] = {}
    for at in range(0, len(names), _NEAR):
        near = names[at : at + _NEAR]
        left = sum(lines[name].alone_ms - lines[name].exposed_ms for name in near) + _ROUNDING
        for name in sorted(near, key=lambda name: losses[name], reverse=True):
            left -= lines[name].alone_ms
            if left < 0:
                break
            as_much[name] = "other compute can hide it"
    return [longer | as_much, longer] if as_much.keys() - longer.keys() else [longer]


def _bucket_exposed(plan: _Plan) -> tuple[_Plan, dict[str, buckets.Bucket]]:
    """Merge collectives, if that makes the whole faster. The plan has been applied, and is applied again."""
    found = buckets.find(plan.program, plan.order, plan.timeline, plan.estimator)
    if not found:
        return plan, {}
    graph = copy.deepcopy(plan.graph)
    buckets.rewrite(graph, found)
    trial = plan.of_trial(graph)
    if not trial.better_than(plan):
        return plan, {}
    merged = buckets.rewrite(plan.graph, found)
    plan = plan.of_trial(plan.graph)
    plan.apply()
    return plan, merged
