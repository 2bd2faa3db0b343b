"""The graphs of benchmarks.overlap are the programs that they claim to be, and the command reports what variants came
to.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from benchmarks import overlap, overlap_graphs, overlap_torch
from benchmarks.overlap import MOVED, OURS, TORCH, TORCH_BUCKETED, TRACED, UNFUSED, GraphCase, OverlapRow
from benchmarks.overlap_graphs import GroupNames, build
from fusedcomm.compile.overlap.estimator import Estimator
from fusedcomm.compile.overlap.simulator import simulate

aten = torch.ops.aten
AG, RS, A2A, AR = "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce"


@pytest.fixture(scope="module")
def groups() -> Iterator[GroupNames]:
    with overlap_graphs.world() as found:
        yield found


def collectives(gm: GraphModule) -> Counter[tuple[str, str]]:
    """The number of collectives by op and group name. Every start has one wait."""
    starts = [node for node in gm.graph.nodes if getattr(node.target, "namespace", "") == "_c10d_functional"]
    waits = [node for node in starts if node.target._opname == "wait_tensor"]
    starts = [node for node in starts if node not in waits]
    assert [wait.args[0] for wait in waits] == starts  # as traced, each is waited for at once
    return Counter(
        (node.target._opname, next(arg for arg in node.args[::-1] if isinstance(arg, str))) for node in starts
    )


def matmul_flops(gm: GraphModule) -> int:
    """The FLOP of mm and bmm, and separately those of attention."""

    def shape(node: Any) -> torch.Size:
        return node.meta["val"].shape

    products = [node for node in gm.graph.nodes if node.target in (aten.mm.default, aten.bmm.default)]
    return sum(2 * math.prod(shape(node)) * shape(node.args[0])[-1] for node in products)


# By hand, per layer: collectives (forward, forward and backward), and the weights that a token meets on a rank
PER_LAYER = {
    "llama-8b": (
        {(AG, "dp"): 6, (AG, "tp"): 2, (RS, "tp"): 2},
        {(AG, "dp"): 12, (RS, "dp"): 6, (AG, "tp"): 4, (RS, "tp"): 4, (AR, "tp"): 2},
        8192 * 4 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) // 8,
    ),
    "ulysses": (
        {(AG, "dp"): 8, (A2A, "tp"): 4},
        {(AG, "dp"): 16, (RS, "dp"): 8, (A2A, "tp"): 8, (AR, "tp"): 8},
        131072 // 8 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336),
    ),
    "moe": (
        {(AG, "dp"): 9, (A2A, "tp"): 2},
        {(AG, "dp"): 18, (RS, "dp"): 9, (A2A, "tp"): 4, (AR, "tp"): 7},
        8192 * 4 * (4096 * 6144 + 4096 * 4096 + 64 * 4096 + 4 * 3 * 4096 * 1024 + 3 * 4096 * 2048),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("model", PER_LAYER)
def test_a_graph_has_the_matmuls_and_collectives_of_its_model(model: str, groups: GroupNames) -> None:
    forward, joint, weights = PER_LAYER[model]
    for part, per_layer, matmuls in (("forward", forward, 1), ("joint", joint, 3)):
        gm = build(overlap.MODELS[model](), groups, 2, part)
        gm.graph.lint()
        names = {(op, getattr(groups, dim)): 2 * number for (op, dim), number in per_layer.items()}
        assert collectives(gm) == names
        assert matmul_flops(gm) == 2 * 2 * weights * matmuls


@pytest.mark.thorough
def test_parts_are_those_of_aot_autograd(groups: GroupNames) -> None:
    forward, backward, joint = (build(overlap_graphs.llama(), groups, 2, part) for part in overlap_graphs.PARTS)
    assert collectives(forward) + collectives(backward) == collectives(joint)
    (output,) = forward.graph.find_nodes(op="output")
    saved = [node.name for node in output.args[0][1:]]
    inputs = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    assert inputs[-1] == "tangents_1" and sorted(inputs[:-1]) == sorted(saved)
    gathered = {node.args[0].name for node in forward.graph.nodes if "all_gather" in str(node.target)}
    assert not [
        node for node in output.args[0] if node.name.startswith("wait") and node.args[0].args[0].name in gathered
    ]
    with pytest.raises(ValueError, match=r"part must be one of .*, got 'both'"):
        build(overlap_graphs.llama(), groups, 1, "both")


def test_layers_share_no_memory_but_what_they_share(groups: GroupNames) -> None:
    """If layers shared memory, the peak of more layers would be counted too small."""
    one, two = (build(overlap_graphs.llama(), groups, layers) for layers in (1, 2))

    def num_storages(gm: GraphModule) -> int:
        vals = pytree.tree_leaves([node.meta.get("val") for node in gm.graph.nodes])
        return len({val.untyped_storage()._cdata for val in vals if isinstance(val, torch.Tensor)})

    assert num_storages(two) == 2 * num_storages(one) - 3  # x, cos and sin


def hideable(groups: GroupNames, program: str) -> int:
    """How much could hide in a graph of matmuls a, b, c and a reduce_scatter after a that only some of them need."""
    graph, mode = Graph(), torch._subclasses.FakeTensorMode()
    functional = torch.ops._c10d_functional

    def call(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
        return node

    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(4096, 4096, dtype=torch.bfloat16)
    a = call(aten.mm.default, x, x)
    start = call(functional.reduce_scatter_tensor.default, a, "sum", 8, groups.tp)
    waited = call(functional.wait_tensor.default, start)
    b = call(aten.mm.default, waited, x)
    graph.output((b, call(aten.mm.default, x, x)) if program == "beside" else (b,))
    gm, estimator = GraphModule(torch.nn.Module(), graph), Estimator("cuda")
    traced = simulate(gm, estimator)
    if program == "beside":
        (line,) = traced.collectives
        longer = replace(traced, collectives=[replace(line, alone_ms=10.0)])
        assert overlap.num_hideable(gm, estimator, longer) == 0
    return overlap.num_hideable(gm, estimator, traced)


def test_hideable_is_what_has_enough_compute_beside_it(groups: GroupNames) -> None:
    assert hideable(groups, "beside") == 1
    assert hideable(groups, "in a chain") == 0


def test_torch_plans_a_copy_with_our_numbers(groups: GroupNames) -> None:
    from torch._inductor.fx_passes import overlap_scheduling

    if not hasattr(overlap_scheduling, "estimate_roofline_runtime_ms"):
        pytest.skip("torch 2.11's scheduler takes no estimate of a matmul")
    gm, estimator = build(overlap_graphs.llama(), groups, 2), Estimator("cuda")
    before, roofline = [node.name for node in gm.graph.nodes], overlap_scheduling.estimate_roofline_runtime_ms
    found = overlap_torch.schedule(gm, estimator, bucket=False)
    assert [node.name for node in gm.graph.nodes] == before
    assert overlap_scheduling.estimate_roofline_runtime_ms is roofline
    traced, after = simulate(gm, estimator), simulate(found.gm, estimator)
    assert after.exposed_ms < traced.exposed_ms and after.compute_ms == pytest.approx(traced.compute_ms)
    assert sum(line.hidden for line in after.collectives) >= 10


@pytest.mark.thorough
def test_the_bench_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], groups: GroupNames
) -> None:
    file = tmp_path / "bench.json"
    options = ["--models", "llama-8b", "--parts", "forward", "--layers", "2", "--json", str(file)]

    def fail(gm: GraphModule, estimator: Estimator, *, bucket: bool, memory_ratio: float) -> Any:
        raise AttributeError("no such thing\nand more")

    in_world = mock.patch.object(overlap_graphs, "world", lambda: mock.MagicMock(__enter__=lambda _: groups))
    with in_world, mock.patch.object(overlap_torch, "schedule", fail):
        assert overlap.main(options) == 0
    report = json.loads(file.read_text())
    jsonschema.validate(report, json.loads((Path(__file__).parents[1] / "schemas" / "bench_overlap.json").read_text()))
    printed = capsys.readouterr().out
    rows = [OverlapRow(**row | {"case": GraphCase(**row["case"])}) for row in report["rows"]]
    for row in rows:
        assert row.error or re.search(rf"^{row.variant} .* {row.exposed_ms:.2f} +{row.total_ms:.2f} ", printed, re.M)
    assert f"{TORCH}: failed: AttributeError: no such thing\n" in printed
    by_variant = {row.variant: row for row in rows}
    assert by_variant[TORCH].error == "failed: AttributeError: no such thing"
    traced, ours, bound = by_variant[TRACED], by_variant[OURS], by_variant["bound"]
    # All gathers of FSDP could hide but that of the first layer's q k v, which has only a norm beside it
    assert traced.collectives == 20 and traced.hidden == 0 and traced.hideable == 11 == bound.hidden
    assert bound.total_ms <= traced.total_ms and bound.over_bound_percent == 0
    assert ours.over_bound_percent == pytest.approx(100 * (ours.total_ms / bound.total_ms - 1))
    assert [row["budget_percent"] for row in report["budgets"]] == [0, 5, 20]
    goals = {goal["name"]: goal for goal in report["goals"]}
    share = goals["exposed, % of communication, fusedcomm, llama forward, largest"]
    assert share["value"] == pytest.approx(100 * ours.exposed_ms / traced.comm_ms)
    assert share["met"] == (share["value"] <= 5)
    assert not [name for name in goals if "torch" in name]


def test_the_worst_graph_counts() -> None:
    small, large = GraphCase("llama-8b", 4, "forward"), GraphCase("llama-8b", 32, "forward")
    rows = []
    for case in (small, large):
        row = OverlapRow(case, TRACED, 5, 10, 100.0, nodes=100, exposed_ms=90.0, total_ms=200.0)
        fine = {"exposed_ms": 4.0, "total_ms": 110.0, "pass_s": 1.0, "hidden": 8}
        rows += [row, *(replace(row, variant=v, **fine) for v in (TORCH, TORCH_BUCKETED, MOVED, UNFUSED, OURS))]
    rows = [replace(row, nodes=800, pass_s=8 * row.pass_s) if row.case == large else row for row in rows]
    goals = overlap.summary(rows, [])
    assert len(goals) == 8 and all(goal.met for goal in goals)
    worse: dict[str, dict[str, Any]] = {
        "exposed, fusedcomm, moved - torch, ms": {"variant": MOVED, "exposed_ms": 4.5},
        "hidden, fusedcomm, moved - torch": {"variant": MOVED, "hidden": 7},
        "exposed, fusedcomm, unfused - torch, bucketed, ms": {"variant": UNFUSED, "exposed_ms": 4.5},
        "exposed, % of communication, fusedcomm, llama forward": {"variant": OURS, "exposed_ms": 5.5},
        "total, fusedcomm - as traced, ms": {"variant": UNFUSED, "total_ms": 200.5},
        "peak over its budget, %": {"variant": MOVED, "peak_over_percent": 5.1},
        "pass, fusedcomm / torch, bucketed": {"variant": OURS, "pass_s": 8.5},
        "pass per node, fusedcomm, more / fewer layers": {"variant": OURS, "pass_s": 12.5},
    }
    for name, change in worse.items():
        changed = [
            replace(row, **change) if (row.case, row.variant) == (large, change["variant"]) else row for row in rows
        ]
        missed = {goal.name for goal in overlap.summary(changed, []) if not goal.met}
        assert any(each.startswith(name) for each in missed), name
    over = replace(rows[0], variant=OURS, budget_percent=0, peak_over_percent=0.1)
    (goal,) = [goal for goal in overlap.summary(rows, [over]) if not goal.met]
    assert goal.name == "peak over its budget, %, largest" and "missed" in overlap.goal_line(goal)
