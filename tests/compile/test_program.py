"""What a graph is to the simulator and the passes: memory against live intervals, and what must stay before what."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._prims import rng_prims
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import fusedcomm  # noqa: F401
from fusedcomm.compile.graph.collectives import kind_of
from fusedcomm.compile.graph.layout import ASSUMED_SIZE
from fusedcomm.compile.overlap.node_work import NodeCost, Transfer
from fusedcomm.compile.overlap.program import Program
from fusedcomm.compile.overlap.simulator import simulate
from fusedcomm.compile.overlap.timeline import Timeline
from tests.helpers.order_checks import Traced

aten, functional = torch.ops.aten, torch.ops._c10d_functional


class Costs:
    """Stands for an estimator: costs by the name of the node. Other nodes, and collectives, take no time."""

    def __init__(self, costs: Mapping[str, NodeCost] | None = None) -> None:
        self.costs = costs or {}

    def cost(self, node: Node) -> NodeCost:
        return self.costs.get(
            node.name, NodeCost(transfer=Transfer("intra", "g", 0, 0)) if kind_of(node) else NodeCost()
        )


# memory: tensors of 4 float32, 16 bytes, unless said
def held_by_a_wait(b: Traced) -> tuple[Node, ...]:
    """Live are x, what is sent until the wait, 32 received, and neg beside it."""
    x = b.input(4)
    s = b.call(functional.all_gather_into_tensor.default, b.call(aten.exp.default, x), 2, "g")
    y = b.call(aten.neg.default, x)
    return (b.call(functional.wait_tensor.default, s), y)


def backward(b: Traced) -> tuple[Node, ...]:
    """The weight stays; what was saved and the tangent go after their last use: 48 and 16, then 32 and 16."""
    weight, saved, tangent = b.input(4, name="primals_1"), b.input(4, name="exp"), b.input(4, name="tangents_1")
    y = b.call(aten.mul.Tensor, saved, tangent)
    return (b.call(aten.mul.Tensor, b.call(aten.neg.default, y), weight),)


def forward_of_the_same(b: Traced) -> tuple[Node, ...]:
    """All three inputs are the caller's: 48, and two values of a chain at a time."""
    weight, saved, other = b.input(4, name="primals_1"), b.input(4, name="exp"), b.input(4, name="primals_2")
    y = b.call(aten.mul.Tensor, saved, other)
    return (b.call(aten.mul.Tensor, b.call(aten.neg.default, y), weight),)


def part_of_a_result(b: Traced) -> tuple[Node, ...]:
    """A row that is returned keeps all of the exp."""
    y = b.call(aten.exp.default, b.input(4))
    row = b.call(aten.slice.Tensor, y, 0, 0, 1)
    return (row, b.call(aten.neg.default, b.call(aten.neg.default, row)))


PEAKS: dict[Callable[[Traced], tuple[Node, ...]], int] = {
    held_by_a_wait: 16 + 16 + 32 + 16,
    backward: 64,
    forward_of_the_same: 48 + 32,
    part_of_a_result: 16 + 16 + 4 + 4,
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("build", PEAKS)
def test_peak(build: Callable[[Traced], tuple[Node, ...]], shared: bool) -> None:
    b = Traced(own=not shared)
    found = simulate(b.returns(*build(b)), Costs())
    assert found.peak_bytes == PEAKS[build]


def test_symbolic_sizes_are_assumed() -> None:
    """Two symbols of one size each; what they were when the graph was traced may differ between ranks."""

    def fn(x: Tensor) -> Tensor:
        return (x.exp().view(-1) + 1).neg()

    peaks = [
        simulate(make_fx(fn, tracing_mode=mode)(torch.ones(6, 5)), Costs()).peak_bytes
        for mode in ("symbolic", "fake", "real")
    ]
    assert peaks == [3 * 4 * ASSUMED_SIZE**2, 3 * 120, 3 * 120]


# dependencies
def topological(before: Sequence[Sequence[int]], choose: Callable[[list[int]], int]) -> list[int]:
    order: list[int] = []
    while len(order) < len(before):
        done = set(order)
        order.append(choose([i for i in range(len(before)) if i not in done and done.issuperset(before[i])]))
    return order


def write_to_an_out(b: Traced) -> tuple[Node, Node]:
    x, y = b.input(4), b.input(4)
    return b.call(aten.add.out, x, x, out=y), b.call(aten.neg.default, y)


def overwrite_what_is_sent(b: Traced) -> tuple[Node, Node]:
    x = b.input(4)
    t = b.call(functional.wait_tensor.default, b.call(functional.all_reduce.default, x, "sum", "g"))
    return t, b.call(aten.zero_.default, x)


def read_what_an_in_place_collective_writes(b: Traced) -> tuple[Node, Node]:
    x = b.input(4)
    t = b.call(functional.wait_tensor.default, b.call(functional.all_reduce_.default, x, "sum", "g"))
    return t, b.call(aten.neg.default, x)


def read_what_a_collective_writes_to_its_out(b: Traced) -> tuple[Node, Node]:
    x, y = b.input(4), b.input(8)
    s = b.call(functional.all_gather_into_tensor_out.default, x, 2, "g", out=y)
    return b.call(functional.wait_tensor.default, s), b.call(aten.neg.default, y)


def wait_for_a_coalesced_one(b: Traced) -> tuple[Node, Node]:
    x, y = b.input(4), b.input(4)
    s = b.call(functional.all_reduce_coalesced.default, [x, y], "sum", "g")
    t = b.call(functional.wait_tensor.default, b.call(operator.getitem, s, 1))
    return t, b.call(aten.zero_.default, x)


def random_numbers_in_a_higher_order_op(b: Traced) -> tuple[Node, Node]:
    first = b.add("call_function", rng_prims.run_and_save_rng_state, (aten.rand.default, [4]))
    return first, b.call(aten.rand.default, [4])


def higher_order_op_may_write(b: Traced) -> tuple[Node, Node]:
    x = b.input(4)
    return b.add("call_function", torch.ops.higher_order.invoke_subgraph, (None, "f", x)), b.call(aten.neg.default, x)


def order_of_inputs(b: Traced) -> tuple[Node, Node]:
    return b.input(4), b.input(4)


PAIRS = [  # others are in the random graphs of test_overlap_properties.py
    *(write_to_an_out, overwrite_what_is_sent, read_what_an_in_place_collective_writes),
    *(read_what_a_collective_writes_to_its_out, wait_for_a_coalesced_one),
    *(random_numbers_in_a_higher_order_op, higher_order_op_may_write, order_of_inputs),
]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("build", PAIRS)
def test_the_second_stays_after_the_first(build: Callable[[Traced], tuple[Node, Node]], shared: bool) -> None:
    b = Traced(own=not shared)
    first, second = build(b)
    program = Program(b.returns().graph, Costs().cost)
    index = {node: i for i, node in enumerate(program.nodes)}

    def as_early_as(before: Sequence[Sequence[int]]) -> bool:
        """Whether the second node can run before the first, if the first runs last of all that can run."""
        order = topological(before, lambda able: max(able, key=lambda i: (i != index[first], i != len(program) - 1)))
        return order.index(index[second]) < order.index(index[first])

    data = [[index[each] for each in node.all_input_nodes] for node in program.nodes]
    assert as_early_as(data)  # the arguments alone would allow it
    assert not as_early_as(program.before)


# the simulator against hand-computed cases
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
