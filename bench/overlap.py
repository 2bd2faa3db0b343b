"""How much of communication the pass of fusedcomm.compile.overlap hides, next to torch's scheduler.

    python -m fusedcomm.bench.overlap [--quick] [--json FILE] [--plot DIR]

The graphs are those of overlap_graphs: transformers on 8 nodes of 8 GPUs that do not exist. All variants start from the
same graph and plan with the same estimates, fusedcomm's default ones of a GPU, with a peak of memory 5 % above that of
the graph as traced; all are judged by the same simulator. Nothing is run: these are times of a model, of H100 GPUs with
NVLink inside a node and 50 GB/s between nodes, not of a machine. Only the pass time is measured: processor time,
without garbage collection.

as traced        the program's order: each collective is waited for where it starts
torch            torch's schedule_overlap_bucketing without bucketing; "torch, bucketed" has it, and its pre-bucketing
fusedcomm        schedule(); moved: schedule(bucket=False, fuse=False); unfused: schedule(fuse=False)
bound            no order of the graph as traced is faster than all its compute, or all that a link or a group carries

collectives      in the graph, and ops of fusedcomm that stand for one
hideable         collectives of the graph as traced with compute that neither needs them nor is needed for them, and
                 takes at least as long as the collective, looked at alone
hidden           collectives exposed for at most 1 % of what they take alone: also under the wait for another, so hidden
                 can be more than hideable
exposed          the compute stream waits for collectives, or an op of fusedcomm takes longer than its matmul
over bound       how far the total is above the bound. It can be below 0: fewer collectives have less latency than the
                 bound counts, and ops of fusedcomm use a link better than the collectives that it counts

The second table is fusedcomm with other budgets for the peak.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.fx import GraphModule

from fusedcomm.bench import overlap_graphs, overlap_torch
from fusedcomm.bench.common import Goal, at_least, at_most, listed
from fusedcomm.compile.overlap import scheduler
from fusedcomm.compile.overlap.estimator import Estimator
from fusedcomm.compile.overlap.simulator import simulate
from fusedcomm.compile.overlap.timeline import Timeline, plot_both
from fusedcomm.launch import console
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts

MODELS = {
    "llama-8b": lambda: overlap_graphs.llama("8b"),
    "llama-70b": lambda: overlap_graphs.llama("70b"),
    "ulysses": overlap_graphs.ulysses,
    "moe": overlap_graphs.moe,
}
LAYERS, QUICK_LAYERS = (4, 32, 128), (4,)
BUDGETS = (0, 5, 20)  # percent over the peak as traced
BUDGET = 5
TRACED, TORCH, TORCH_BUCKETED, BOUND = "as traced", "torch", "torch, bucketed", "bound"
MOVED, UNFUSED, OURS = "fusedcomm, moved", "fusedcomm, unfused", "fusedcomm"
EXPOSED = {"forward": 5.0, "joint": 10.0}  # at most so many percent of a Llama's communication
GROWTH = 1.5  # the seconds per node of fusedcomm grow at most so much, from fewer layers to more


@dataclass(frozen=True)
class GraphCase:
    model: str
    layers: int
    part: str

    def __str__(self) -> str:
        return f"{self.model} {self.part}, {self.layers} layers"


@dataclass(frozen=True)
class OverlapRow:
    """One variant of one graph. ``hideable`` and ``comm_ms`` are those of the graph as traced."""

    case: GraphCase
    variant: str
    budget_percent: int
    hideable: int
    comm_ms: float
    nodes: int = 0
    collectives: int = 0
    hidden: int = 0
    exposed_ms: float = 0.0
    total_ms: float = 0.0
    over_bound_percent: float = 0.0
    peak_mib: float = 0.0
    peak_over_percent: float = 0.0  # over the peak of the graph as traced
    pass_s: float = 0.0
    error: str | None = None  # why there are no figures


COLUMNS = (
    Column("variant", "how the graph is ordered; torch is torch's own scheduler", lambda row: row.variant, left=True),
    Column("nodes", "nodes of the graph", lambda row: str(row.nodes), drop=4),
    Column("collectives", "in the graph, fused ones too", lambda row: str(row.collectives), drop=2),
    Column("hideable", "as traced: collectives with enough compute beside them", lambda row: str(row.hideable), drop=1),
    Column("hidden", "collectives exposed for at most 1 % of their time", lambda row: str(row.hidden)),
    Column("exposed\nms", "the compute stream waits", lambda row: f"{row.exposed_ms:.2f}"),
    Column("total\nms", "compute and exposed", lambda row: f"{row.total_ms:.2f}"),
    Column(
        "above\nbound %", "total / bound - 1: no order is below the bound", lambda row: f"{row.over_bound_percent:.1f}"
    ),
    Column("peak\nMiB", "peak of memory", lambda row: f"{row.peak_mib:.0f}"),
    Column("pass\ns", "processor time of the scheduler", lambda row: f"{row.pass_s:.2f}" if row.pass_s else "", drop=3),
)
BUDGET_COLUMNS = (
    Column("graph", "the model, its part and its size", lambda row: str(row.case), left=True),
    Column("budget\n%", "that the peak of memory may grow", lambda row: str(row.budget_percent)),
    Column("peak\n%", "by how much it grew", lambda row: f"{row.peak_over_percent:.1f}"),
    Column("exposed\nms", "the compute stream waits", lambda row: f"{row.exposed_ms:.2f}"),
    Column("total\nms", "compute and exposed", lambda row: f"{row.total_ms:.2f}"),
)


class CaseGraph:
    """A case's graph, and what variants of it come to."""

    def __init__(self, case: GraphCase, groups: overlap_graphs.GroupNames) -> None:
        self.case, self.estimator = case, Estimator("cuda")
        self.gm = overlap_graphs.build(MODELS[case.model](), groups, case.layers, case.part)
        self.traced = simulate(self.gm, self.estimator)
        self.hideable = num_hideable(self.gm, self.estimator, self.traced)

    def rows(self) -> Iterator[OverlapRow]:
        yield self.row(TRACED, self.gm)
        for bucket, variant in ((False, TORCH), (True, TORCH_BUCKETED)):
            yield self.torch(variant, bucket)
        for variant in (MOVED, UNFUSED, OURS):
            yield self.ours(variant, BUDGET)[0]
        yield self.bound()

    def bound(self) -> OverlapRow:
        row, ms = self.row(BOUND, self.gm), self.traced.bound_ms
        return replace(
            row, hidden=self.hideable, exposed_ms=ms - self.traced.compute_ms, total_ms=ms, over_bound_percent=0.0
        )

    def torch(self, variant: str, bucket: bool) -> OverlapRow:
        try:
            found = overlap_torch.schedule(self.gm, self.estimator, bucket=bucket, memory_ratio=BUDGET / 100)
        except Exception as error:  # whatever a variant fails with is its result
            text = f"failed: {type(error).__name__}: {error}".splitlines()[0]
            return OverlapRow(self.case, variant, BUDGET, self.hideable, self.traced.comm_ms, error=text)
        return self.row(variant, found.gm, found.seconds)

    def ours(self, variant: str, budget_percent: int) -> tuple[OverlapRow, GraphModule]:
        gm = overlap_torch.copy_of(self.gm)
        budget = self.traced.peak_bytes * (100 + budget_percent) // 100
        bucket, fuse = variant != MOVED, variant == OURS
        with overlap_torch.pass_time() as seconds:
            scheduler.schedule(gm, estimator=self.estimator, memory_budget_bytes=budget, bucket=bucket, fuse=fuse)
        return self.row(variant, gm, seconds(), budget_percent), gm

    def row(self, variant: str, gm: GraphModule, pass_s: float = 0.0, budget_percent: int = BUDGET) -> OverlapRow:
        timeline = self.traced if gm is self.gm else simulate(gm, self.estimator)
        return OverlapRow(
            self.case,
            variant,
            budget_percent,
            self.hideable,
            self.traced.comm_ms,
            nodes=len(gm.graph.nodes),
            collectives=len(timeline.collectives),
            hidden=sum(line.hidden for line in timeline.collectives),
            exposed_ms=timeline.exposed_ms,
            total_ms=timeline.total_ms,
            over_bound_percent=100 * (timeline.total_ms / self.traced.bound_ms - 1),
            peak_mib=timeline.peak_bytes / 2**20,
            peak_over_percent=100 * (timeline.peak_bytes / self.traced.peak_bytes - 1),
            pass_s=pass_s,
        )

    def plot(self, directory: Path) -> Path:
        """Draw the graph as traced and, below it, as fusedcomm schedules it."""
        file = directory / f"overlap-{self.case.model}-{self.case.part}.png"
        _, gm = self.ours(OURS, BUDGET)
        title = f"{self.case}: the order of the program, and fusedcomm's; simulated, nothing was run"
        plot_both(self.traced, simulate(gm, self.estimator), file, title)
        return file


def num_hideable(gm: GraphModule, estimator: Estimator, traced: Timeline) -> int:
    """How many collectives could each hide alone, under compute that neither needs them nor is needed for them."""
    nodes = list(gm.graph.nodes)
    computing = [node for node in nodes if estimator.cost(node).compute_ms > 0]
    ms = [estimator.cost(node).compute_ms for node in computing]
    bits = {node: 1 << i for i, node in enumerate(computing)}
    needs, needed = dict.fromkeys(nodes, 0), dict.fromkeys(nodes, 0)
    for node in nodes:
        for each in node.all_input_nodes:
            needs[node] |= needs[each] | bits.get(each, 0)
    for node in reversed(nodes):
        for each in node.users:
            needed[node] |= needed[each] | bits.get(each, 0)
    alone = {line.node: line.alone_ms for line in traced.collectives}
    everything = (1 << len(computing)) - 1
    return sum(
        _sum_reaches(everything & ~(needs[node] | needed[node]), ms, alone[node.name])
        for node in nodes
        if node.name in alone
    )


def _sum_reaches(chosen: int, values: Sequence[float], enough: float) -> bool:
    """Whether the values whose bits are set in ``chosen`` sum up to enough."""
    while chosen and enough > 0:
        last = chosen.bit_length() - 1
        enough -= values[last]
        chosen ^= 1 << last
    return enough <= 0


# What must be reached


def summary(rows: Sequence[OverlapRow], budgets: Sequence[OverlapRow]) -> list[Goal]:
    """What must be reached, with the value of the worst graph: a goal is met only if all graphs reach it."""
    cases: dict[GraphCase, dict[str, OverlapRow]] = {}
    for row in rows:
        if row.error is None:
            cases.setdefault(row.case, {})[row.variant] = row
    goals = []
    for ours, theirs in ((MOVED, TORCH), (UNFUSED, TORCH_BUCKETED)):
        both = [(each[ours], each[theirs]) for each in cases.values() if ours in each and theirs in each]
        if both:
            more = max(a.exposed_ms - b.exposed_ms for a, b in both)
            goals.append(at_most(f"exposed, {ours} - {theirs}, ms, largest", round(more, 6), 0.0))
            if ours == MOVED:
                fewer = min(a.hidden - b.hidden for a, b in both)
                goals.append(at_least(f"hidden, {ours} - {theirs}, smallest", fewer, 0))
    for part, percent in EXPOSED.items():
        shares = [
            100 * each[OURS].exposed_ms / each[OURS].comm_ms
            for case, each in cases.items()
            if case.part == part and case.model.startswith("llama") and OURS in each
        ]
        if shares:
            goals.append(
                at_most(f"exposed, % of communication, fusedcomm, llama {part}, largest", max(shares), percent)
            )
    slower = max(row.total_ms - cases[row.case][TRACED].total_ms for row in _ours(rows))
    goals.append(at_most("total, fusedcomm - as traced, ms, largest", slower, 0.0))
    over = max(row.peak_over_percent - row.budget_percent for row in (*_ours(rows), *budgets))
    goals.append(at_most("peak over its budget, %, largest", over, 0.0))
    return goals + _pass_times(cases)


def _ours(rows: Sequence[OverlapRow]) -> list[OverlapRow]:
    return [row for row in rows if row.variant in (MOVED, UNFUSED, OURS)]


def _pass_times(cases: dict[GraphCase, dict[str, OverlapRow]]) -> list[Goal]:
    ratios = [
        each[OURS].pass_s / each[TORCH_BUCKETED].pass_s
        for each in cases.values()
        if OURS in each and TORCH_BUCKETED in each
    ]
    goals = [at_most("pass, fusedcomm / torch, bucketed, largest", max(ratios), 1.0)] if ratios else []
    growths = []
    for first, last in itertools.product(cases, cases):
        if (first.model, first.part) == (last.model, last.part) and first.layers < last.layers:
            growths.append(_seconds_per_node(cases[last]) / _seconds_per_node(cases[first]))
    if growths:
        goals.append(at_most("pass per node, fusedcomm, more / fewer layers, largest", max(growths), GROWTH))
    return goals


def _seconds_per_node(variants: dict[str, OverlapRow]) -> float:
    return variants[OURS].pass_s / variants[TRACED].nodes


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rows: list[OverlapRow] = []
    budgets: list[OverlapRow] = []
    plots: list[Path] = []
    tables: list[Table] = []
    out = console.stdout()
    if args.plot:
        Path(args.plot).mkdir(parents=True, exist_ok=True)
    with overlap_graphs.world() as groups:
        for case in cases_of(args):
            graph = CaseGraph(case, groups)
            found = list(graph.rows())
            rows += found
            tables.append(Table(COLUMNS, [row for row in found if not row.error], str(case), has_legend=False))
            console.show(tables[-1], out)
            for row in found:
                if row.error:
                    out.print(f"{row.variant}: {row.error}", markup=False)
            budgets += [graph.ours(OURS, percent)[0] for percent in BUDGETS]
            if args.plot and case.layers == min(args.layers):
                plots.append(graph.plot(Path(args.plot)))
    console.show(console.Legend(tables), out)
    console.show(Table(BUDGET_COLUMNS, budgets, "other budgets of memory"), out)
    goals = summary(rows, budgets)
    print(*map(goal_line, goals), *plots, sep="\n")
    if args.json:
        console.write_json(args.json, run_facts() | listed(rows=rows, budgets=budgets, goals=goals))
    return 0


def goal_line(goal: Goal) -> str:
    return f"{goal.name:60s}{goal.value:8.2f}   goal {goal.bound}: {'met' if goal.met else 'missed'}"


def cases_of(args: argparse.Namespace) -> list[GraphCase]:
    """The cases. A third number of layers is only for the first part of the first model."""
    several = args.layers[:2]
    cases = [GraphCase(*each) for each in itertools.product(args.models, several, args.parts)]
    return cases + [GraphCase(args.models[0], layers, args.parts[0]) for layers in args.layers[2:]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fusedcomm.bench.overlap", description="Times of a model; nothing is run.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=overlap_graphs.PARTS, default=["forward", "joint"])
    parser.add_argument("--layers", nargs="+", type=int, metavar="L", help=f"{LAYERS}; the third: one graph alone")
    parser.add_argument("--quick", action="store_true", help=f"layers {QUICK_LAYERS}")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="DIR", help="write a picture of each smallest graph, as traced and scheduled")
    args = parser.parse_args(argv)
    args.layers = args.layers or (QUICK_LAYERS if args.quick else LAYERS)
    return args


if __name__ == "__main__":
    sys.exit(main())
