"""The cost model against arithmetic by hand, and what it takes from outside."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedcomm.bench.gpu_check import gpu_calls, kernel_speed, op_speed
from fusedcomm.compile.fuse.time_saved import saving_us
from fusedcomm.compile.overlap import Estimator
from fusedcomm.memory import members
from fusedcomm.plan import fused as fused_program
from fusedcomm.plan.cost import in_pieces, links, model
from fusedcomm.plan.cost.links import INTER, Reach
from fusedcomm.plan.cost.model import DEFAULTS, Constants
from fusedcomm.plan.geometry import norm, shapes
from fusedcomm.plan.geometry.cut import Cut, Splits, parts_of_sizes
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.scaling import Scaled
from tests.helpers import predicted_ops

RESULTS = Path(__file__).parents[2] / "bench" / "results"
KINDS = tuple(model.KINDS.values())
MIB = 1 << 20

# Nothing but what a test is about takes time: rates without end, no overheads.
ENDLESS = 1e30
GPU = Constants(
    source=model.DEFAULT,
    device_type="cuda",
    num_sms=4,
    matmul_flops=dict.fromkeys(model.ITEMSIZE, ENDLESS),
    fused_flops=dict.fromkeys(model.ITEMSIZE, ENDLESS),
    memory_bandwidth=ENDLESS,
    matmul_overhead=0.0,
    wave_overhead={"unfused": 0.0, "fused": 0.0},
    copy_bandwidth=ENDLESS,
    copy_overhead=0.0,
    unpack_bandwidth=ENDLESS,
    link_bandwidth=ENDLESS,
    link_latency=0.0,
    signal_latency=0.0,
    store_bandwidth=ENDLESS,
    backend_bandwidth=dict.fromkeys(KINDS, ENDLESS),
    backend_latency=dict.fromkeys(KINDS, 0.0),
    call_overhead={"unfused": 0.0, "chunked": 0.0, "fused": 0.0},
    chunk_overhead=0.0,
    piece_overhead=0.0,
)
CPU = replace(GPU, device_type="cpu", num_sms=1, fused_flops={})
RATE = dict.fromkeys(model.ITEMSIZE, 1e9)

# 4 ranks, float32. The tensor next to the collective: 1024 x 2048, 8 MiB; a chunk: 2 MiB.
CALLS: dict[str, Exchange] = {
    "matmul_all_to_all": shapes.matmul_all_to_all((1024, 512), (512, 2048), None, 0, 1, 4),
    "all_to_all_matmul": shapes.all_to_all_matmul((4096, 512), (2048, 512), 1, 0, 4),
    "all_gather_matmul": shapes.all_gather_matmul((256, 2048), ((2048, 512),), 0, 4),
    "matmul_reduce_scatter": shapes.matmul_reduce_scatter((1024, 512), (512, 2048), "sum", 0, 4),
    "matmul_all_reduce": shapes.matmul_all_reduce((1024, 512), (512, 2048), "sum", 4),
}
WITH_NORM = CALLS | {"matmul_all_reduce_norm": norm.one_shot((1024, 2048), 512, 0.0, 4)}
FLOPS = 2 * 1024 * 512 * 2048
CHUNK = 2 * MIB


def seconds(op: str, constants: Constants, dtype: str = "float32") -> dict[str, float]:
    return dict(model.estimate(op, WITH_NORM[op], dtype, constants))


def close(expected: float) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("op", WITH_NORM)
def test_every_algorithm_does_the_flops_once(op: str) -> None:
    """Nothing else takes time. Sizes are such that tiles divide them, on as many SMs."""
    gpu = replace(GPU, matmul_flops=RATE, fused_flops=RATE)
    assert seconds(op, gpu) == {name: close(FLOPS / 1e9) for name in ("unfused", "chunked", "fused")}
    assert seconds(op, replace(CPU, matmul_flops=RATE)) == dict.fromkeys(("unfused", "chunked"), close(FLOPS / 1e9))


def test_the_own_chunk_of_a_fused_gather_takes_cublas_where_it_has_rows_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it is copied, or packed with the others, and the kernel does all."""
    rows, k = "all_gather_matmul", "all_to_all_matmul"
    cublas, copies = replace(GPU, matmul_flops=RATE), replace(GPU, copy_bandwidth=1e9)
    assert seconds(rows, cublas)["fused"] == close(FLOPS / 4 / 1e9) and seconds(k, cublas)["fused"] == close(0)
    assert seconds(rows, copies)["fused"] == close(0) and seconds(k, copies)["fused"] == close(CHUNK / 1e9)
    monkeypatch.setattr(model, "LEAST_COPIED", ENDLESS)
    packs = replace(GPU, unpack_bandwidth=CHUNK)  # 1 s per chunk
    assert seconds(rows, packs)["fused"] == close(0) and seconds(k, packs)["fused"] == close(4)


SENT = {"matmul_all_reduce": 6, "matmul_all_reduce_norm": 6}  # chunks that a rank sends; 3 of the others
COPIES = {  # how often unfused copies all 4 chunks, before and after the collective
    "matmul_all_to_all": 1,  # rows are gathered: nothing to unpack
    "all_to_all_matmul": 1,  # rows are scattered: nothing to pack
    "all_gather_matmul": 0,
    "matmul_reduce_scatter": 0,
    "matmul_all_reduce": 1,
    "matmul_all_reduce_norm": 1,
}


@pytest.mark.parametrize("op", WITH_NORM)
def test_unfused_pays_for_the_collective_and_its_copies(op: str) -> None:
    kind, sent = model.KINDS[op], SENT.get(op, 3) * CHUNK
    slow = {
        "backend_bandwidth": {**GPU.backend_bandwidth, kind: 1e9},
        "backend_latency": {**GPU.backend_latency, kind: 1},
    }
    free = dict.fromkeys(("chunked", "fused"), close(0))
    assert seconds(op, replace(GPU, **slow)) == {"unfused": close(1 + sent / 1e9), **free}
    copies = seconds(op, replace(GPU, copy_bandwidth=1e9, copy_overhead=1.0))
    assert copies["unfused"] == close(COPIES[op] * (1 + 4 * CHUNK / 1e9))


def test_chunked_hides_transfers_behind_matmuls_and_the_other_way_round() -> None:
    """With c = FLOPS / 4 / rate and l = latency + chunk / link: the longer of both sums, and one of the shorter."""
    op, chunk_flops = "matmul_all_to_all", FLOPS / 4
    link = {"link_bandwidth": CHUNK / 0.5, "link_latency": 0.5}  # l = 1 s
    for c in (0.25, 4.0):
        rate = dict.fromkeys(model.ITEMSIZE, chunk_flops / c)
        assert seconds(op, replace(GPU, matmul_flops=rate, **link))["chunked"] == close(max(4 * c, c + 3, 3 * c + 1))
        gather = seconds("all_gather_matmul", replace(GPU, matmul_flops=rate, **link))["chunked"]
        assert gather == close(max(4 * c, 3 + c))
        signal = replace(GPU, matmul_flops=rate, signal_latency=0.1, **link)
        assert seconds(op, signal)["chunked"] == close(max(4 * c, c + 3.1, 3 * c + 1.1))
        assert seconds(op, replace(CPU, matmul_flops=rate, **link))["chunked"] == close(4 * c)  # matmuls write to peers
        on_cpu = seconds("all_gather_matmul", replace(CPU, matmul_flops=rate, **link))["chunked"]
        assert on_cpu == close(4 * c + 3)


def test_few_rows_read_w_once() -> None:
    """16 rows are cut into 4: one matmul, bound by memory, then the transfers."""
    sizes, w_bytes, x_bytes, y_bytes = ((16, 1024), (1024, 8192)), 4 * 1024 * 8192, 4 * 16 * 1024, 4 * 16 * 8192
    slow = replace(GPU, memory_bandwidth=1e9, link_latency=1.0)
    once = (w_bytes + x_bytes + y_bytes) / 1e9
    for op, exchange, num_sends in (
        ("matmul_reduce_scatter", shapes.matmul_reduce_scatter(*sizes, "sum", 0, 4), 1),
        ("matmul_all_reduce", shapes.matmul_all_reduce(*sizes, "sum", 4), 2),
        ("matmul_all_to_all", shapes.matmul_all_to_all(*sizes, None, 1, 0, 4), 1),
        ("all_gather_matmul", shapes.all_gather_matmul((4, 1024), [sizes[1]], 0, 4), 1),
    ):
        found = model.estimate(op, exchange, "float32", slow)
        assert found["unfused"] == close(once)
        assert found["chunked"] == close(once + 3 * num_sends)
        assert found["fused"] == close(once + num_sends)
        found = model.estimate(op, exchange, "float32", slow, num_rounds=5)
        assert list(found.values()) == [close(once), close(once + 15 * num_sends), close(once + 5 * num_sends)]


def test_what_arrives_is_copied_out_or_added() -> None:
    slow = replace(GPU, unpack_bandwidth=CHUNK)  # 1 s per chunk
    assert seconds("matmul_all_to_all", slow)["fused"] == close(4)
    for machine in (slow, replace(CPU, unpack_bandwidth=CHUNK)):
        assert seconds("matmul_all_to_all", machine)["chunked"] == close(3)  # the own chunk is in place
    reduced = 2.5 / model.SUMMED["cuda"]  # 4 read, 1 written
    assert seconds("matmul_reduce_scatter", slow)["chunked"] == close(reduced)
    assert seconds("matmul_all_reduce", slow)["chunked"] == close(reduced + 4)
    linked = replace(GPU, link_latency=1.0)
    assert seconds("matmul_all_reduce", linked)["chunked"] == close(3 + 3)


# what one H200 measured
CASES = json.loads((RESULTS / "gpu-h200-2026-11-26-kernels.json").read_text())["cases"]


@pytest.mark.parametrize("shape", kernel_speed.SHAPES, ids=str)
def test_default_numbers_say_how_long_kernels_took(shape: kernel_speed.MatmulShape) -> None:
    sizes = max(1, shape.batches), shape.m, shape.k, shape.n
    for kernel, name in itertools.product(("push", "gather"), ("cublas", "kernel")):
        measured = CASES[f"kernel speed/{kernel} {shape.name}"]["found"][f"{name}_launch_free_ms"]
        found = 1e3 * DEFAULTS["cuda"].matmul("bfloat16", *sizes, fused=name == "kernel")
        assert found == pytest.approx(measured, rel=0.1 if measured > 0.01 else 0.2)


WHOLE = json.loads((RESULTS / "gpu-h200-2026-11-27.json").read_text())["cases"]  # measured since, of 4 virtual ranks


@pytest.mark.parametrize("call", op_speed.calls(cuda=True), ids=lambda call: str(call.case))
def test_default_numbers_say_how_long_whole_ops_took(call: gpu_calls.GpuCall, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual ranks divide a GPU, whose memory is their link; kernels pack what they gather. Copies within a GPU are
    kernels, which an H200 runs behind a matmul, not beside it: `chunked` hides none.

    The backward by `fused` is left out: it took 13.8 ms, and 11.6 are explained.
    """
    monkeypatch.setattr(model, "LEAST_COPIED", ENDLESS)
    whole, case, exchange = DEFAULTS["cuda"], call.case, call.exchange()
    names = ("memory_bandwidth", "copy_bandwidth", "unpack_bandwidth")
    quarter: dict[str, Any] = {name: getattr(whole, name) / 4 for name in names}
    for name in ("matmul_flops", "fused_flops"):
        quarter[name] = {dtype: rate / 4 for dtype, rate in getattr(whole, name).items()}
    links = {"link_bandwidth": whole.copy_bandwidth / 4, "store_bandwidth": whole.unpack_bandwidth / 4}
    host = {"call_overhead": GPU.call_overhead, "chunk_overhead": 0.0}
    constants = replace(whole, num_sms=whole.num_sms // 4, **quarter, **links, **host)
    found = dict(model.estimate(case.op, exchange, "bfloat16", constants, num_rounds=call.num_rounds))
    if not exchange.takes_all(2):  # else the matmul is behind the copies in any case
        found["chunked"] += 3 * constants.transfer(2 * exchange.chunk_numel)
    where = f"op speed/{case.op}" if case.name == "speed" else f"start program/{case.name}"
    for algorithm in ("chunked", "fused") if case.name != "backward" else ("chunked",):
        assert 1e3 * found[algorithm] == pytest.approx(WHOLE[where]["found"][f"{algorithm}_ms"], rel=0.15), algorithm


def test_the_page_has_what_is_predicted_between_gpus() -> None:
    """`python -m tests.helpers.predicted_ops` prints the table."""
    assert predicted_ops.table() in (RESULTS.parents[1] / "docs" / "status.md").read_text()


SCALED = json.loads((RESULTS / "gpu-h200-2026-11-27-scaled.json").read_text())["cases"]


@pytest.mark.parametrize("rows", [8192, 4096])
@pytest.mark.parametrize(("recipe", "kind"), [("TensorWise", model.FLOAT8), ("BlockWise1x128", model.BLOCKS)])
def test_default_numbers_say_how_long_float8_took(rows: int, recipe: str, kind: str) -> None:
    found, size = SCALED[f"scaled/push {rows} x 4096 x 4096, {recipe}"]["found"], (1, rows, 4096, 4096)
    for names, fused in (((kind, "kernel"), True), ((model.FLOAT8, "torch"), False)):
        measured = found[f"{names[1]}_launch_free_ms"]
        assert 1e3 * DEFAULTS["cuda"].matmul(names[0], *size, fused) == pytest.approx(measured, rel=0.05)


# what `fusedcomm.compile` makes of it
def collective(kind: str, num_bytes: int, device: str) -> Any:
    """A collective of 4 ranks, in a group that has not come together."""
    with FakeTensorMode():
        sent = torch.fx.Graph().placeholder("sent")
        sent.meta["val"] = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device)
    return SimpleNamespace(kind=kind, sent=sent, group_size=4, group_name="no such group")


def product(m: int, k: int, n: int, device: str) -> Any:
    graph, nodes = torch.fx.Graph(), []
    for name, shape in (("x", (m, k)), ("w", (k, n))):
        node = graph.placeholder(name)
        with FakeTensorMode():
            node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device=device)
        nodes.append((node,))
    return SimpleNamespace(xs=nodes[0], ws=nodes[1])


def test_a_fused_collective_saves_what_the_matmul_hides_and_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"backend_bandwidth": dict.fromkeys(KINDS, 3e6), "backend_latency": dict.fromkeys(KINDS, 1.0)}
    slow = replace(GPU, copy_bandwidth=2e6, matmul_flops=dict.fromkeys(model.ITEMSIZE, 2.0 * 1024**3), **rates)
    monkeypatch.setattr(
        members, "known_member", lambda *_: SimpleNamespace(topology=SimpleNamespace(across=None, constants=slow))
    )
    short, long = product(1024, 1024, 1024, "cuda:0"), product(1024, 16384, 1024, "cuda:0")
    call = collective("all_to_all", 4_000_000, "cuda:0")  # 3 MB sent: 2 s; copies: 4 s
    assert saving_us(call, [short]) == close((3 / 4 + 4) * 1e6)  # 1 s of matmul, of which 3 chunks run beside
    assert saving_us(call, [long]) == close((2 + 4) * 1e6)
    gathered = collective("all_gather", 1_000_000, "cuda:0")  # as much arrives, and is copied once
    assert saving_us(gathered, [long]) == close((2 + 2) * 1e6)


def test_a_saving_is_by_default_numbers_before_the_group_has_come_together() -> None:
    default = DEFAULTS["cpu"]
    expected = default.collective("all_gather", 1 << 20, 4) * 1e6
    assert saving_us(collective("all_gather", 1 << 20, "cpu"), []) == close(expected)


# what comes from outside
@pytest.mark.parametrize("device_type", DEFAULTS)
def test_json_and_back(device_type: str) -> None:
    default = DEFAULTS[device_type]
    read = Constants.from_json(json.loads(json.dumps(asdict(default))), model.DEFAULT, device_type)
    assert (read, read.digest, hash(read)) == (default, default.digest, hash(default))
    other = replace(default, chunk_overhead=default.chunk_overhead * 2)
    assert other != default
    assert other.digest != default.digest


# parts of different sizes
@pytest.mark.parametrize("rank", range(4))
def test_parts_count_as_if_all_were_the_largest(rank: int) -> None:
    """So that all ranks find the same."""
    sizes = (2000, 1, 1, 1)
    uneven = shapes.all_gather_matmul((sizes[rank], 512), ((512, 64),), 0, 4, Splits(rank=rank, gather_splits=sizes))
    even = shapes.all_gather_matmul((2000, 512), ((512, 64),), 0, 4)
    for constants in DEFAULTS.values():
        call = "float32", constants
        found = [dict(model.estimate("all_gather_matmul", each, *call)) for each in (uneven, even)]
        pieces = [in_pieces.seconds("all_gather_matmul", each, *call, num_pieces=4) for each in (uneven, even)]
        assert found[0] == found[1] and pieces[0] == pieces[1]


CROSSED = Cut(0, parts_of_sizes((3, 1)), parts_of_sizes((3, 1)))  # the largest part of either dim stays where it is


@pytest.mark.parametrize(("latency", "padded"), [(5.9, False), (6.1, True)])
def test_a_gpu_pads_where_latencies_cost_more(latency: float, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded 9 bytes go to the peer, and otherwise 3, after another latency."""
    bandwidth = dict.fromkeys(KINDS, 1.0)
    monkeypatch.setitem(DEFAULTS, "cuda", replace(GPU, link_latency=latency, backend_bandwidth=bandwidth))
    assert model.pads("all_to_all", CROSSED, 1, "cuda") == padded
    assert not model.pads("all_to_all", CROSSED, 1, "cpu")


# `pipelined`, and into how many pieces it cuts
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


def test_few_rows_are_multiplied_before_anything_is_sent() -> None:
    """So nothing is hidden."""
    few = shapes.matmul_reduce_scatter((64, 512), (512, 2048), "sum", 0, 4)
    assert few.few_rows
    constants = replace(CPU, matmul_flops=matmul_takes(4.0), backend_bandwidth=wire_takes("matmul_all_to_all", 4.0))
    together = constants.matmul("float32", 1, 64, 512, 2048) + 4 * 64 / 1024
    assert in_pieces.fastest("matmul_reduce_scatter", few, "float32", constants)[1] == close(together)


def test_few_rows_with_scales_are_left_to_torch_where_it_multiplies_them() -> None:
    exchange, w = shapes.matmul_reduce_scatter((64, 512), (512, 256), "sum", 0, 4), torch.empty(512, 256, device="meta")
    for size, scale in ((w, (1, 1)), (w, (1, 256)), (w, (4, 2)), (w[:-8], (1, 1))):
        taken = fused_program._by_cublas(exchange, Scaled(size, w.new_empty(scale), torch.bfloat16))
        assert exchange.by_cublas and taken == (size is w and scale[0] == 1)


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
    topology = SimpleNamespace(across=across, constants=slow)
    monkeypatch.setattr(members, "known_member", lambda *_: SimpleNamespace(topology=topology))
    call, made_of = collective("all_to_all", 4_000_000, "cpu"), product(1024, 512, 2048, "cpu")
    saved = 30.0 if across is None else 3 / 4 * 4.0  # 3 MB sent; 3 chunks run beside the matmul
    assert saving_us(call, [made_of]) == close(saved * 1e6)
