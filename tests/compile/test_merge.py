"""The pass that merges collectives over dims of one mesh: graphs, and simulated ranks."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

import fusedcomm.compile
from fusedcomm.compile.fuse.fuser import OPS
from fusedcomm.compile.graph.collectives import STARTS, functional
from fusedcomm.compile.merge.flattened_mesh import FlattenedMesh
from fusedcomm.compile.merge.merger import Merger
from fusedcomm.compile.overlap.estimator import Estimator
from fusedcomm.compile.passes import Settings
from tests.helpers.block_checks import interpreted
from tests.helpers.graphs import collectives_of, recorded_graphs, run_passes, targets
from tests.helpers.merge_world import (
    A2A,
    AG,
    AR,
    MESHES,
    RS,
    Calls,
    World,
    fake_world,
    inputs,
    kinds,
    random_steps,
    run_steps,
    sent,
    simulate,
    traced,
)
from tests.helpers.on_ranks import on_ranks
from tests.helpers.tiers import nightly_but


def merged(world: World, program: Callable[[Tensor], Any], shape: tuple[int, ...]) -> tuple[Graph, Merger, Graph]:
    """The merged graph, and the graph as it was. Values are equal on all ranks, and no rank sends more."""
    plain, module = (traced(program, shape, dtype=torch.float64) for _ in range(2))
    merger = Merger(module.graph)
    merger.merge(world.flat)
    module.graph.lint()
    given = inputs(world, shape)
    want = simulate(plain.graph, world, given)
    torch.testing.assert_close(simulate(module.graph, world, given), want, rtol=0, atol=0)
    before, after = sent(plain.graph, world), sent(module.graph, world)
    assert len(after) <= len(before)
    assert sum(each[2] for each in after) <= sum(each[2] for each in before) + 1e-6
    return module.graph, merger, plain.graph


PATTERNS: dict[str, tuple[Callable[[Calls, Tensor], Any], list[tuple[Any, ...]]]] = {
    "all_reduce": (lambda c, x: c.ar(c.ar(x, 0), 1), [(AR, 0, 1)]),
    "all_reduce, views between": (lambda c, x: c.ar(c.ar(x, 0).view(-1, 6).t(), 1).t().reshape(x.shape), [(AR, 0, 1)]),
    "all_reduce, sum and avg": (lambda c, x: c.ar(c.ar(x, 0, op="avg"), 1), [(AR, 0, 1)]),
    "all_gather": (lambda c, x: c.ag(c.ag(x, 1), 0), [(AG, 0, 1)]),
    "three all_gathers": (lambda c, x: c.ag(c.ag(c.ag(x, 2, dim=1), 0), 1, dim=2), [(AG, 0, 1, 2)]),
    "reduce_scatter": (lambda c, x: c.rs(c.rs(x, 0), 1), [(RS, 0, 1)]),
    "all_to_all, different dims": (
        lambda c, x: c.a2a(c.a2a(x, 1, gather_dim=1, scatter_dim=2), 0, gather_dim=1, scatter_dim=0),
        [(A2A, 0, 1)],
    ),
    "reduce_scatter + all_gather": (lambda c, x: c.ag(c.rs(x, 1, dim=1), 1, dim=1), [(AR, 1)]),
    "as a hierarchical all_reduce": (lambda c, x: c.ag(c.ar(c.rs(x, 0), 1), 0), [(AR, 0, 1)]),
    "not adjacent, all_reduce": (lambda c, x: c.ar(c.rs(c.ar(x, 0), 1), 2), [(RS, 1), (AR, 0, 2)]),
    "not adjacent, all_gather": (lambda c, x: c.ag(c.rs(c.ag(x, 0), 1, dim=1), 2), [(RS, 1), (AG, 0, 2)]),
    "the reduction first": (lambda c, x: c.rs(c.ag(x, 0), 1, dim=1), [(RS, 1), (AG, 0)]),
    "nothing reads it": (lambda c, x: (c.ar(c.ar(x, 0), 1), x)[1], [(AR, 0, 1)]),
    "one operation in the middle": (lambda c, x: c.ar(c.ar(c.ar(x, 0), 1) + 6**5, 2), [(AR, 0, 1), (AR, 2)]),
}


@pytest.fixture
def cube() -> Any:
    with fake_world(MESHES["2x2x2"]) as world:
        yield world


@pytest.mark.parametrize("name", PATTERNS)
def test_a_chain_becomes(cube: World, name: str) -> None:
    program, want = PATTERNS[name]
    shape = (8, 4, 6)
    graph, merger, plain = merged(cube, lambda x: program(Calls(cube), x), shape)
    assert kinds(graph, cube) == want, merger.reasons
    assert set(merger.into.values()) <= {node.name for node in graph.nodes}
    (out,), (out_plain,) = graph.output_node().all_input_nodes[:1], plain.output_node().all_input_nodes[:1]
    assert out.meta["val"].stride() == out_plain.meta["val"].stride()


@pytest.mark.parametrize("then", ["sum", "avg"])
def test_a_merged_average_is_a_sum_of_what_is_divided_before(cube: World, then: str) -> None:
    """An average over both dims at once may overflow where one after the other does not."""
    calls = Calls(cube)
    graph, _, _ = merged(cube, lambda x: calls.ar(calls.ar(x, 0, op="avg"), 1, op=then), (8, 4, 6))
    (divided,) = graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)
    (reduced,) = [node for node in graph.nodes if node.target in STARTS]
    assert reduced.args[:2] == (divided, "sum") and divided.args[1] == (4 if then == "avg" else 2)


FEW_CHAINS = [("2x2x2", range(1)), ("2x3", range(1))]


@pytest.mark.parametrize(
    ("name", "seeds"), nightly_but(FEW_CHAINS, [*FEW_CHAINS, *((name, range(1, 6)) for name in MESHES)])
)
def test_random_chains(name: str, seeds: range) -> None:
    before, after = 0, 0
    with fake_world(MESHES[name]) as world:
        for seed in seeds:
            rng = random.Random(f"{name} {seed}")
            for _ in range(20):
                steps, shape = random_steps(rng, world)
                graph, _, plain = merged(world, partial(run_steps, Calls(world), steps), shape)
                before, after = before + len(sent(plain, world)), after + len(sent(graph, world))
    assert after < 0.95 * before  # else little is tested


# near misses
NEAR_MISSES: dict[str, tuple[Callable[[Calls, Tensor], Any], str]] = {
    "the first is also returned": (
        lambda c, x: (y := c.ar(x, 0), c.ar(y, 1)),
        "what arrives goes to all_reduce, the caller",
    ),
    "computed": (lambda c, x: c.ar(c.ar(x, 0).relu(), 1), "what arrives goes to relu"),
    "written to": (lambda c, x: c.ar(c.ar(x.clone().add_(1), 0), 1), "the graph writes in place"),
    "padded": (
        lambda c, x: c.rs(torch.nn.functional.pad(c.rs(x, 0), (0, 0, 0, 0, 0, 1))[:4], 1),
        "what arrives goes to constant_pad_nd",
    ),
    "cut": (lambda c, x: c.ag(c.ag(x, 0)[:15], 1), "what arrives goes to slice"),
    "uneven splits": (
        lambda c, x: uneven(c, c.ar(x, 0), 1),
        "not with all_to_all_single: its splits are not known to be even",
    ),
    "blocks of the first sources": (
        lambda c, x: c.a2a(c.a2a(x, 0), 1),
        "not with all_to_all_single_1: its blocks are what came from one rank each",
    ),
    "gathered, then scattered": (
        lambda c, x: c.rs(c.ag(x, 0), 1),
        "not with reduce_scatter_tensor: its blocks are what came from one rank each",
    ),
    "maximum of sums": (lambda c, x: c.ar(c.ar(x, 0), 1, op="max"), "not with all_reduce_1: max of sum is no one"),
    "the same ranks": (lambda c, x: c.ar(c.ar(x, 0), 0), "it is over ranks that the chain has been over with all_red"),
    "another group": (
        lambda c, x: other_group(c.ar(x, 0)),
        "not with all_reduce_1: its group is of no dims of the mesh",
    ),
    "averages of integers": (
        lambda c, x: c.ar(c.ar(x.long(), 0), 1, op="avg"),
        "not with all_reduce_1: it rounds averages of integers",
    ),
    "more would be sent": (
        lambda c, x: c.ag(c.a2a(c.rs(x, 0), 1, scatter_dim=1), 0),
        "reduce_scatter, all_to_all, all_gather are no fewer merged",
    ),
    "nothing to merge": (lambda c, x: c.ar(c.rs(x, 0), 1), "reduce_scatter, all_reduce are no fewer merged"),
    "unknown reduction": (lambda c, x: c.ar(c.ar(x.long(), 0), 1, op="bor"), "its reduce_op must be one of sum, avg"),
    "cut into parts": (lambda c, x: c.ar(x, 0).chunk(2)[0], "what arrives goes to split"),
}


def uneven(calls: Calls, x: Tensor, dim: int) -> Tensor:
    return functional.wait_tensor(functional.all_to_all_single(x, [3, 5], [3, 5], calls.world.name(dim)))


def other_group(x: Tensor) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x, "sum", dist.new_group([0, 3]).group_name))


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_chain_stays(cube: World, name: str) -> None:
    program, reason = NEAR_MISSES[name]
    module = traced(lambda x: program(Calls(cube), x), (8, 4, 6))
    before = str(module.graph)
    merger = Merger(module.graph)
    merger.merge(cube.flat)
    assert str(module.graph) == before and not merger.into
    assert any(reason in each for reasons in merger.reasons.values() for each in reasons), merger.reasons


def test_with_messages_all_stay(cube: World) -> None:
    if not hasattr(functional, "isend"):
        pytest.skip("not in this torch")
    calls = Calls(cube)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        message = functional.wait_tensor(functional.isend(x, 1, 0, cube.name(0)))
        return calls.ar(calls.ar(x, 0), 1), message

    module = traced(program, (4, 6))
    before, merger = str(module.graph), Merger(module.graph)
    merger.merge(cube.flat)
    assert str(module.graph) == before
    assert merger.reasons["all_reduce"] == ["merge: the graph sends messages from point to point"]


def test_the_place_among_other_collectives(cube: World) -> None:
    """It starts where the first one did, and is waited for where the last one was."""
    calls = Calls(cube)

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = calls.ag(x, 0)
        other = calls.ar(y, 2)
        product = y @ y
        return calls.ag(first, 1, dim=1), other, product

    module = traced(program, (4, 6), (6, 6))
    Merger(module.graph).merge(cube.flat)
    names = [node.target._opname for node in module.graph.nodes if node.op == "call_function" and node.target._opname]
    order = [names.index(name) for name in ("all_gather_into_tensor", "all_reduce", "mm")]
    assert order == sorted(order) and kinds(module.graph, cube) == [(AG, 0, 1), (AR, 2)]
    assert names.index("mm") < len(names) - 1 - names[::-1].index("wait_tensor")


def test_symbolic_sizes(cube: World) -> None:
    """Sizes need not divide. The values have other sizes than those that the graph was traced with."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def program(x: Tensor) -> tuple[Tensor, int]:
        y = calls.ag(calls.ag(x, 0), 1)
        return y, x.shape[0] * x.shape[1] * x.shape[2]

    calls = Calls(cube)
    plain, module = (make_fx(program, tracing_mode="symbolic")(torch.empty(8, 4, 6).double()) for _ in range(2))
    merger = Merger(module.graph)
    merger.merge(cube.flat)
    module.graph.lint()
    assert set(merger.into) == {"all_gather_into_tensor", "all_gather_into_tensor_1"}
    given = inputs(cube, (3, 5, 2))
    torch.testing.assert_close(simulate(module.graph, cube, given), simulate(plain.graph, cube, given), rtol=0, atol=0)


# with the other passes
def test_a_fusion_is_not_given_up(cube: World) -> None:
    """The matmul's rows are in the order of mesh dims 1, 0, and would first have to be copied for one collective."""
    calls = Calls(cube)

    def program(x: Tensor, w: Tensor) -> Tensor:
        return calls.rs(calls.rs(x @ w, 1), 0)

    module, alone = traced(program, (8, 6), (6, 4)), traced(program, (8, 6), (6, 4))
    merger = Merger(module.graph, OPS)
    merger.merge(cube.flat)
    module.graph.lint()
    assert str(module.graph) == str(alone.graph)
    assert "merged, fewer of its chain could be fused with matmuls" in str(merger.reasons["reduce_scatter_tensor"])
    report = run_passes(module.graph, merge=(cube.flat,))
    assert targets(module.graph, "fusedcomm") == ["matmul_reduce_scatter", "reduce_scatter"]
    assert [line.status for line in report.collectives] == ["fused", "plain"]
    run_passes(alone.graph, merge=(cube.flat,), fuse=())  # nothing to give up
    assert kinds(alone.graph, cube) == [(RS, 0, 1)]


def test_both_sides_of_a_chain_are_fused(cube: World) -> None:
    """The chain becomes no all_reduce, but as many collectives as there are matmuls that can hide them."""
    calls = Calls(cube)

    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return calls.ag(calls.ag(calls.rs(calls.rs(x @ w, 0), 1), 1), 0) @ v

    module = traced(program, (8, 6), (6, 4), (4, 10))
    report = run_passes(module.graph, merge=(cube.flat,))
    assert targets(module.graph, "fusedcomm") == ["matmul_reduce_scatter", "all_gather_matmul"], report
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.fusedcomm.matmul_reduce_scatter.default)
    assert node.args[-4:-2] == (4, cube.name(0, 1))
    assert collectives_of(module.graph) == []
    assert [line.status for line in report.collectives] == ["merged"] * 4 + ["fused"] * 2
    module = traced(program, (8, 6), (6, 4), (4, 10))
    run_passes(module.graph, merge=(cube.flat,), fuse=())
    assert kinds(module.graph, cube) == [(AR, 0, 1)]


def test_scheduled_as_well(cube: World) -> None:
    """With overlap=True the merged collective is estimated by its group, and starts before the matmul that hides it."""
    calls = Calls(cube)

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(w @ w)
        return calls.ar(calls.ar(x, 0), 1), y @ y

    module = traced(program, (512, 512), (512, 512))
    report = run_passes(module.graph, merge=(cube.flat,), overlap=(Estimator("cpu"),), fuse=())
    assert [line.status for line in report.collectives] == ["merged", "merged", "overlapped"], report
    assert kinds(module.graph, cube) == [(AR, 0, 1)]


def test_the_key_of_caches(cube: World) -> None:
    with_it, without = Settings(merge=(cube.flat,)), Settings()
    other = FlattenedMesh(cube.flat.sizes, cube.flat.groups[:3])
    assert len({with_it.uuid(), without.uuid(), Settings(merge=(other,)).uuid()}) == 3
    assert with_it.uuid() == Settings(merge=(cube.flat,)).uuid()


@pytest.mark.parametrize("bad", ["mesh", [None]])
def test_what_is_no_mesh(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"merge must be a DeviceMesh or a sequence of them, got"):
        fusedcomm.compile.enable(merge=bad)


def test_a_mesh_without_this_rank() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    with fake_world([[0, 1], [2, 3]]), pytest.raises(ValueError, match="must name meshes that contain this rank, 0"):
        fusedcomm.compile.enable(merge=DeviceMesh("cpu", torch.tensor([[1, 2]])))


@pytest.mark.parametrize("ranks", [[[0, 2], [1, 3]], [[3, 2], [1, 0]]])
def test_a_mesh_whose_ranks_do_not_ascend(ranks: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="must have their ranks in ascending order"), fake_world(ranks):
        pass


# DTensor's redistributions, forward and backward, on real ranks
REDISTRIBUTIONS = [  # on 2 x 2 ranks: from, to, and the collectives of the forward and the backward
    ("P P", "R R", [AR], []),
    ("S0 S0", "R R", [AG], []),
    ("P P", "S1 S0", [RS], [AG]),
    ("S0 S0", "S1 S1", [AG], [AG]),  # on CPU: which mesh dim a part is of cannot be told
    ("R S1", "S0 R", [AG], [AG]),  # on half of the ranks the part looks as if it were their own in the gather
    ("P R", "R S0", [AR], [AG]),
]


def redistributed(x: Tensor, mesh: Any, before: str, after: str) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    named = {"P": Partial(), "avg": Partial("avg"), "R": Replicate(), "S0": Shard(0), "S1": Shard(1)}
    placed = [[named[each] for each in placements.split()] for placements in (before, after)]
    return DTensor.from_local(x, mesh, placed[0]).redistribute(mesh, placed[1]).to_local()


@pytest.mark.thorough
@on_ranks(4)
def test_dtensors(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))

    def program(*xs: Tensor) -> list[Tensor]:
        results = [redistributed(x, mesh, *each[:2]) for x, each in zip(xs, REDISTRIBUTIONS, strict=False)]
        return [*results, redistributed(xs[-2] @ xs[-1], mesh, "P P", "S0 S0")]

    def run(program: Callable[..., list[Tensor]]) -> list[Tensor]:
        outs = program(*args)
        grads = torch.autograd.grad(outs, args, [torch.arange(out.numel()).view(out.shape) % 5.0 for out in outs])
        return [*(out.detach() for out in outs), *grads]

    generator = torch.Generator().manual_seed(rank)
    shapes = [(4, 8)] * len(REDISTRIBUTIONS) + [(8, 6), (6, 4)]
    args = [torch.randint(-2, 3, shape, generator=generator).float().requires_grad_() for shape in shapes]
    want = run(program)
    with recorded_graphs() as graphs, fusedcomm.compile.enabled(merge=mesh) as report:
        got = run(torch.compile(program, fullgraph=True, backend=interpreted))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    names = {AG: "all_gather_into_tensor", RS: "reduce_scatter_tensor", A2A: "all_to_all_single", AR: AR}
    for graph, at, fused in zip(graphs, (2, 3), ("matmul_reduce_scatter", "all_gather_matmul"), strict=True):
        ops = targets(graph, "fusedcomm")  # of collectives that are not merged too
        ops.remove(fused)
        wanted = sorted(names[kind] for each in REDISTRIBUTIONS for kind in each[at])
        assert sorted([*collectives_of(graph), *(names[kind] for kind in ops)]) == wanted, report
