"""What a graph is to the simulator and the passes: memory against live intervals, and what must stay before what."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fusedcomm.compile.graph.collectives import kind_of
from fusedcomm.compile.graph.layout import ASSUMED_SIZE
from fusedcomm.compile.overlap.node_cost import NodeCost, Transfer
from fusedcomm.compile.overlap.program import Program
from fusedcomm.compile.overlap.simulator import run, simulate

aten, functional = torch.ops.aten, torch.ops._c10d_functional


class Costs:
    """Stands for an estimator: costs by the name of the node. Other nodes, and collectives, take no time."""

    def __init__(self, costs: Mapping[str, NodeCost] | None = None) -> None:
        self.costs = costs or {}

    def cost(self, node: Node) -> NodeCost:
        return self.costs.get(
            node.name, NodeCost(transfer=Transfer("intra", "g", 0, 0)) if kind_of(node) else NodeCost()
        )


class Builder:
    """A graph of fake tensors, in which each op is called as it is added."""

    def __init__(self) -> None:
        self.graph, self.mode = Graph(), FakeTensorMode()

    def input(self, name: str, *shape: int) -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape or (4,))
        return node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            vals = pytree.tree_map(lambda arg: arg.meta["val"] if isinstance(arg, Node) else arg, (args, kwargs))
            node.meta["val"] = target(*vals[0], **vals[1])
        return node

    def opaque(self, target: Any, *args: Any) -> Node:
        return self.graph.call_function(target, args)

    def done(self, *results: Node, shared: bool = True) -> GraphModule:
        """The graph. If not ``shared``, each value has a storage of its own, as make_fx gives them for real tensors."""
        self.graph.output(results)
        if not shared:
            for node in self.graph.nodes:
                vals = node.meta.get("val")
                node.meta["val"] = pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, vals)
        return GraphModule(torch.nn.Module(), self.graph)


# memory: tensors of 4 float32, 16 bytes, unless said


def views(b: Builder) -> tuple[Node, ...]:
    """neg, its view and what is written to it are one storage: 16 in, 16 neg, 16 exp."""
    y = b(aten.neg.default, b.input("x"))
    v = b(aten.view.default, y, [2, 2])
    b(aten.add_.Tensor, v, 1)
    return (b(aten.exp.default, y),)


def freed(b: Builder) -> tuple[Node, ...]:
    """x, and two values of a chain at a time, are live."""
    y = b.input("x")
    for _ in range(5):
        y = b(aten.neg.default, y)
    return (y,)


def held_by_a_wait(b: Builder) -> tuple[Node, ...]:
    """x, what is sent, 32 received and neg beside it are live.

    What is sent lives until the wait, though nothing else reads it.
    """
    x = b.input("x")
    s = b(functional.all_gather_into_tensor.default, b(aten.exp.default, x), 2, "g")
    y = b(aten.neg.default, x)
    return (b(functional.wait_tensor.default, s), y)


def view_of_a_wait(b: Builder) -> tuple[Node, ...]:
    """x, 32 received, 32 exp and 32 neg are live. The view of what is received is no copy, though it is returned."""
    s = b(functional.all_gather_into_tensor.default, b.input("x"), 2, "g")
    t = b(functional.wait_tensor.default, s)
    v = b(aten.view.default, t, [2, 4])
    return (v, b(aten.exp.default, v), b(aten.neg.default, t))


def backward(b: Builder) -> tuple[Node, ...]:
    """The weight stays; what was saved and the tangent go after their last use: 48 and 16, then 32 and 16."""
    weight, saved, tangent = b.input("primals_1"), b.input("exp"), b.input("tangents_1")
    y = b(aten.mul.Tensor, saved, tangent)
    return (b(aten.mul.Tensor, b(aten.neg.default, y), weight),)


def forward_of_the_same(b: Builder) -> tuple[Node, ...]:
    """All three inputs are the caller's: 48, and two values of a chain at a time."""
    weight, saved, other = b.input("primals_1"), b.input("exp"), b.input("primals_2")
    y = b(aten.mul.Tensor, saved, other)
    return (b(aten.mul.Tensor, b(aten.neg.default, y), weight),)


def part_of_a_result(b: Builder) -> tuple[Node, ...]:
    """A row that is returned keeps all of the exp."""
    y = b(aten.exp.default, b.input("x"))
    row = b(aten.slice.Tensor, y, 0, 0, 1)
    return (row, b(aten.neg.default, b(aten.neg.default, row)))


PEAKS: dict[Callable[[Builder], tuple[Node, ...]], int] = {
    views: 16 + 16 + 16,
    freed: 16 + 32,
    held_by_a_wait: 16 + 16 + 32 + 16,
    view_of_a_wait: 16 + 32 + 32 + 32,
    backward: 64,
    forward_of_the_same: 48 + 32,
    part_of_a_result: 16 + 16 + 4 + 4,
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("build", PEAKS)
def test_peak(build: Callable[[Builder], tuple[Node, ...]], shared: bool) -> None:
    b = Builder()
    found = simulate(b.done(*build(b), shared=shared), Costs())
    assert found.peak_bytes == PEAKS[build]
    assert max(num_bytes for _, num_bytes in found.memory) == PEAKS[build]


@st.composite
def memory_programs(draw: st.DrawFn) -> tuple[Program, list[set[int]], list[int]]:
    """A random program: the nodes that touch each storage, as the generator knows them, and its bytes.

    Node 0, the input, and the output touch what is never freed.
    """
    b = Builder()
    nodes, storage, sizes = [b.input("x", 8)], [0], [32]
    touched, waits = [{0}], dict[int, int]()
    for i in range(1, draw(st.integers(2, 12))):
        of = draw(st.integers(0, i - 1))
        what = draw(st.sampled_from(["new", "view", "write", "start", "wait"]))
        if (what == "wait") != (of in waits):
            what = "wait" if of in waits else "new"
        new = what in ("new", "start")
        target, args = {
            "new": (aten.neg.default, ()),
            "view": (aten.view.default, ([2, -1],)),
            "write": (aten.add_.Tensor, (1,)),
            "start": (functional.all_gather_into_tensor.default, (2, "g")),
            "wait": (functional.wait_tensor.default, ()),
        }[what]
        nodes.append(b(target, nodes[of], *args))
        storage.append(len(sizes) if new else storage[of])
        touched[storage[of]].add(i)
        if new:
            sizes.append(nodes[i].meta["val"].numel() * 4)
            touched.append({i})
        if what == "start":
            waits[i] = of
        if what == "wait":
            touched[storage[waits[of]]].add(i)
    results = draw(st.sets(st.integers(0, len(nodes) - 1), min_size=1))
    for of in results | {0}:
        touched[storage[of]].add(len(nodes))
    gm = b.done(*(nodes[of] for of in results), shared=draw(st.booleans()))
    return Program(gm.graph, Costs().cost), touched, sizes


@settings(max_examples=80, deadline=None)
@given(memory_programs(), st.randoms(use_true_random=False))
def test_peak_over_live_intervals(made: tuple[Program, list[set[int]], list[int]], chance: random.Random) -> None:
    """The peak is right in the order of the program, and in another that its dependencies allow."""
    program, touched, sizes = made
    for order in (list(range(len(program))), topological(program.before, chance.choice)):
        place = {i: at for at, i in enumerate(order)}
        lives = [(min(place[i] for i in each), max(place[i] for i in each)) for each in touched]
        live = [
            sum(size for size, (first, last) in zip(sizes, lives, strict=True) if first <= at <= last)
            for at in place.values()
        ]
        found = run(program, order)
        assert found.peak_bytes == max(live)
        assert [num_bytes for _, num_bytes in found.memory] == live


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


def write_after_read(b: Builder) -> tuple[Node, Node]:
    x = b.input("x")
    return b(aten.neg.default, x), b(aten.add_.Tensor, x, 1)


def read_after_write(b: Builder) -> tuple[Node, Node]:
    x = b.input("x")
    return b(aten.add_.Tensor, x, 1), b(aten.neg.default, x)


def write_after_write(b: Builder) -> tuple[Node, Node]:
    x = b.input("x")
    return b(aten.add_.Tensor, x, 1), b(aten.mul_.Tensor, x, 2)


def write_through_a_view(b: Builder) -> tuple[Node, Node]:
    x = b.input("x")
    v = b(aten.view.default, x, [2, 2])
    return b(aten.zero_.default, v), b(aten.neg.default, b(aten.t.default, b(aten.view.default, x, [2, 2])))


def write_through_a_part(b: Builder) -> tuple[Node, Node]:
    x = b.input("x")
    parts = b(aten.split.Tensor, x, 2)
    part = b(operator.getitem, parts, 1)
    return b(aten.zero_.default, part), b(aten.neg.default, x)


def write_to_an_out(b: Builder) -> tuple[Node, Node]:
    x, y = b.input("x"), b.input("y")
    return b(aten.add.out, x, x, out=y), b(aten.neg.default, y)


def write_to_a_view_of_a_wait(b: Builder) -> tuple[Node, Node]:
    t = b(functional.wait_tensor.default, b(functional.all_reduce.default, b.input("x"), "sum", "g"))
    return b(aten.zero_.default, b(aten.view.default, t, [2, 2])), b(aten.neg.default, t)


def overwrite_what_is_sent(b: Builder) -> tuple[Node, Node]:
    x = b.input("x")
    t = b(functional.wait_tensor.default, b(functional.all_reduce.default, x, "sum", "g"))
    return t, b(aten.zero_.default, x)


def read_what_an_in_place_collective_writes(b: Builder) -> tuple[Node, Node]:
    x = b.input("x")
    t = b(functional.wait_tensor.default, b(functional.all_reduce_.default, x, "sum", "g"))
    return t, b(aten.neg.default, x)


def read_what_a_collective_writes_to_its_out(b: Builder) -> tuple[Node, Node]:
    x, y = b.input("x"), b.input("y", 8)
    s = b(functional.all_gather_into_tensor_out.default, x, 2, "g", out=y)
    return b(functional.wait_tensor.default, s), b(aten.neg.default, y)


def wait_for_a_coalesced_one(b: Builder) -> tuple[Node, Node]:
    x, y = b.input("x"), b.input("y")
    s = b(functional.all_reduce_coalesced.default, [x, y], "sum", "g")
    t = b(functional.wait_tensor.default, b(operator.getitem, s, 1))
    return t, b(aten.zero_.default, x)


def random_numbers(b: Builder) -> tuple[Node, Node]:
    x = b.input("x")
    return b(aten.rand.default, [4]), b(aten.bernoulli_.float, x)


def random_numbers_in_a_higher_order_op(b: Builder) -> tuple[Node, Node]:
    return b.opaque(rng_prims.run_and_save_rng_state, aten.rand.default, [4]), b(aten.rand.default, [4])


def higher_order_op_may_write(b: Builder) -> tuple[Node, Node]:
    x = b.input("x")
    return b.opaque(torch.ops.higher_order.invoke_subgraph, None, "f", x), b(aten.neg.default, x)


def order_of_inputs(b: Builder) -> tuple[Node, Node]:
    return b.input("x"), b.input("y")


PAIRS = [
    *(
        write_after_read,
        read_after_write,
        write_after_write,
        write_through_a_view,
        write_through_a_part,
        write_to_an_out,
    ),
    *(write_to_a_view_of_a_wait, overwrite_what_is_sent, read_what_an_in_place_collective_writes),
    *(read_what_a_collective_writes_to_its_out, wait_for_a_coalesced_one, random_numbers),
    *(random_numbers_in_a_higher_order_op, higher_order_op_may_write, order_of_inputs),
]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("build", PAIRS)
def test_the_second_stays_after_the_first(build: Callable[[Builder], tuple[Node, Node]], shared: bool) -> None:
    b = Builder()
    first, second = build(b)
    program = Program(b.done(shared=shared).graph, Costs().cost)
    index = {node: i for i, node in enumerate(program.nodes)}

    def as_early_as(before: Sequence[Sequence[int]]) -> bool:
        """Whether the second node can run before the first, if the first runs last of all that can run."""
        order = topological(before, lambda able: max(able, key=lambda i: (i != index[first], i != len(program) - 1)))
        return order.index(index[second]) < order.index(index[first])

    data = [[index[each] for each in node.all_input_nodes] for node in program.nodes]
    assert as_early_as(data)  # the arguments alone would allow it
    assert not as_early_as(program.before)


def test_a_wait_for_what_is_computed_from_another_is_not_for_its_start() -> None:
    b = Builder()
    t = b(functional.wait_tensor.default, b(functional.all_reduce.default, b.input("x"), "sum", "g"))
    b(functional.wait_tensor.default, b(aten.view.default, b(aten.neg.default, t), [2, 2]))
    program = Program(b.done().graph, Costs().cost)
    assert program.waits_for == [[], [], [1], [], [], [], []]
    assert program.memory.of == [[0], [1], [1], [2], [2], [2], []]


def test_reads_and_collectives_are_free_to_move() -> None:
    """Nothing is written: only arguments count."""
    b = Builder()
    x = b.input("x")
    for _ in range(2):
        y = b(functional.wait_tensor.default, b(functional.all_reduce.default, x, "sum", "g"))
        b(aten.view.default, b(aten.neg.default, y), [2, 2])
    program = Program(b.done().graph, Costs().cost)
    index = {node: i for i, node in enumerate(program.nodes)}
    for node, before in list(zip(program.nodes, program.before, strict=True))[:-1]:
        assert before == sorted(index[each] for each in node.all_input_nodes)


def mutating(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    v = x.view(2, 2)
    a = x + y
    v.mul_(2)
    b = x.t() if x.dim() == 2 else x.neg()
    parts = y.split(2)
    parts[0].add_(torch.rand(2))
    c = y * b
    v[0].copy_(parts[1])
    return a, c, x + torch.rand(4), y.bernoulli_(0.5)


def test_any_order_that_is_allowed_gives_the_same_values() -> None:
    """The program is traced with real tensors. Some orders that arguments alone allow give other values."""
    gm = make_fx(mutating)(torch.ones(4), torch.ones(4))
    program = Program(gm.graph, Costs().cost)
    index = {node: i for i, node in enumerate(program.nodes)}
    data = [[index[each] for each in node.all_input_nodes] for node in program.nodes]
    data[-1] = list(range(len(program) - 1))
    want = values(program, range(len(program)))
    choose = random.Random(0).choice
    assert all(values(program, topological(program.before, choose)) == want for _ in range(20))
    assert any(values(program, topological(data, choose)) != want for _ in range(20))


def values(program: Program, order: Sequence[int]) -> list[list[float]]:
    """What the graph gives in that order, and what it leaves in its inputs."""
    torch.manual_seed(0)
    inputs = [torch.arange(4.0), torch.arange(4.0) + 10]
    names = [node.name for node in program.nodes if node.op == "placeholder"]
    found: dict[Node, Any] = {}
    for node in (program.nodes[i] for i in order):
        if node.op == "placeholder":
            found[node] = inputs[names.index(node.name)]
        elif node.op == "output":
            return [each.tolist() for each in [*(found[arg] for arg in node.all_input_nodes), *inputs]]
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), found.__getitem__)
            found[node] = node.target(*args, **kwargs)
    raise AssertionError("no output")
