"""How long `pipelined` takes by the model, and into how many pieces it cuts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedcomm.compile.estimate import Estimator
from fusedcomm.compile.fuse.time_saved import saving_us
from fusedcomm.memory import members
from fusedcomm.plan.cost import in_pieces, links, model
from fusedcomm.plan.cost.links import INTER, Reach
from fusedcomm.plan.cost.model import Constants
from fusedcomm.plan.geometry import shapes
from tests.plan.test_model import CALLS, CHUNK, CPU, FLOPS, GPU, close, collective, product

NUM_PIECES = max(in_pieces.NUM_PIECES)


def of(op: str, constants: Constants) -> tuple[int, float]:
    return in_pieces.fastest(op, CALLS[op], "float32", constants)


def matmul_takes(seconds: float) -> dict[str, float]:
    return dict.fromkeys(model.ITEMSIZE, FLOPS / seconds)


def wire_takes(op: str, seconds: float) -> dict[str, float]:
    """Each of the two collectives of an all_reduce takes half."""
    halves = 2 if op == "matmul_all_reduce" else 1
    return dict.fromkeys(GPU.backend_bandwidth, halves * 3 * CHUNK / seconds)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize(("matmul", "wire"), [(4.0, 4.0), (4.0, 1.0), (1.0, 4.0)])
def test_the_shorter_of_matmul_and_wire_is_hidden_but_for_one_piece(op: str, matmul: float, wire: float) -> None:
    constants = replace(CPU, matmul_flops=matmul_takes(matmul), backend_bandwidth=wire_takes(op, wire))
    num_pieces, seconds = of(op, constants)
    assert num_pieces >= NUM_PIECES / 2  # as many as have 16 rows, where nothing has an overhead
    assert seconds == close(max(matmul, wire) + min(matmul, wire) / num_pieces)


@pytest.mark.parametrize("op", CALLS)
def test_overheads_ask_for_fewer_pieces(op: str) -> None:
    both = replace(CPU, matmul_flops=matmul_takes(4.0), backend_bandwidth=wire_takes(op, 4.0))
    latencies = dict.fromkeys(both.backend_latency, 0.5)
    before = NUM_PIECES
    for slower in (
        replace(both, piece_overhead=0.2),
        replace(both, chunk_overhead=0.5),
        replace(both, backend_latency=latencies, piece_overhead=4.0),
    ):
        num_pieces, seconds = of(op, slower)
        assert num_pieces < before and seconds > 4.0
        before = num_pieces + 1


def test_latencies_count_where_the_wire_is_longer() -> None:
    op = "matmul_all_to_all"
    slow = replace(CPU, matmul_flops=matmul_takes(1.0), backend_bandwidth=wire_takes(op, 4.0))
    slow = replace(slow, backend_latency=dict.fromkeys(slow.backend_latency, 0.5))
    times = {num: 4 + 0.5 * num + 1 / num for num in in_pieces.NUM_PIECES}
    assert of(op, slow) == (min(times, key=times.__getitem__), close(min(times.values())))


def test_few_rows_are_multiplied_before_anything_is_sent() -> None:
    """So nothing is hidden."""
    few = shapes.matmul_reduce_scatter((64, 512), (512, 2048), "sum", 0, 4)
    assert few.few_rows
    constants = replace(CPU, matmul_flops=matmul_takes(4.0), backend_bandwidth=wire_takes("matmul_all_to_all", 4.0))
    together = constants.matmul("float32", 1, 64, 512, 2048) + 4 * 64 / 1024
    assert in_pieces.fastest("matmul_reduce_scatter", few, "float32", constants)[1] == close(together)


def test_sockets_take_a_cpus_time_and_nccl_takes_sms() -> None:
    op = "matmul_all_to_all"
    copied = of(op, replace(CPU, copy_bandwidth=1e9))[1]
    assert copied == close(2 * 3 * CHUNK / 1e9)
    gpu = replace(GPU, num_sms=1, matmul_flops=matmul_takes(4.0))
    assert of(op, gpu)[1] == close(4 * 8 / 7)


def test_links_across_hosts_are_those_of_data_sheets() -> None:
    cuda, two_hosts = model.DEFAULTS["cuda"], Reach(INTER, 16, 8, 8)
    across = model.across_hosts(cuda, two_hosts)
    by_link = {"intra": cuda.backend_bandwidth["all_to_all"], "inter": links.INTER_BANDWIDTH}
    assert across.backend_bandwidth["all_to_all"] == links.rate("all_to_all", two_hosts, by_link) < 100e9
    assert across.backend_bandwidth["all_gather"] == cuda.backend_bandwidth["all_gather"]  # 8 cards carry as much
    assert across.backend_latency["all_gather"] > cuda.backend_latency["all_gather"]
    assert replace(across, **{name: getattr(cuda, name) for name in ("backend_bandwidth", "backend_latency")}) == cuda
    cpu = model.across_hosts(model.DEFAULTS["cpu"], Reach(INTER, 2, 1, 1))
    assert max(cpu.backend_bandwidth.values()) <= links.CPU_INTER_BANDWIDTH


def test_an_op_in_a_graph_takes_the_link_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the shorter of matmul and wire is hidden behind the other."""
    monkeypatch.setattr(Estimator, "_reach", lambda self, group_name: Reach(INTER, 8, 7))
    estimator = Estimator("cuda")
    with FakeTensorMode():
        x, w = torch.empty(4096, 8192, dtype=torch.bfloat16), torch.empty(8192, 8192, dtype=torch.bfloat16)
    found = estimator.fused("all_gather_matmul", (x, [w], [None], 0, False, *[None] * 3, 8, "between nodes"))
    wire = estimator.transfer("all_gather", x.numel() * 2, "between nodes")
    assert found.transfer == wire and wire.link == INTER and found.fused_ms is not None
    shorter, longer = sorted((found.compute_ms, wire.ms))
    assert longer < found.fused_ms < longer + shorter / 2


@pytest.mark.parametrize("across", [None, Reach(INTER, 4, 2, 2)])
def test_a_cpus_exchange_across_hosts_is_saved_as_far_as_the_matmul_hides_it(
    across: Reach | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a host there is no exchange at all where ranks write to each other."""
    slow = replace(CPU, matmul_flops=matmul_takes(4.0), backend_bandwidth=dict.fromkeys(GPU.backend_bandwidth, 1e5))
    topology = SimpleNamespace(across=across, constants=slow, measured_apart=True)
    monkeypatch.setattr(members, "known_member", lambda *_: SimpleNamespace(topology=topology))
    call, made_of = collective("all_to_all", 4_000_000, "cpu"), product(1024, 512, 2048, "cpu")
    saved = 30.0 if across is None else 3 / 4 * 4.0  # 3 MB sent; 3 chunks run beside the matmul
    assert saving_us(call, [made_of]) == close(saved * 1e6)
