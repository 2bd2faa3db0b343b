"""One small graph per decision of `schedule`: what it must not move, fuse or merge, and where it may."""

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.utils import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fusedcomm.compile.graph.collectives import UNEVEN, group_name_of
from fusedcomm.compile.overlap import buckets, dependencies, scheduler
from fusedcomm.compile.overlap.estimator import Estimator, agreed_ones
from fusedcomm.compile.overlap.scheduler import OverlapReport, schedule
from fusedcomm.compile.overlap.simulator import simulate
from fusedcomm.plan.cost import model, tuned
from tests.compile.test_overlap_properties import fake_world
from tests.helpers.order_checks import WAIT, Traced, executed, is_start
from tests.helpers.random_graphs import Peers, aten, functional, inputs

all_gather, all_reduce = functional.all_gather_into_tensor.default, functional.all_reduce.default
N = 2048  # rows and columns of what pays to fuse


@pytest.fixture
def groups() -> Iterator[list[Peers]]:
    with fake_world(rank=1) as found:
        yield found


@pytest.fixture
def tp(groups: list[Peers]) -> Peers:
    return groups[1]


def estimator(gm: GraphModule | None = None, **times: float) -> Estimator:
    """An Estimator with a backend that is slow to sum. ``times``: ms by how names of nodes begin."""
    told = {name: ms for name in names(gm) for begin, ms in times.items() if name.startswith(begin)} if gm else {}
    rates = {**model.DEFAULTS["cuda"].backend_bandwidth, "all_reduce": 200e9}
    constants = replace(model.DEFAULTS["cuda"], backend_bandwidth=rates)
    return Estimator("cuda", constants=constants, ranks_per_node=4, times=told)


def names(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]


def starts(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if is_start(node)]


def is_before(gm: GraphModule, first: str, second: str) -> bool:
    return names(gm).index(first) < names(gm).index(second)


def with_positions(gm: GraphModule) -> GraphModule:
    gm = copy.deepcopy(gm)
    for node in gm.graph.nodes:
        if is_start(node) or node.target is WAIT:
            node.args, node.kwargs = (*node.args, *node.kwargs.values()), {}
    return gm


def check_values(gm: GraphModule, groups: Sequence[Peers], times: Estimator, **options: Any) -> OverlapReport:
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


def planned(groups: list[Peers], rows: int, sizes: DimDynamic) -> tuple[list[str], list[str], list[tuple[str, ...]]]:
    """The order, ops and buckets of a graph traced with so many rows, as a number or a symbol."""
    r, name = groups[1].size, groups[1].name

    def waited(op: Any, *args: Any) -> Any:
        return WAIT(op(*args, name))

    def program(x: Tensor, w: Tensor, shard: Tensor) -> tuple[Tensor, ...]:
        total = waited(all_reduce, (x @ w).sum(0), "sum")
        y = waited(all_reduce, (x * total) @ waited(all_gather, shard, r), "sum")
        first, second = y.sum(0).split(512)
        return y, waited(all_reduce, first, "sum"), waited(all_reduce, second, "sum")

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext([sizes, DimDynamic.STATIC])
    x = mode.from_tensor(torch.empty(rows, 1024, device="meta"), symbolic_context=context)
    with mode:
        gm = make_fx(program)(x, *(torch.empty(n, 1024, device="meta") for n in (1024, 1024 // r)))
    report = schedule(gm, estimator=estimator())
    return names(gm), [each.op for each in report.fused], list(report.buckets.values())


def test_dynamic_sizes_are_planned_alike_whatever_they_were(groups: list[Peers]) -> None:
    few, many = (planned(groups, rows, DimDynamic.DYNAMIC) for rows in (64, 1 << 17))
    assert few == many
    assert few[1] and few[2]  # ops and buckets, so that there is something to differ in
    assert planned(groups, 64, DimDynamic.STATIC) != planned(groups, 1 << 17, DimDynamic.STATIC)


def messages(tp: Peers, op: str | None, n: int) -> GraphModule:
    """A graph with an operand that is computed late, and earlier ones; of collectives alone if ``op`` is None."""
    t = Traced()
    x, z, a, b = t.input(n, n), t.input(n, n), t.input(64), t.input(64)
    found = [t.waited(all_reduce, a, "sum", tp.name)]
    for each in (t.call(aten.mm.default, x, x), z):
        if op is None:
            found.append(t.waited(all_reduce, t.call(aten.relu.default, each), "sum", tp.name))
        elif op == "batch_p2p_ops":
            start = t.call(functional.batch_p2p_ops.default, ["isend"], [1], [0], [each], tp.name)
            found.append(t.call(WAIT, t.call(operator.getitem, start, 0)))
        else:
            found.append(t.waited(getattr(functional, op).default, each, 1, 0, tp.name))
    found.append(t.waited(all_reduce, b, "sum", tp.name))
    return t.returns(*found, t.call(aten.mm.default, z, z))


@pytest.mark.parametrize("op", [op for op in ("isend", "irecv", "batch_p2p_ops") if hasattr(functional, op)])
@pytest.mark.parametrize("n", [64, N])
def test_with_messages_all_starts_stay_as_they_were(tp: Peers, op: str, n: int) -> None:
    gm = messages(tp, op, n)
    before = starts(gm)
    schedule(gm, estimator=estimator())
    assert starts(gm) == before


def test_without_messages_they_do_not(tp: Peers) -> None:
    gm, twin = messages(tp, None, N), messages(tp, None, N)
    schedule(gm, estimator=estimator(), bucket=False, fuse=False)
    assert starts(gm) != starts(twin)
    assert schedule(messages(tp, None, 64), estimator=estimator()).buckets


class _Mutation(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("fusedcomm_test_mutation")

    def __call__(self, w: Tensor) -> None:
        raise NotImplementedError


MUTATION = _Mutation()


def touched_between(tp: Peers, touch: Callable[[Traced, Node], None]) -> tuple[OverlapReport, list[str]]:
    """What became of a gather, a touch of w, the product with w, and two small sums."""
    t = Traced()
    w, gathered = t.input(N, N), t.waited(all_gather, t.input(N, N), tp.size, tp.name)
    touch(t, w)
    y = t.call(aten.mm.default, gathered, w)
    total = t.call(aten.sum.dim_IntList, y, [0])
    halves = [t.call(aten.slice.Tensor, total, 0, begin, begin + N // 2) for begin in (0, N // 2)]
    gm = t.returns(y, *(t.waited(all_reduce, half, "sum", tp.name) for half in halves))
    return schedule(gm, estimator=estimator()), names(gm)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda t, w: t.call(aten.add_.Tensor, w, 1), "add__tensor"),
        (lambda t, w: t.add("call_function", operator.setitem, (w, 0, 1.0)), "setitem"),
        (lambda t, w: t.add("call_function", MUTATION, (w,)), "fusedcomm_test_mutation"),
        (lambda t, w: t.add("call_method", "add_", (w, 1)), "add_"),
        (lambda t, w: t.add("call_module", "in_place", (w,)), "in_place"),
    ],
)
def test_across_a_write_nothing_is_fused_or_merged(tp: Peers, write: Callable[[Traced, Node], None], name: str) -> None:
    report, order = touched_between(tp, write)
    assert not report.fused and not report.buckets
    assert order.index(name) < order.index("mm_default")


def test_across_a_read_it_is(tp: Peers) -> None:
    report, _ = touched_between(tp, lambda t, w: t.call(aten.relu.default, w))
    assert len(report.fused) == 1 and len(report.buckets) == 1


@pytest.mark.parametrize(("written", "read", "stays"), [("a", "a", True), ("a", "b", False)])
def test_an_attribute_is_one_memory(groups: list[Peers], tp: Peers, written: str, read: str, stays: bool) -> None:
    t = Traced()
    for name in {written, read}:
        t.root.register_buffer(name, torch.ones(8, 8))
    x, shard = t.input(8, 8), t.input(8 // tp.size, 8)
    t.call(aten.add_.Tensor, t.attribute(written), t.waited(all_gather, shard, tp.size, tp.name))
    gm = t.returns(t.call(aten.mm.default, t.attribute(read), x))
    check_values(gm, groups, estimator(gm, mm=5.0, all_gather=5.0))
    assert is_before(gm, "add__tensor", "mm_default") == stays


MAY_BE_VIEWS = {
    "reshape": (aten.reshape.default, [64]),
    "contiguous": (aten.contiguous.default,),
    "flatten": (aten.flatten.using_ints,),
    "to": (aten.to.dtype, torch.float32),
}


@pytest.mark.parametrize("op", MAY_BE_VIEWS)
@pytest.mark.parametrize("write", [True, False])
def test_what_may_be_a_view_is_taken_for_one(groups: list[Peers], tp: Peers, op: str, write: bool) -> None:
    t, (target, *args) = Traced(own=True), MAY_BE_VIEWS[op]
    x, y = t.input(8, 8), t.input(8, 8)
    view = t.call(target, x, *args)
    rows, *columns = view.meta["val"].shape
    gathered = t.waited(all_gather, t.input(rows // tp.size, *columns), tp.size, tp.name)
    added = t.call(aten.add_.Tensor if write else aten.add.Tensor, view, gathered)
    gm = t.returns(t.call(aten.mm.default, x, y))
    check_values(gm, groups, estimator(gm, mm=5.0, all_gather=5.0))
    assert is_before(gm, added.name, "mm_default") == write


def contiguous(t: Traced, x: Node, *dims: int) -> Node:
    return t.call(aten.clone.default, t.call(aten.permute.default, x, dims), memory_format=torch.contiguous_format)


def reduced(t: Traced, tp: Peers) -> Node:
    y = contiguous(t, t.call(aten.mm.default, t.input(64, 32), t.input(32, 128)), 1, 0)
    return t.waited(all_reduce, y, "sum", tp.name)


def scattered(t: Traced, tp: Peers) -> Node:
    y = contiguous(t, t.call(aten.mm.default, t.input(64, 32), t.input(32, 128)), 1, 0)
    return t.waited(functional.reduce_scatter_tensor.default, y, "sum", tp.size, tp.name)


def exchanged(t: Traced, tp: Peers) -> Node:
    y = t.call(aten.mm.default, t.input(64, 32), t.input(32, 128))
    sent, splits = contiguous(t, t.call(aten.view.default, y, [64, tp.size, 32]), 1, 0, 2), [1] * tp.size
    received = t.waited(functional.all_to_all_single.default, sent, splits, splits, tp.name)
    return contiguous(t, received, 1, 2, 0)


def gathered(t: Traced, tp: Peers) -> Node:
    x = t.waited(all_gather, t.input(16, 32), tp.size, tp.name)
    return t.call(aten.mm.default, x, t.call(aten.t.default, t.input(128, 32)))


@pytest.mark.parametrize("make", [reduced, scattered, exchanged, gathered])
@pytest.mark.parametrize("then", ["returned", "viewed"])
def test_a_fused_graph_runs_and_keeps_strides(
    groups: list[Peers], tp: Peers, make: Callable[[Traced, Peers], Node], then: str
) -> None:
    t = Traced()
    result = make(t, tp)
    if then == "viewed":
        result = t.call(aten.view.default, result, [-1])
    assert len(check_values(t.returns(result), groups, Estimator("cpu")).fused) == 1


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


def sent_beside_a_matmul(tp: Peers, read: str) -> GraphModule:
    t = Traced()
    x, z = t.input(64, 64), t.input(64, 64)
    if read == "shard_dim_alltoall":
        pytest.importorskip("torch.distributed.tensor._collective_utils")
        start = t.call(torch.ops._dtensor.shard_dim_alltoall.default, x, 0, 1, tp.name)
    else:
        start = t.call(all_reduce, x, "sum", tp.name)
    y = t.call(aten.mm.default, z, z)
    also = [t.call(aten.relu.default, start)] if read == "a relu" else []
    return t.returns(y, *also, start if read == "shard_dim_alltoall" else t.call(WAIT, start))


@pytest.mark.parametrize(("read", "exposed_ms"), [("shard_dim_alltoall", 3.0), ("a relu", 3.0), ("a wait", 0.0)])
def test_what_not_only_a_wait_reads_is_synchronous(tp: Peers, read: str, exposed_ms: float) -> None:
    gm = sent_beside_a_matmul(tp, read)
    times = estimator(gm, mm=5.0, all_reduce=3.0, shard_dim=3.0, relu=0.0)
    for timeline in (simulate(gm, times), schedule(gm, estimator=times).after):
        (line,) = timeline.collectives
        assert timeline.exposed_ms == line.exposed_ms == pytest.approx(exposed_ms)
        assert timeline.total_ms == pytest.approx(5.0 + exposed_ms)
        assert line.alone_ms == line.end_ms - line.start_ms == pytest.approx(3.0)


@pytest.mark.parametrize(("told", "fused"), [("", 1), ("mm", 0), ("all_reduce", 0)])
def test_what_the_user_timed_is_not_fused(tp: Peers, told: str, fused: int) -> None:
    t = Traced()
    gm = t.returns(t.waited(all_reduce, t.call(aten.mm.default, t.input(N, N), t.input(N, N)), "sum", tp.name))
    assert len(schedule(gm, estimator=estimator(gm, **({told: 10.0} if told else {}))).fused) == fused


def no_value(wait: Node) -> Node:
    del wait.meta["val"]
    return wait


def by_name(t: Traced, tp: Peers) -> Node:
    return t.call(WAIT, tensor=t.call(all_reduce, t.input(64), reduce_op="sum", group_name=tp.name))


def total(t: Traced, tp: Peers, *shape: int, device: str = "cpu") -> Node:
    return t.waited(all_reduce, t.input(*shape, device=device), "sum", tp.name)


NOBODY = Peers("nobody", 4, 1)
ODD: dict[str, Callable[[Traced, Peers], list[Node]]] = {
    "nothing": lambda t, tp: [],
    "a group that is not known": lambda t, tp: [total(t, NOBODY, 64), total(t, NOBODY, 64)],
    "two devices": lambda t, tp: [total(t, tp, 64, device="cuda"), total(t, tp, 64)],
    "arguments by name": lambda t, tp: [by_name(t, tp), total(t, tp, 64)],
    "a wait without a value": lambda t, tp: [no_value(total(t, tp, 64)), total(t, tp, 64)],
    "an item of a list": lambda t, tp: [t.call(operator.getitem, [t.input(64), t.input(64)], 0)],
    "a row of a tensor": lambda t, tp: [t.call(operator.getitem, t.input(4, 64), -1)],
    "a wait for an input": lambda t, tp: [t.call(WAIT, t.input(64))],
    "a sum of nothing": lambda t, tp: [total(t, tp, 0, 4), total(t, tp, 0, 8)],
}


@pytest.mark.filterwarnings("error:fusedcomm")
@pytest.mark.parametrize("case", ODD)
def test_odd_graphs_pass(groups: list[Peers], tp: Peers, case: str) -> None:
    t = Traced()
    gm = t.returns(*ODD[case](t, tp))
    report = check_values(gm, [*groups, NOBODY], estimator())
    assert not report.buckets and not report.fused


def test_numbers_of_tune_are_those_of_the_largest_group_that_has_some(
    groups: list[Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {size: replace(model.DEFAULTS["cpu"], source=model.TUNED, link_latency=1e-6 * size) for size in (2, 4)}
    monkeypatch.setattr(tuned, "read", lambda key: measured.get(key["device_type"] == "cpu" and key["world_size"]))
    found = {each.device_type: each.constants for each in agreed_ones()}
    assert found == {"cpu": measured[4], "cuda": model.DEFAULTS["cuda"]}
    own = Estimator("cpu", times={"mm": 1.0})
    assert [each for each in agreed_ones(own) if each.device_type == "cpu"] == [own]


# parts differ in size, and so do graphs of ranks: what communicates keeps its order
RANKS, K = 4, 512
TOKENS, OTHERS, EVEN = [8192, 16, 16, 16], [16, 16, 16, 8192], [16] * RANKS  # by rank


class Ours(Traced):
    def __init__(self, tp: Peers) -> None:
        super().__init__()
        self.tp, self.w = tp, self.input(K, K)

    def product(self, x: Node, w: Node | None = None) -> Node:
        return self.call(aten.mm.default, x, w or self.w)

    def exchanged(self, y: Node, tokens: list[int]) -> Node:
        """This rank's block of K / R columns, of all ranks' tokens."""
        blocks = self.call(aten.clone.default, self.call(aten.view.default, y, [-1, RANKS, K // RANKS]))
        rows, sent = self.call(aten.view.default, blocks, [-1, K // RANKS]), [tokens[self.tp.rank]] * RANKS
        return self.waited(functional.all_to_all_single.default, rows, tokens, sent, self.tp.name)

    def read(self, *arrived: Node) -> GraphModule:
        w = self.input(K // RANKS, K)
        return self.returns(*(self.product(self.call(aten.relu.default, each), w) for each in arrived))


def two_exchanges(t: Ours) -> GraphModule:
    """One rank computes long for the first, another for the second."""
    x, z = t.input(TOKENS[t.tp.rank], K), t.input(OTHERS[t.tp.rank], K)
    first = t.exchanged(t.call(aten.relu.default, t.product(x)), TOKENS)
    return t.read(first, t.exchanged(t.call(aten.relu.default, z), OTHERS))


def with_gradient(t: Ours, x: Node, first: Node) -> GraphModule:
    """The first arrival, and the sum of a gradient of weights, which takes long on one rank."""
    partial = t.product(t.call(aten.permute.default, x, [1, 0]), x)
    total = t.waited(functional.all_reduce.default, partial, "sum", t.tp.name)
    return t.returns(t.product(first, t.input(K // RANKS, K)), t.call(aten.relu.default, total))


def padded_shards(t: Ours) -> GraphModule:
    """As DTensor exchanges them: all send as many, and the pass has noted on every rank that the graphs differ."""
    x = t.input(TOKENS[t.tp.rank], K)
    first = t.exchanged(t.call(aten.slice.Tensor, t.product(x), 0, 0, 16), EVEN)
    first.all_input_nodes[0].meta[UNEVEN] = "DTensor's shards are uneven along dim 0"
    return with_gradient(t, x, first)


def call_of_an_op(t: Ours) -> GraphModule:
    x, op = t.input(TOKENS[t.tp.rank], K), torch.ops.fusedcomm.matmul_all_to_all.default
    y = t.call(op, x, t.w, None, None, 0, 1, TOKENS, None, None, None, t.tp.rank, RANKS, t.tp.name)
    return with_gradient(t, x, y)


def order_of(rank: int, program: Callable[[Ours], GraphModule], fuse: bool) -> list[str]:
    with fake_world(rank) as groups:
        gm = program(Ours(groups[1]))
        schedule(gm, estimator=estimator(), fuse=fuse)
        return [node.name for node in gm.graph.nodes if group_name_of(node) is not None]


@pytest.mark.parametrize("program", [two_exchanges, padded_shards, call_of_an_op])
@pytest.mark.parametrize("fuse", [False, True])
def test_ranks_keep_one_order(program: Any, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [order_of(rank, program, fuse) for rank in range(RANKS)]
    assert len(orders[0]) == 2 and all(each == orders[0] for each in orders)
    for module in (dependencies, buckets, scheduler):
        monkeypatch.setattr(module, "differs_by_rank", lambda nodes: False)
    orders = [order_of(rank, program, fuse) for rank in range(RANKS)]
    assert any(each != orders[0] for each in orders)  # what pays on one rank does not on another


def test_nothing_is_fused_where_ranks_differ() -> None:
    """A sum that is fused elsewhere, as that pays; whether it does could be otherwise on another rank."""
    for rank, differs in ((0, False), (0, True), (1, True)):
        with fake_world(rank) as groups:
            t = Ours(groups[1])
            total = t.waited(functional.all_reduce.default, t.product(t.input(N, N), t.input(N, N)), "sum", t.tp.name)
            results = [t.call(aten.relu.default, total)]
            if differs:
                results.append(t.exchanged(t.input(TOKENS[rank], K), TOKENS))
            report = schedule(t.returns(*results), estimator=estimator())
            assert [each.op for each in report.fused] == ([] if differs else ["matmul_all_reduce"])
            if differs:
                assert "matmul_all_reduce: graphs of ranks differ" in report.reasons["all_reduce_default"][0]
                (reason, *_) = report.reasons["all_to_all_single_default"]
                sent = [TOKENS[rank]] * RANKS
                assert reason.endswith(
                    f"its splits are not known to be even: it sends {sent} and receives {TOKENS} rows"
                )
