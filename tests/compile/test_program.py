"""What a graph is to the simulator and the passes: memory against live intervals, and what must stay before what."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor
from torch._prims import rng_prims
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusedcomm.compile.graph.collectives import kind_of
from fusedcomm.compile.graph.layout import ASSUMED_SIZE
from fusedcomm.compile.overlap.node_cost import NodeCost, Transfer
from fusedcomm.compile.overlap.program import Program
from fusedcomm.compile.overlap.simulator import simulate
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
    assert max(num_bytes for _, num_bytes in found.memory) == PEAKS[build]


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
