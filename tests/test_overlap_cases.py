"""One small graph per decision of `schedule`: what it must not move, fuse or merge, and where it may."""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._higher_order_ops.utils import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fusedcomm.compile import bucket
from fusedcomm.compile.estimate import Estimator
from fusedcomm.compile.overlap import OverlapReport, schedule
from fusedcomm.compile.program import Program
from fusedcomm.compile.timeline import run, simulate
from fusedcomm.testing.ranks import RankPool
from tests.order_checks import WAIT, executed, is_start
from tests.random_graphs import Peers, aten, functional, inputs
from tests.test_overlap_properties import fake_world

all_gather, all_reduce = functional.all_gather_into_tensor.default, functional.all_reduce.default
N = 4096  # rows and columns of what pays to fuse


@pytest.fixture(scope="module")
def groups() -> Iterator[list[Peers]]:
    with fake_world(rank=1) as found:
        yield found


@pytest.fixture
def tp(groups: list[Peers]) -> Peers:
    return groups[1]


class Traced:
    """A graph, node by node. ``own``: every value has memory of its own, as after tracing real tensors."""

    def __init__(self, own: bool = False) -> None:
        self.graph, self.root, self.own, self.mode = Graph(), torch.nn.Module(), own, FakeTensorMode()

    def empty(self, like: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def input(self, *shape: int, **options: Any) -> Node:
        node = self.graph.placeholder(f"x_{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, **options)
        return node

    def attribute(self, name: str) -> Node:
        node = self.graph.create_node("get_attr", name)
        node.meta["val"] = self.empty(getattr(self.root, name))
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        vals = pytree.tree_map_only(Node, lambda each: each.meta["val"], (args, kwargs))
        with self.mode:
            node.meta["val"] = target(*vals[0], **vals[1])
        if self.own and isinstance(node.meta["val"], Tensor):
            node.meta["val"] = self.empty(node.meta["val"])
        return node

    def waited(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.call(WAIT, self.call(target, *args, **kwargs))

    def returns(self, *results: Node) -> GraphModule:
        self.graph.output(results)
        self.graph.lint()
        return GraphModule(self.root, self.graph)


def estimator(gm: GraphModule | None = None, **times: float) -> Estimator:
    """``times``: ms by how names of nodes begin."""
    names = [node.name for node in gm.graph.nodes] if gm is not None else []
    told = {name: ms for name in names for begin, ms in times.items() if name.startswith(begin)}
    return Estimator("cuda", ranks_per_node=4, times=told)


def names(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]


def starts(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if is_start(node)]


def is_before(gm: GraphModule, first: str, second: str) -> bool:
    order = names(gm)
    return order.index(first) < order.index(second)


def with_positions(gm: GraphModule) -> GraphModule:
    """A copy in which arguments of starts are given by position."""
    gm = copy.deepcopy(gm)
    for node in gm.graph.nodes:
        if is_start(node) or node.target is WAIT:
            node.args, node.kwargs = (*node.args, *node.kwargs.values()), {}
    return gm


def check_values(gm: GraphModule, groups: Sequence[Peers], times: Estimator, **options: Any) -> OverlapReport:
    """Schedules gm; its results stay, strides too."""
    args = inputs(gm, seed=0)
    want, twin = executed(with_positions(gm), args, groups, late=False), copy.deepcopy(gm)
    report = schedule(gm, estimator=times, **options)
    gm.graph.lint()
    for got, expected in zip(executed(with_positions(gm), args, groups, late=False), want, strict=True):
        assert torch.equal(got, expected)
    for old, new in zip(*(each.graph.output_node().all_input_nodes for each in (twin, gm)), strict=True):
        if isinstance(old.meta.get("val"), Tensor):
            assert new.meta["val"].stride() == old.meta["val"].stride()
    return report


# sizes that are not known


def dynamic(groups: list[Peers], rows: int, mode: str) -> tuple[list[str], list[str], list[tuple[str, ...]]]:
    """Order, fused ops and buckets of a graph traced with so many rows."""
    r, name = groups[1].size, groups[1].name

    def waited(op: Any, *args: Any) -> Tensor:
        return WAIT(op(*args, name))

    def program(x: Tensor, w: Tensor, shard: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        total = waited(all_reduce, (x @ w).sum(0), "sum")
        gathered = waited(all_gather, shard, r)
        small = waited(all_reduce, a, "sum"), waited(all_reduce, b, "sum")
        return waited(all_reduce, (x * total) @ gathered, "sum"), *small

    shapes = ((rows, 1024), (1024, 1024), (1024 // r, 1024), (64,), (64,))
    gm = make_fx(program, tracing_mode=mode)(*(torch.empty(shape, device="meta") for shape in shapes))
    report = schedule(gm, estimator=estimator())
    return names(gm), [each.op for each in report.fused], list(report.buckets.values())


def test_dynamic_sizes_are_planned_alike_whatever_they_were(groups: list[Peers]) -> None:
    few, many = (dynamic(groups, rows, "symbolic") for rows in (64, 1 << 17))
    assert few == many
    assert few[1] and few[2]  # ops and buckets, so that there is something to differ in
    assert dynamic(groups, 64, "fake") != dynamic(groups, 1 << 17, "fake")


# messages from rank to rank


def messages(tp: Peers, op: str | None) -> GraphModule:
    """Starts whose operands are computed late, then starts that could go first."""
    t = Traced()
    x, w, z, small = t.input(N, N), t.input(N, N), t.input(N, N), [t.input(64) for _ in range(2)]
    late = t.call(aten.mm.default, x, w)
    found = [t.waited(all_reduce, small[0], "sum", tp.name)]
    for each in (late, z):
        if op is None:
            found.append(t.waited(all_reduce, t.call(aten.relu.default, each), "sum", tp.name))
        elif op == "batch_p2p_ops":
            target = functional.batch_p2p_ops.default
            start = t.call(target, ["isend"], [1], [0], [each], tp.name)
            found.append(t.call(WAIT, t.call(operator.getitem, start, 0)))
        else:
            found.append(t.waited(getattr(functional, op).default, each, 1, 0, tp.name))
    found.append(t.waited(all_reduce, small[1], "sum", tp.name))
    found.append(t.call(aten.mm.default, w, w))
    return t.returns(*found)


@pytest.mark.parametrize("op", ["isend", "irecv", "batch_p2p_ops"])
@pytest.mark.parametrize("bucket", [False, True])
def test_with_messages_all_starts_keep_their_order(tp: Peers, op: str, bucket: bool) -> None:
    if not hasattr(functional, op):
        pytest.skip(f"this torch has no {op}")
    gm = messages(tp, op)
    before = starts(gm)
    schedule(gm, estimator=estimator(), bucket=bucket)
    assert starts(gm) == before


def test_without_messages_they_do_not(tp: Peers) -> None:
    gm = messages(tp, None)
    before = starts(gm)
    schedule(gm, estimator=estimator(), bucket=False, fuse=False)
    assert starts(gm) != before
    gm = messages(tp, None)
    assert schedule(gm, estimator=estimator()).buckets


# writes


def summed(group_name: str, write: bool) -> GraphModule:
    """all_reduce(x); x.add_(1); all_reduce(z)."""
    t = Traced()
    x, z = t.input(64), t.input(64)
    first = t.call(all_reduce, x, "sum", group_name)
    t.call(aten.add_.Tensor if write else aten.add.Tensor, x, 1)
    second = t.call(all_reduce, z, "sum", group_name)
    return t.returns(*(t.call(WAIT, start) for start in (first, second)))


def of_real_ranks(rank: int, write: bool) -> tuple[list[float], list[float], int]:
    """First elements of the results before and after, and how many buckets."""
    gm = summed(dist.group.WORLD.group_name, write)
    before = [each[0].item() for each in gm(torch.zeros(64), torch.zeros(64))]
    report = schedule(gm, estimator=estimator(), fuse=False)
    return before, [each[0].item() for each in gm(torch.zeros(64), torch.zeros(64))], len(report.buckets)


def test_operands_that_change_later_are_sent_as_they_were(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(of_real_ranks, True) == [([0, 0], [0, 0], 0)] * 2
    assert ranks(2).run(of_real_ranks, False) == [([0, 0], [0, 0], 1)] * 2


def set_first(t: Traced, w: Node) -> None:
    t.graph.call_function(operator.setitem, (w, 0, 1.0)).meta["val"] = None


def write_in_hop(t: Traced, w: Node) -> None:
    t.graph.call_function(MUTATION, (w,)).meta["val"] = None


def call_method(t: Traced, w: Node) -> None:
    t.graph.call_method("add_", (w, 1)).meta["val"] = t.empty(w.meta["val"])


def call_module(t: Traced, w: Node) -> None:
    t.root.add_module("in_place", torch.nn.ReLU(inplace=True))
    t.graph.call_module("in_place", (w,)).meta["val"] = t.empty(w.meta["val"])


def add_in_place(t: Traced, w: Node) -> None:
    t.call(aten.add_.Tensor, w, 1)


def only_read(t: Traced, w: Node) -> None:
    t.call(aten.relu.default, w)


class _Mutation(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("fusedcomm_test_mutation")

    def __call__(self, w: Tensor) -> None:
        raise NotImplementedError


MUTATION = _Mutation()
WRITES = [add_in_place, set_first, write_in_hop, call_method, call_module]


def gathered_product(tp: Peers, between: Callable[[Traced, Node], None]) -> GraphModule:
    """A gather, what is between, and the product of what was gathered and w, which is touched between."""
    t = Traced()
    x, w = t.input(N, N), t.input(N, N)
    gathered = t.waited(all_gather, x, tp.size, tp.name)
    between(t, w)
    return t.returns(t.call(aten.mm.default, gathered, w))


@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_fused_across_a_write(tp: Peers, write: Callable[[Traced, Node], None]) -> None:
    gm = gathered_product(tp, write)
    before = names(gm)
    report = schedule(gm, estimator=estimator())
    wrote = next(
        name for name in before if name not in ("x_0", "x_1") and "all_gather" not in name and "wait" not in name
    )
    assert not report.fused and is_before(gm, wrote, "mm_default")


def test_across_a_read_it_is_fused(tp: Peers) -> None:
    gm = gathered_product(tp, only_read)
    assert [each.op for each in schedule(gm, estimator=estimator()).fused] == ["all_gather_matmul"]


@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_merged_across_a_write(tp: Peers, write: Callable[[Traced, Node], None]) -> None:
    buckets = []
    for between in (write, only_read):
        t = Traced()
        x, z = t.input(64), t.input(64)
        first = t.call(all_reduce, x, "sum", tp.name)
        between(t, x)
        second = t.call(all_reduce, z, "sum", tp.name)
        gm = t.returns(*(t.call(WAIT, start) for start in (first, second)))
        buckets.append(len(schedule(gm, estimator=estimator()).buckets))
    assert buckets == [0, 1]


@pytest.mark.parametrize(("written", "read", "stays"), [("a", "a", True), ("a", "b", False)])
def test_an_attribute_is_one_memory(groups: list[Peers], tp: Peers, written: str, read: str, stays: bool) -> None:
    t = Traced()
    for name in ("a", "b"):
        t.root.register_buffer(name, torch.ones(8, 8))
    x, shard = t.input(8, 8), t.input(8 // tp.size, 8)
    gathered = t.waited(all_gather, shard, tp.size, tp.name)
    t.call(aten.add_.Tensor, t.attribute(written), gathered)
    gm = t.returns(t.call(aten.mm.default, t.attribute(read), x))
    initial = copy.deepcopy(t.root.state_dict())
    late = estimator(gm, mm=5.0, all_gather=5.0)
    args = inputs(gm, seed=0)
    want = executed(gm, args, groups, late=False)
    gm.load_state_dict(initial)
    schedule(gm, estimator=late)
    assert is_before(gm, "add__tensor", "mm_default") == stays
    gm.load_state_dict(initial)
    assert all(map(torch.equal, executed(gm, args, groups, late=False), want))


MAY_BE_VIEWS = {
    "reshape": (aten.reshape.default, [64]),
    "contiguous": (aten.contiguous.default,),
    "flatten": (aten.flatten.using_ints,),
    "to": (aten.to.dtype, torch.float32),
}


@pytest.mark.parametrize("op", MAY_BE_VIEWS)
@pytest.mark.parametrize("write", [True, False])
def test_what_may_be_a_view_is_taken_for_one(groups: list[Peers], tp: Peers, op: str, write: bool) -> None:
    t = Traced(own=True)
    x, y = t.input(8, 8), t.input(8, 8)
    target, *args = MAY_BE_VIEWS[op]
    view = t.call(target, x, *args)
    shape = view.meta["val"].shape
    shard = t.input(shape[0] // tp.size, *shape[1:])
    gathered = t.waited(all_gather, shard, tp.size, tp.name)
    added = t.call(aten.add_.Tensor if write else aten.add.Tensor, view, gathered)
    gm = t.returns(t.call(aten.mm.default, x, y))
    check_values(gm, groups, estimator(gm, mm=5.0, all_gather=5.0))
    assert is_before(gm, added.name, "mm_default") == write


# plain FX goes on running


def transposed(t: Traced, x: Node) -> Node:
    return t.call(aten.clone.default, t.call(aten.t.default, x), memory_format=torch.contiguous_format)


def reduced(t: Traced, tp: Peers) -> Node:
    y = transposed(t, t.call(aten.mm.default, t.input(64, 32), t.input(32, 128)))
    return t.waited(all_reduce, y, "sum", tp.name)


def scattered(t: Traced, tp: Peers) -> Node:
    y = transposed(t, t.call(aten.mm.default, t.input(64, 32), t.input(32, 128)))
    return t.waited(functional.reduce_scatter_tensor.default, y, "sum", tp.size, tp.name)


def exchanged(t: Traced, tp: Peers) -> Node:
    y = t.call(aten.mm.default, t.input(64, 32), t.input(32, 128))
    blocks = t.call(aten.permute.default, t.call(aten.view.default, y, [64, tp.size, 32]), [1, 0, 2])
    sent = t.call(aten.clone.default, blocks, memory_format=torch.contiguous_format)
    received = t.waited(functional.all_to_all_single.default, sent, [1] * tp.size, [1] * tp.size, tp.name)
    return t.call(
        aten.clone.default, t.call(aten.permute.default, received, [1, 2, 0]), memory_format=torch.contiguous_format
    )


def gathered(t: Traced, tp: Peers) -> Node:
    x = t.waited(all_gather, t.input(16, 32), tp.size, tp.name)
    return t.call(aten.mm.default, x, t.call(aten.t.default, t.input(128, 32)))


@pytest.mark.parametrize("make", [reduced, scattered, exchanged, gathered])
@pytest.mark.parametrize("then", ["returned", "viewed", "computed with", "transposed"])
def test_a_fused_graph_runs_and_keeps_strides(
    groups: list[Peers], tp: Peers, make: Callable[[Traced, Peers], Node], then: str
) -> None:
    t = Traced()
    result = make(t, tp)
    if then in ("viewed", "computed with"):
        result = t.call(aten.view.default, result, [-1])
    if then == "computed with":
        result = t.call(aten.relu.default, result)
    if then == "transposed":
        result = t.call(aten.t.default, result) if result.meta["val"].ndim == 2 else result
    report = check_values(t.returns(result), groups, SLOW_COLLECTIVES)
    assert len(report.fused) == 1


class _SlowCollectives(Estimator):
    """Sends so slowly that it pays to fuse graphs that are small enough to run."""

    def transfer(self, kind: str, sent_bytes: float, group_name: str) -> Any:
        return super().transfer(kind, 1e9, group_name)

    def fused(self, op: str, args: Sequence[Any]) -> Any:
        cost = super().fused(op, args)
        return type(cost)(cost.compute_ms, super().transfer("all_gather", 1.0, args[-1]), cost.compute_ms + 0.1)


SLOW_COLLECTIVES = _SlowCollectives("cuda", ranks_per_node=4)


# what only this rank sees


@pytest.mark.parametrize("part", [0, 1])
def test_a_gather_stays_one_whatever_part_is_taken(part: int) -> None:
    targets = []
    for rank in (0, 1):
        with fake_world(rank) as groups:
            t, tp = Traced(), groups[1]
            whole = t.waited(all_gather, t.input(8192, 8192), tp.size, tp.name)
            parts = t.call(aten.split.Tensor, whole, 8192 // tp.size, 1)
            gm = t.returns(t.call(aten.clone.default, t.call(operator.getitem, parts, part)))
            schedule(gm, estimator=estimator())
            targets.append([node.target for node in gm.graph.nodes if is_start(node)])
    assert targets == [[all_gather], [all_gather]]


# what is synchronous


def sent_beside_a_matmul(tp: Peers, read: str) -> GraphModule:
    """A collective of 3 ms, a matmul of 5 ms, and what reads the collective's result."""
    t = Traced()
    x, z = t.input(64, 64), t.input(64, 64)
    if read == "shard_dim_alltoall":
        pytest.importorskip("torch.distributed.tensor._collective_utils")
        start = t.call(torch.ops._dtensor.shard_dim_alltoall.default, x, 0, 1, tp.name)
    else:
        start = t.call(all_reduce, x, "sum", tp.name)
    y = t.call(aten.mm.default, z, z)
    results = [t.call(aten.relu.default, start)] if read in ("a relu", "shard_dim_alltoall") else []
    return t.returns(*results, y, *([t.call(WAIT, start)] if read != "shard_dim_alltoall" else []))


@pytest.mark.parametrize(("read", "exposed_ms"), [("shard_dim_alltoall", 3.0), ("a relu", 3.0), ("a wait", 0.0)])
def test_what_no_wait_awaits_is_synchronous(tp: Peers, read: str, exposed_ms: float) -> None:
    gm = sent_beside_a_matmul(tp, read)
    times = estimator(gm, mm=5.0, all_reduce=3.0, shard_dim=3.0, relu=0.0)
    for timeline in (simulate(gm, times), schedule(gm, estimator=times).after):
        assert timeline.exposed_ms == pytest.approx(exposed_ms)
        assert [line.exposed_ms for line in timeline.collectives] == pytest.approx([exposed_ms])
        assert timeline.total_ms == pytest.approx(5.0 + exposed_ms)


# times that the user told


@pytest.mark.parametrize(("told", "fused"), [("", 1), ("mm", 0), ("all_reduce", 0)])
def test_what_the_user_timed_is_not_fused(tp: Peers, told: str, fused: int) -> None:
    t = Traced()
    gm = t.returns(t.waited(all_reduce, t.call(aten.mm.default, t.input(N, N), t.input(N, N)), "sum", tp.name))
    times = estimator(gm, **({told: 10.0} if told else {}))
    assert len(schedule(gm, estimator=times).fused) == fused


@pytest.mark.parametrize(("told", "merged"), [([], 1), ([0], 0), ([1], 0), ([0, 1], 0)])
def test_what_the_user_timed_is_not_merged(tp: Peers, told: list[int], merged: int) -> None:
    t = Traced()
    found = [t.call(all_reduce, t.input(64), "sum", tp.name) for _ in range(2)]
    gm = t.returns(*(t.call(WAIT, start) for start in found))
    times = Estimator("cuda", ranks_per_node=4, times={found[i].name: 10.0 for i in told})
    assert len(schedule(gm, estimator=times).buckets) == merged


# time that it takes


def seconds_per_collective(tp: Peers, count: int) -> float:
    t = Traced()
    x, found = t.input(1024), []
    for _ in range(count):
        x = t.call(aten.relu.default, x)
        found.append(t.call(all_reduce, x, "sum", tp.name))
    gm = t.returns(*(t.call(WAIT, start) for start in found))
    program = Program(gm.graph, estimator())
    order = range(len(program))
    timeline, begin = run(program, order), time.process_time()
    assert bucket.find(program, order, timeline, estimator())
    return (time.process_time() - begin) / count


def test_buckets_are_found_in_linear_time(tp: Peers) -> None:
    few = min(seconds_per_collective(tp, 1000) for _ in range(2))
    assert seconds_per_collective(tp, 4000) < 2 * few


# odd graphs


def unknown_group(t: Traced, tp: Peers) -> list[Node]:
    return [t.waited(all_reduce, t.input(64), "sum", "nobody") for _ in range(2)]


def arguments_by_name(t: Traced, tp: Peers) -> list[Node]:
    first = t.call(all_reduce, t.input(64), reduce_op="sum", group_name=tp.name)
    second = t.call(all_reduce, t.input(64), "sum", tp.name)
    return [t.call(WAIT, tensor=first), t.call(WAIT, second)]


def results_unknown(t: Traced, tp: Peers) -> list[Node]:
    found = [t.waited(all_reduce, t.input(64), "sum", tp.name) for _ in range(2)]
    del found[0].meta["val"]
    return found


def two_devices(t: Traced, tp: Peers) -> list[Node]:
    return [t.waited(all_reduce, t.input(64, device=device), "sum", tp.name) for device in ("cuda", "cpu")]


def item_of_a_list(t: Traced, tp: Peers) -> list[Node]:
    x = t.input(64)
    return [t.call(operator.getitem, [x, x], 0), t.waited(all_reduce, x, "sum", tp.name)]


def row_of_a_tensor(t: Traced, tp: Peers) -> list[Node]:
    x = t.input(4, 64)
    return [t.call(operator.getitem, x, -1), t.waited(all_reduce, x, "sum", tp.name)]


def wait_for_an_input(t: Traced, tp: Peers) -> list[Node]:
    return [t.call(WAIT, t.input(64))]


def scalars(t: Traced, tp: Peers) -> list[Node]:
    return [t.waited(all_reduce, t.input(), "sum", tp.name) for _ in range(2)]


def nothing(t: Traced, tp: Peers) -> list[Node]:
    return []


ODD = [unknown_group, arguments_by_name, results_unknown, two_devices, item_of_a_list]
ODD += [row_of_a_tensor, wait_for_an_input, scalars, nothing]


@pytest.mark.parametrize("make", ODD)
def test_odd_graphs_pass(groups: list[Peers], tp: Peers, make: Callable[[Traced, Peers], list[Node]]) -> None:
    t = Traced()
    gm = t.returns(*make(t, tp))
    report = check_values(gm, [*groups, Peers("nobody", 4, 1)], estimator())
    if make is not scalars:
        assert not report.buckets


def test_a_graph_without_values_passes(tp: Peers) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return WAIT(all_reduce(self.linear(x).relu_(), "sum", tp.name)).sum()

    gm = torch.fx.symbolic_trace(Layer())
    before = names(gm)
    schedule(gm, estimator=estimator())
    assert names(gm) == before
