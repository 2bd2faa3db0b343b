"""The graphs of fusedcomm.bench.overlap are the programs that they claim to be, and the command reports what variants
came to.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch
from torch.fx import GraphModule

from fusedcomm.bench import overlap, overlap_graphs, overlap_torch
from fusedcomm.bench.overlap import OURS, TORCH, TRACED, GraphCase, OverlapRow
from fusedcomm.bench.overlap_graphs import GroupNames, build
from tests.helpers.tiers import nightly_but

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


@pytest.mark.parametrize("model", nightly_but(["llama-8b"], PER_LAYER))
def test_a_graph_has_the_matmuls_and_collectives_of_its_model(model: str, groups: GroupNames) -> None:
    forward, joint, weights = PER_LAYER[model]
    for part, per_layer, matmuls in (("forward", forward, 1), ("joint", joint, 3)):
        gm = build(overlap.MODELS[model](), groups, 2, part)
        gm.graph.lint()
        names = {(op, getattr(groups, dim)): 2 * number for (op, dim), number in per_layer.items()}
        assert collectives(gm) == names
        assert matmul_flops(gm) == 2 * 2 * weights * matmuls


def test_the_bench_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], groups: GroupNames
) -> None:
    file = tmp_path / "bench.json"
    options = ["--models", "llama-8b", "--parts", "forward", "--layers", "2", "--json", str(file)]

    in_world = mock.patch.object(overlap_graphs, "world", lambda: mock.MagicMock(__enter__=lambda _: groups))
    with in_world, mock.patch.object(overlap_torch, "schedule", side_effect=AttributeError("no such thing\nand more")):
        assert overlap.main(options) == 0
    report = json.loads(file.read_text())
    jsonschema.validate(report, json.loads((Path(__file__).parents[1] / "schemas" / "bench_overlap.json").read_text()))
    printed = capsys.readouterr().out
    rows = [OverlapRow(**row | {"case": GraphCase(**row["case"])}) for row in report["rows"]]
    for row in rows:
        assert row.error or re.search(rf"^{row.variant} .* {row.exposed_ms:.2f} +{row.total_ms:.2f} ", printed, re.M)
    by_variant = {row.variant: row for row in rows}
    assert by_variant[TORCH].error == "failed: AttributeError: no such thing"
    traced, ours, bound = by_variant[TRACED], by_variant[OURS], by_variant["bound"]
    # All gathers of FSDP could hide but that of the first layer's q k v, which has only a norm beside it
    assert traced.collectives == 20 and traced.hidden == 0 and traced.hideable == 11 == bound.hidden
    assert bound.total_ms <= traced.total_ms and bound.over_bound_percent == 0
    assert ours.over_bound_percent == pytest.approx(100 * (ours.total_ms / bound.total_ms - 1))
    goals = {goal["name"]: goal for goal in report["goals"]}
    share = goals["exposed, % of communication, fusedcomm, llama forward, largest"]
    assert share["value"] == pytest.approx(100 * ours.exposed_ms / traced.comm_ms)
    assert not [name for name in goals if "torch" in name]
