"""What nodes cost: formulas worked out by hand, links of groups in a world of 64, the pointwise rule, agreement."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fusedcomm
from fusedcomm.compile.overlap.estimator import Estimator, reach
from fusedcomm.compile.overlap.node_work import NodeCost
from fusedcomm.launch.ranks import RankPool
from fusedcomm.memory import members
from fusedcomm.memory.topology import Topology
from fusedcomm.plan.cost import links, model
from fusedcomm.plan.cost.model import DEFAULTS
from tests.helpers.merge_world import fake_ranks

GPU, CPU = DEFAULTS["cuda"], DEFAULTS["cpu"]
TUNED = replace(GPU, source=model.TUNED)
MB = 1 << 20
BF16 = torch.bfloat16
aten, functional = torch.ops.aten, torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def bandwidths() -> Iterator[None]:
    from torch._inductor import config

    with config.patch(intra_node_bw=200, inter_node_bw=50):
        yield


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """8 nodes (dp) of 8 ranks (tp), without peers or devices. This process is rank 9."""
    from torch.distributed.device_mesh import init_device_mesh

    with fake_ranks(64, rank=9):
        yield init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))


def name_of(mesh: Any, dim: str) -> str:
    return mesh.get_group(dim).group_name


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> GraphModule:
    with FakeTensorMode():
        return make_fx(fn)(*(torch.empty(shape, dtype=dtype) for shape in shapes))


def costs(gm: GraphModule, estimator: Estimator) -> dict[str, NodeCost]:
    return {node.name: estimator.cost(node) for node in gm.graph.nodes}


def moved_ms(num_bytes: float, launches: int = 1) -> float:
    """The time to move bytes on a default GPU: half of them are read, half written, and a kernel takes 3 us."""
    return num_bytes / (2e-3 * GPU.copy_bandwidth) + launches * 3e-3


# collectives
def test_links_of_a_mesh(mesh: Any) -> None:
    assert reach(name_of(mesh, "tp"), 8) == links.Reach("intra", 8, 7)
    assert reach(name_of(mesh, "dp"), 8) == links.Reach("inter", 8, 7)
    assert reach(name_of(mesh, "tp"), 4) == links.Reach("inter", 8, 4, 4)
    assert reach(name_of(mesh, "tp"), 64) == links.Reach("intra", 8, 7)
    assert reach(dist.group.WORLD.group_name, 8) == links.Reach("inter", 64, 56, 8)
    assert reach("nobody's", 8) is None
    estimator = Estimator("cuda")
    assert estimator.can_fuse(name_of(mesh, "tp")) and estimator.can_fuse(name_of(mesh, "dp"))
    assert not estimator.can_fuse("nobody's")


def test_groups_of_one_mesh_dim_are_told_alike() -> None:
    for num_ranks, stride in [(2, 1), (3, 1), (4, 2), (6, 1), (8, 4), (16, 1), (5, 8)]:
        world_size, block = 240, num_ranks * stride
        first = [block * i + j for i in range(world_size // block) for j in range(stride)]
        groups = [tuple(range(rank, rank + block, stride)) for rank in first]
        assert len({links.reach_of(ranks, 8, world_size) for ranks in groups}) == 1


def test_collectives_by_hand(mesh: Any) -> None:
    """Times in ms by hand: 10 us to launch, 2 us or 5 us a hop, 200 GB/s of NVLink or 50 GB/s of a network card."""
    estimator, tp, dp = Estimator("cuda"), name_of(mesh, "tp"), name_of(mesh, "dp")
    expected = {
        ("all_gather", tp): (0.010 + 7 * 0.002, 7 * MB / 200e6),
        ("all_gather", dp): (0.010 + 7 * 0.005, 7 * MB / 50e6),
        ("reduce_scatter", tp): (0.010 + 7 * 0.002, 7 / 8 * MB / 200e6),
        ("all_to_all", dp): (0.010 + 7 * 0.005, 7 / 8 * MB / 50e6),
        ("all_gather_into_tensor_coalesced", tp): (0.010 + 7 * 0.002, 7 * MB / 200e6),
        ("broadcast", tp): (0.010 + 7 * 0.002, MB / 200e6),
    }
    for (kind, group), (latency, wire) in expected.items():
        transfer = estimator.transfer(kind, MB, group)
        assert (transfer.group, transfer.link) == (group, "intra" if group == tp else "inter")
        assert transfer.latency_ms == pytest.approx(latency), kind
        assert transfer.wire_ms == pytest.approx(wire), kind


def test_all_reduce_is_a_tree_where_small_and_a_ring_where_large(mesh: Any) -> None:
    estimator, tp = Estimator("cuda"), name_of(mesh, "tp")
    small, large = (estimator.transfer("all_reduce", num_bytes, tp) for num_bytes in (1 << 10, 64 * MB))
    assert small.latency_ms == pytest.approx(0.010 + 2 * 3 * 0.002)
    assert small.wire_ms == pytest.approx(2 * 1024 / 200e6)
    assert large.latency_ms == pytest.approx(0.010 + 14 * 0.002)
    assert large.wire_ms == pytest.approx(2 * 7 / 8 * 64 * MB / 200e6)


def test_tuned_numbers_hold_inside_a_node(mesh: Any) -> None:
    tuned = replace(TUNED, backend_bandwidth=GPU.backend_bandwidth | {"all_reduce": 100e9})
    estimator = Estimator("cuda", constants=tuned)
    inside = estimator.transfer("all_reduce", 8 * MB, name_of(mesh, "tp"))
    assert inside.latency_ms == pytest.approx(0.025)
    assert inside.wire_ms == pytest.approx(2 * 7 * MB / 100e6)
    between = estimator.transfer("all_reduce", 8 * MB, name_of(mesh, "dp"))
    assert between.wire_ms == pytest.approx(2 * 7 * MB / 50e6)


# compute
def test_matmuls_and_what_torch_knows_the_flop_of() -> None:
    def program(x: Tensor, w: Tensor) -> Any:
        return x @ w, torch.bmm(x.expand(2, -1, -1), w.expand(2, -1, -1))

    found = costs(traced(program, (4096, 8192), (8192, 4096)), Estimator("cuda"))
    wave = 2 * 8192 * 132 * 128**2 / GPU.matmul_flops["bfloat16"] + GPU.wave_overhead["unfused"]
    for name, num_waves in (("mm", 8), ("bmm", 16)):  # 32 x 32 tiles of 128 x 128 on 132 SMs
        assert found[name].compute_ms == pytest.approx(1e3 * num_waves * wave + 0.003)
    narrow = costs(traced(program, (16, 8192), (8192, 4096)), Estimator("cuda"))["mm"]  # reads w for longer
    assert narrow.compute_ms == pytest.approx(
        2 * (16 * 8192 + 8192 * 4096 + 16 * 4096) / (1e-3 * GPU.memory_bandwidth) + 0.003
    )


def test_pointwise_nodes_make_one_kernel() -> None:
    """Only what comes from outside is read, and what goes outside written; views between do not matter."""

    def program(x: Tensor, y: Tensor) -> Any:
        scaled = x * 2
        mixed = scaled.view(-1).relu().view(1024, 1024) + y
        return mixed.sum(0), mixed * torch.full_like(y, 2)

    found = costs(traced(program, (1024, 1024), (1024, 1024)), Estimator("cuda"))
    tensor = 2 * MB
    expected = {
        "mul": moved_ms(tensor, 0),  # reads x
        "relu": 0.0,
        "add": moved_ms(2 * tensor),  # reads y, writes what sum reads
        "sum_1": moved_ms(tensor + 2 * 1024),
        "full_like": 0.0,
        "mul_1": moved_ms(tensor),  # writes the result
    }
    assert {name: found[name].compute_ms for name in expected} == pytest.approx(expected)


# ops of fusedcomm
def test_an_op_of_ours_has_its_matmul_beside_what_it_sends(mesh: Any) -> None:
    tp, estimator = name_of(mesh, "tp"), Estimator("cuda")

    def program(x: Tensor, w: Tensor) -> Any:
        return fusedcomm.matmul_reduce_scatter(x, w, 0, tp), x @ w

    found = costs(traced(program, (8192, 4096), (4096, 4096)), estimator)
    fused = found["matmul_reduce_scatter"]
    assert fused.transfer is not None and fused.fused_ms is not None
    assert fused.compute_ms == found["mm"].compute_ms
    assert (fused.transfer.group, fused.transfer.link) == (tp, "intra")
    assert fused.compute_ms < fused.fused_ms < fused.compute_ms + estimator.transfer("reduce_scatter", 64 * MB, tp).ms
    sent = 7 / 8 * 64 * MB  # by stores or by copies, to which Inductor's number sets the limit
    assert fused.transfer.wire_ms == pytest.approx(sent / 200e6)
    assert fused.transfer.ms <= fused.fused_ms


@pytest.mark.parametrize("dim", ["dp", "tp"])
def test_an_op_of_ours_that_runs_unfused_costs_so(mesh: Any, dim: str) -> None:
    """The planner has too few rows, whether between nodes or inside one."""
    group_name, estimator = name_of(mesh, dim), Estimator("cuda")
    with FakeTensorMode():
        x, w = torch.empty(64, 4096, dtype=BF16), torch.empty(4096, 4096, dtype=BF16)
    found = estimator.fused("all_gather_matmul", (x, [w], [None], 0, False, *[None] * 3, 8, group_name))
    transfer = estimator.transfer("all_gather", x.numel() * 2, group_name)
    assert found.transfer == transfer and found.fused_ms is not None
    calls = {"dp": transfer.ms, "tp": 7 * x.numel() * 2 / 200e6 + 0.025}
    assert found.fused_ms == pytest.approx(found.compute_ms + calls[dim], rel=2e-3)  # and a thousandth of the host's


# the user's numbers, and tuned ones
def test_the_users_numbers_win(mesh: Any) -> None:
    tp = name_of(mesh, "tp")

    def program(x: Tensor, w: Tensor) -> Any:
        y = functional.wait_tensor(functional.all_gather_into_tensor(x, 8, tp))
        return y @ w, fusedcomm.matmul_reduce_scatter(y, w, 0, tp)

    times = {"mm": 7.0, "all_gather_into_tensor": 3.0, "matmul_reduce_scatter": 5.0, "nobody": 1.0}
    gm = traced(program, (1024, 4096), (4096, 4096))
    plain, told = costs(gm, Estimator("cuda")), costs(gm, Estimator("cuda", times=times))
    assert told["mm"] == NodeCost(7.0)
    gather = told["all_gather_into_tensor"].transfer
    assert gather is not None and gather.ms == pytest.approx(3.0) and gather.latency_ms == pytest.approx(0.024)
    assert told["matmul_reduce_scatter"].fused_ms == 5.0
    assert told["wait_tensor"] == plain["wait_tensor"]
    short = costs(gm, Estimator("cuda", times={"all_gather_into_tensor": 0.01}))["all_gather_into_tensor"].transfer
    assert short is not None and (short.latency_ms, short.wire_ms) == (0.01, 0.0)


def test_tuned_numbers_of_a_known_group_are_used(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tp, dp = name_of(mesh, "tp"), name_of(mesh, "dp")

    def program(x: Tensor) -> Any:
        return [functional.wait_tensor(functional.all_reduce(x, "sum", name)) for name in (tp, dp)]

    gm = traced(program, (8, 8))
    tuned = replace(CPU, source=model.TUNED, copy_bandwidth=3e9)

    class Known:
        topology = Topology(None, None, 1 << 30, None, tuned)

    monkeypatch.setattr(members, "known_member", lambda name, device: Known() if name == dp else None)
    assert Estimator.of(gm.graph) == Estimator("cpu", constants=tuned)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"device_type": "xpu"}, "device_type must be one of cuda, cpu, got 'xpu'"),
        ({"constants": CPU}, "constants must be of device_type 'cuda', got 'cpu'"),
        ({"ranks_per_node": 0}, "ranks_per_node must be at least 1, got 0"),
        ({"times": {"mm": float("nan")}}, r"times\['mm'\] must be a finite number of ms, at least 0, got nan"),
    ],
)
def test_bad_numbers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Estimator(**options)


# agreement, on gloo
OPTIONS: tuple[dict[str, Any], ...] = (
    {"times": {"mm": 1.0, "add": 2.0}, "constants": replace(CPU, copy_bandwidth=1e9, num_sms=3)},
    {"times": {"mm": 4.0}},
)


def _agree(rank: int, options: tuple[dict[str, Any], ...]) -> tuple[str, str, dict[str, Any]]:
    own = Estimator("cpu", **options[rank])
    agreed = own.agreed()
    assert agreed.agreed() is agreed and agreed.agreed(dist.group.WORLD) is agreed
    return own.digest(), agreed.digest(), {"times": agreed.times, "constants": asdict(agreed.constants)}


def test_ranks_with_other_numbers_take_the_first_ones(ranks: Callable[[int], RankPool]) -> None:
    (own0, agreed0, _), (own1, agreed1, said) = ranks(2).run(_agree, OPTIONS)
    assert own0 != own1  # without agreement they would not say the same
    assert own0 == agreed0 == agreed1
    assert said == {"times": OPTIONS[0]["times"], "constants": asdict(OPTIONS[0]["constants"])}


def _disagree(rank: int) -> str:
    with pytest.raises(ValueError) as raised:
        Estimator("cpu", ranks_per_node=[8, 4][rank]).agreed()
    return str(raised.value)


def test_ranks_that_count_nodes_differently_hear_of_it(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_disagree) == ["ranks_per_node must be the same on all ranks, got [8, 4] by rank"] * 2
