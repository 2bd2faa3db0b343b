"""The simulator against hand-computed cases, and its totals against its spans; its traces and pictures."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

import fusedcomm  # noqa: F401
from fusedcomm.compile.overlap.node_cost import NodeCost, Transfer
from fusedcomm.compile.overlap.simulator import simulate
from fusedcomm.compile.overlap.timeline import Timeline
from tests.compile.test_program import Costs
from tests.helpers.order_checks import Traced

aten, functional = torch.ops.aten, torch.ops._c10d_functional
LINKS = {"a": "intra", "b": "intra", "c": "inter"}  # by group


@dataclass(frozen=True)
class Step:
    what: str  # "compute", "start", "wait" for the start of this name, "fused"
    name: str
    cost: NodeCost = NodeCost()  # noqa: RUF009


def compute(name: str, ms: float) -> Step:
    return Step("compute", name, NodeCost(ms))


def start(name: str, group: str, latency: float, wire: float) -> Step:
    return Step("start", name, NodeCost(transfer=Transfer(LINKS[group], group, latency, wire)))


def wait(name: str) -> Step:
    return Step("wait", name)


def fused(name: str, compute_ms: float, fused_ms: float, group: str, latency: float, wire: float) -> Step:
    return Step("fused", name, NodeCost(compute_ms, Transfer(LINKS[group], group, latency, wire), fused_ms))


def simulated(steps: Sequence[Step]) -> Timeline:
    graph = Graph()
    x = graph.placeholder("x")
    made: dict[str, Node] = {}
    for step in steps:
        target, args, name = {
            "compute": (aten.neg.default, (x,), step.name),
            "start": (functional.all_reduce.default, (x, "sum", "g"), step.name),
            "wait": (functional.wait_tensor.default, (made.get(step.name),), f"wait_{step.name}"),
            "fused": (torch.ops.fusedcomm.matmul_all_reduce.default, (x, x, None, "sum", 2, "g"), step.name),
        }[step.what]
        node = graph.create_node("call_function", target, args, name=name)
        made.setdefault(step.name, node)
    graph.output(())
    return simulate(GraphModule(torch.nn.Module(), graph), Costs({step.name: step.cost for step in reversed(steps)}))


CASES: dict[str, tuple[list[Step], float, dict[str, tuple[float, float, float]]]] = {  # steps, total, start/end/exposed
    "hidden": ([start("s", "a", 1, 2), compute("m", 5), wait("s")], 5, {"s": (0, 3, 0)}),
    "exposed": ([compute("m", 5), start("s", "a", 1, 2), wait("s")], 8, {"s": (5, 8, 3)}),
    "one group: one after the other": (
        [start("s", "a", 1, 2), start("t", "a", 1, 3), compute("m", 7), wait("s"), wait("t")],
        7,
        {"s": (0, 3, 0), "t": (3, 7, 0)},
    ),
    "two groups share a link": (
        [start("s", "a", 0, 2), start("t", "b", 0, 4), wait("s"), wait("t")],
        6,
        {"s": (0, 4, 4), "t": (0, 6, 2)},
    ),
    "latency is not shared": (
        [start("s", "a", 3, 2), start("t", "b", 0, 4), wait("t"), wait("s")],
        6,
        {"s": (0, 6, 1), "t": (0, 5, 5)},
    ),
    "fused, longer than its matmul": ([fused("f", 4, 6, "a", 1, 2)], 6, {"f": (0, 3, 2)}),
    "fused, on a busy link": (
        [start("s", "a", 0, 8), fused("f", 4, 4, "b", 0, 4), wait("s")],
        12,
        {"s": (0, 12, 4), "f": (0, 8, 4)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_hand_computed(name: str) -> None:
    steps, total_ms, want = CASES[name]
    found = simulated(steps)
    assert found.total_ms == total_ms
    assert {line.node: (line.start_ms, line.end_ms, line.exposed_ms) for line in found.collectives} == want


def test_what_hides_a_collective_is_what_computes_meanwhile() -> None:
    found = simulated([compute("m", 1), start("s", "a", 0, 2), compute("n", 1), compute("o", 2), wait("s")])
    (line,) = found.collectives
    assert line.hidden_by == ("n", "o") and line.hidden
    assert found.waits == []


# traces and pictures
@pytest.fixture(scope="module")
def shown() -> Timeline:
    b = Traced()
    costs: dict[str, NodeCost] = {}
    y = b.input(1024)
    for i, group in enumerate("aabc" * 2):
        s = b.call(functional.all_reduce.default, y, "sum", "g")
        m = b.call(aten.exp.default, y)
        t = b.call(functional.wait_tensor.default, s)
        y = b.call(aten.add.Tensor, m, t)
        costs |= {s.name: NodeCost(transfer=Transfer(LINKS[group], group, 0.5, 1.0 + i)), m.name: NodeCost(3.0)}
    return simulate(b.returns(y), Costs(costs))


def test_trace_has_the_numbers_of_the_timeline(shown: Timeline, tmp_path: Path) -> None:
    file = io.StringIO()
    for each in (file, tmp_path / "trace.json"):
        shown.to_trace(each)
    assert (tmp_path / "trace.json").read_text() == file.getvalue()
    trace = json.loads(file.getvalue())
    events = trace["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(lanes.values()) == ["compute stream", "inter: group c", "intra: group a", "intra: group b"]
    slices = [(lanes[e["tid"]], e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in events if e["ph"] == "X"]
    want = [("compute stream", *span) for span in shown.compute]
    want += [("compute stream", f"exposed: {name}", begin, end) for name, begin, end in shown.waits]
    want += [(f"{e.link}: group {e.group}", e.node, e.start_ms, e.end_ms) for e in shown.collectives]
    assert shown.waits and any(line.hidden for line in shown.collectives)
    assert [each[:2] for each in slices] == [each[:2] for each in want]
    assert [each[2:] for each in slices] == [pytest.approx(each[2:], abs=1e-9) for each in want]
    counters = [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert max(num_bytes for _, num_bytes in counters) == shown.peak_bytes
    assert len(counters) == len(shown.memory)
    for lane in lanes.values():  # nothing in a lane overlaps
        own = sorted(each[2:] for each in slices if each[0] == lane)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(own))


def test_without_matplotlib_it_says_what_to_install(shown: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        shown.plot(io.BytesIO())
