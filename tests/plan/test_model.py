"""The cost model against arithmetic by hand, and what it takes from outside."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedcomm.compile.fuse.time_saved import saving_us
from fusedcomm.memory import members
from fusedcomm.plan.cost import model
from fusedcomm.plan.cost.model import DEFAULTS, Constants
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.cut import Cut, Splits, parts_of_sizes
from fusedcomm.plan.geometry.exchange import Exchange

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
    copy_bandwidth=ENDLESS,
    copy_overhead=0.0,
    unpack_bandwidth=ENDLESS,
    link_bandwidth=ENDLESS,
    link_latency=0.0,
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
FLOPS = 2 * 1024 * 512 * 2048
CHUNK = 2 * MIB


def seconds(op: str, constants: Constants, dtype: str = "float32") -> dict[str, float]:
    return dict(model.estimate(op, CALLS[op], dtype, constants))


def close(expected: float) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("op", CALLS)
def test_without_overheads_and_with_endless_rates_nothing_takes_time(op: str) -> None:
    assert seconds(op, GPU) == {name: close(0) for name in ("unfused", "chunked", "fused")}
    assert seconds(op, CPU) == {name: close(0) for name in ("unfused", "chunked")}


@pytest.mark.parametrize("op", CALLS)
def test_every_algorithm_does_the_flops_once(op: str) -> None:
    """Sizes are such that tiles divide them, on as many SMs."""
    gpu = replace(GPU, matmul_flops=RATE, fused_flops=RATE)
    assert seconds(op, gpu) == {name: close(FLOPS / 1e9) for name in ("unfused", "chunked", "fused")}
    assert seconds(op, replace(CPU, matmul_flops=RATE)) == {
        "unfused": close(FLOPS / 1e9),
        "chunked": close(FLOPS / 1e9),
    }


def test_the_own_chunk_of_a_fused_gather_takes_cublas_where_it_has_rows_of_its_own() -> None:
    """Otherwise it is copied, and the kernel does all."""
    rows, k = "all_gather_matmul", "all_to_all_matmul"
    cublas, copies = replace(GPU, matmul_flops=RATE), replace(GPU, copy_bandwidth=1e9)
    assert seconds(rows, cublas)["fused"] == close(FLOPS / 4 / 1e9) and seconds(k, cublas)["fused"] == close(0)
    assert seconds(rows, copies)["fused"] == close(0) and seconds(k, copies)["fused"] == close(CHUNK / 1e9)


SENT = {"matmul_all_reduce": 6}  # chunks that a rank sends; 3 of the others
COPIES = {  # how often unfused copies all 4 chunks, before and after the collective
    "matmul_all_to_all": 1,  # rows are gathered: nothing to unpack
    "all_to_all_matmul": 1,  # rows are scattered: nothing to pack
    "all_gather_matmul": 0,
    "matmul_reduce_scatter": 0,
    "matmul_all_reduce": 1,
}


@pytest.mark.parametrize("op", CALLS)
def test_unfused_pays_for_the_collective_and_its_copies(op: str) -> None:
    kind, sent = model.KINDS[op], SENT.get(op, 3) * CHUNK
    slow = {
        "backend_bandwidth": {**GPU.backend_bandwidth, kind: 1e9},
        "backend_latency": {**GPU.backend_latency, kind: 1},
    }
    assert seconds(op, replace(GPU, **slow)) == {
        "unfused": close(1 + sent / 1e9),
        "chunked": close(0),
        "fused": close(0),
    }
    copies = seconds(op, replace(GPU, copy_bandwidth=1e9, copy_overhead=1.0))
    assert copies["unfused"] == close(COPIES[op] * (1 + 4 * CHUNK / 1e9))


def test_chunked_hides_transfers_behind_matmuls_and_the_other_way_round() -> None:
    """With c = FLOPS / 4 / rate and l = latency + chunk / link, the time is the longer of both sums, and one of the
    shorter.
    """
    op, chunk_flops = "matmul_all_to_all", FLOPS / 4
    link = {"link_bandwidth": CHUNK / 0.5, "link_latency": 0.5}  # l = 1 s
    for c in (0.25, 4.0):
        rate = dict.fromkeys(model.ITEMSIZE, chunk_flops / c)
        assert seconds(op, replace(GPU, matmul_flops=rate, **link))["chunked"] == close(max(4 * c, c + 3, 3 * c + 1))
        gather = seconds("all_gather_matmul", replace(GPU, matmul_flops=rate, **link))["chunked"]
        assert gather == close(max(4 * c, 3 + c))
        assert seconds(op, replace(CPU, matmul_flops=rate, **link))["chunked"] == close(4 * c)  # matmuls write to peers
        on_cpu = seconds("all_gather_matmul", replace(CPU, matmul_flops=rate, **link))["chunked"]
        assert on_cpu == close(4 * c + 3)


def test_few_rows_read_w_once() -> None:
    """16 rows are cut into 4: one matmul, bound by memory, then the transfers. The fused kernel reads w per chunk."""
    exchange = shapes.matmul_reduce_scatter((16, 1024), (1024, 8192), "sum", 0, 4)
    w_bytes, x_bytes, y_bytes = 4 * 1024 * 8192, 4 * 16 * 1024, 4 * 16 * 8192
    slow = replace(GPU, memory_bandwidth=1e9, link_latency=1.0)
    found = model.estimate("matmul_reduce_scatter", exchange, "float32", slow)
    once = (w_bytes + x_bytes + y_bytes) / 1e9
    assert found["unfused"] == close(once)
    assert found["chunked"] == close(once + 3)
    assert found["fused"] == close((4 * w_bytes + x_bytes + y_bytes) / 1e9 + 1)


def test_few_columns_read_x_again_for_every_chunk() -> None:
    """A CPU reads, then computes. With 2 columns per chunk it reads x 4 times, and is slower chunked than unfused."""
    exchange = shapes.matmul_all_to_all((1024, 4096), (4096, 8), None, 0, 1, 4)
    x_bytes, w_bytes, y_bytes = 4 * 1024 * 4096, 4 * 4096 * 8, 4 * 1024 * 8
    found = model.estimate(
        "matmul_all_to_all", exchange, "float32", replace(CPU, memory_bandwidth=1e9, matmul_flops=RATE)
    )
    compute = 2 * 1024 * 4096 * 8 / 1e9
    assert found["unfused"] == close((x_bytes + w_bytes + y_bytes) / 1e9 + compute)
    assert found["chunked"] == close((4 * x_bytes + w_bytes + y_bytes) / 1e9 + compute)


def test_what_arrives_is_copied_out_or_added() -> None:
    slow = replace(GPU, unpack_bandwidth=CHUNK)  # 1 s per chunk
    assert seconds("matmul_all_to_all", slow)["fused"] == close(4)
    for machine in (slow, replace(CPU, unpack_bandwidth=CHUNK)):
        assert seconds("matmul_all_to_all", machine)["chunked"] == close(3)  # the own chunk is in place
    assert seconds("matmul_reduce_scatter", slow)["chunked"] == close(2.5)  # 4 read, 1 written
    assert seconds("matmul_all_reduce", slow)["chunked"] == close(2.5 + 4)
    linked = replace(GPU, link_latency=1.0)
    assert seconds("matmul_all_reduce", linked)["chunked"] == close(3 + 3)


def test_overheads_are_per_call_and_per_chunk() -> None:
    slow = replace(GPU, call_overhead={"unfused": 1.0, "chunked": 2.0, "fused": 4.0}, chunk_overhead=0.5)
    assert seconds("all_gather_matmul", slow) == {"unfused": close(1), "chunked": close(4), "fused": close(4.5)}
    assert seconds("matmul_all_reduce", slow) == {"unfused": close(1), "chunked": close(2 + 8 * 0.5), "fused": close(4)}


def test_a_gpu_works_beside_its_host_and_a_cpu_is_its_own() -> None:
    slow = replace(GPU, call_overhead=dict.fromkeys(GPU.call_overhead, 1.0))
    for device in (0.5, 4.0):
        busy = replace(slow, matmul_flops=dict.fromkeys(model.ITEMSIZE, FLOPS / device))
        assert seconds("matmul_all_to_all", busy)["chunked"] == close(max(device, 1))
        assert seconds("matmul_all_to_all", replace(busy, device_type="cpu"))["chunked"] == close(device + 1)


def test_waves_of_tiles() -> None:
    gpu = replace(GPU, num_sms=100, matmul_flops=RATE)

    def rows(m: int, n: int = 1280, k: int = 256) -> float:
        return gpu.matmul("bfloat16", 1, m, k, n) * 1e9 / (2 * k * n)

    assert rows(1280) == close(1280)  # 100 tiles of 128 x 128: one wave
    assert rows(1281) == close(2560)  # one row more: another wave
    assert rows(1153) == close(1280)
    assert rows(64) == close(100 * 64 * 64 / 1280)  # 20 tiles of 64 x 64, one wave, most SMs idle
    assert rows(64, k=1024) == close(100 * 64 * 64 / 1280 / 2)  # but for what K gives to divide
    assert gpu.matmul("bfloat16", 1, 0, 256, 1280) == close(0)
    cpu = replace(CPU, matmul_flops=RATE)
    assert cpu.matmul("bfloat16", 1, 17, 256, 1280) == close(32 * 2 * 256 * 1280 / 1e9)


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_tiny_calls_have_a_time(rows: int) -> None:
    exchange = shapes.matmul_all_to_all((rows, 8), (8, 8), None, 0, 1, 2)
    for constants in DEFAULTS.values():
        assert all(0 < t < 1 for t in model.estimate("matmul_all_to_all", exchange, "float32", constants).values())


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
    read = Constants.from_json(json.loads(json.dumps(default.to_json())))
    assert (read, read.digest, hash(read)) == (default, default.digest, hash(default))
    other = replace(default, chunk_overhead=default.chunk_overhead * 2)
    assert other != default
    assert other.digest != default.digest


def changed(*path: str, value: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(DEFAULTS["cuda"].to_json()))
    inner = data
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return data


@pytest.mark.parametrize(
    "data, text",
    [
        ([], "constants must have exactly the fields"),
        (changed("extra", value=1), "constants must have exactly the fields"),
        (changed("source", value="guessed"), "source and device_type must be known, got 'guessed'"),
        (changed("device_type", value="tpu"), "source and device_type must be known"),
        (changed("copy_bandwidth", value=math.nan), r"copy_bandwidth must be a number in \[.*\], got nan"),
        (changed("copy_bandwidth", value=0), "copy_bandwidth must be a number"),
        (changed("copy_bandwidth", value=10**400), "copy_bandwidth must be a number"),
        (changed("copy_bandwidth", value="1e12"), "copy_bandwidth must be a number"),
        (changed("link_latency", value=-1e-6), r"link_latency must be a number in \[0, 1\]"),
        (changed("num_sms", value=1.5), "num_sms must be a number"),
        (changed("matmul_flops", "int8", value=1e12), "matmul_flops must have exactly the keys float32"),
        (changed("matmul_flops", "tf32", value=None), r"matmul_flops\[tf32\] must be a number"),
        (changed("call_overhead", "unfused", value=-1), r"call_overhead\[unfused\] must be a number in \[0, 1\]"),
    ],
)
def test_impossible_constants_are_refused(data: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Constants.from_json(data)


# parts of different sizes


def of_rank(make: Any, *args: Any, **splits: Any) -> list[Exchange]:
    """The call of each of 4 ranks, or of as many as there are parts."""
    sizes = splits.get("gather_splits") or splits["scatter_lengths"]
    x_of = args[0] if callable(args[0]) else lambda _: args[0]
    calls = []
    for rank in range(len(sizes)):
        calls.append(make(x_of(rank), *args[1:], len(sizes), Splits(rank=rank, **splits)))
    return calls


SKEWED = (2000, 1, 1, 1)
UNEVEN = {
    "one head for all": (
        of_rank(shapes.matmul_all_to_all, (512, 512), (512, 256), (2, 1, 128), 0, 2,
                scatter_starts=(0,) * 4, scatter_lengths=(1,) * 4),
        2 * 512 * 512 * 256, 2 * 512 * 512 * 256,
    ),
    "most rows on one rank": (
        of_rank(shapes.matmul_all_to_all, lambda r: (SKEWED[r], 512), (512, 512), None, 0, 1, gather_splits=SKEWED),
        2 * 2000 * 512 * 512, 2 * 2000 * 512 * 512,
    ),
    "most rows from one rank": (
        of_rank(shapes.all_gather_matmul, lambda r: (SKEWED[r], 512), ((512, 64),), 0, gather_splits=SKEWED),
        2 * 2016 * 512 * 64, 2 * 2048 * 512 * 64,
    ),
    "most rows to one rank": (
        of_rank(shapes.all_to_all_matmul, (2003, 128), (512, 64), 1, 0, scatter_lengths=SKEWED),
        2 * 2000 * 512 * 64, 4 * 2 * 2000 * 128 * 64,
    ),
    "most rows summed on one rank": (
        of_rank(shapes.matmul_reduce_scatter, (2003, 512), (512, 64), "sum", 0, scatter_lengths=SKEWED),
        2 * 2016 * 512 * 64, 2 * 2048 * 512 * 64,
    ),
}  # fmt: skip
UNEVEN_OPS = dict(zip(UNEVEN, (*["matmul_all_to_all"] * 2, "all_gather_matmul", "all_to_all_matmul",
                               "matmul_reduce_scatter"), strict=True))  # fmt: skip


@pytest.mark.parametrize("name", UNEVEN)
def test_the_slowest_rank_multiplies_what_is_its_own(name: str) -> None:
    """Rows are counted 16 at a time. All ranks find the same."""
    exchanges, unfused, chunked = UNEVEN[name]
    cpu = replace(CPU, matmul_flops=RATE)
    found = [model.estimate(UNEVEN_OPS[name], exchange, "float32", cpu) for exchange in exchanges]
    assert found == [{"unfused": close(unfused / 1e9), "chunked": close(chunked / 1e9)}] * 4


def test_the_slowest_rank_sends_and_copies_what_is_its_own() -> None:
    """From one rank 2000 rows go to each of 3 peers; into its memory come 3 rows."""
    exchanges = UNEVEN["most rows from one rank"][0]
    row = 512 * 4
    for exchange in exchanges:
        links = replace(CPU, link_bandwidth=1e9)
        took = model.estimate("all_gather_matmul", exchange, "float32", links)["chunked"]
        assert took == close(3 * 2000 * row / 1e9)
    exchanges = UNEVEN["one head for all"][0]
    copies = replace(CPU, link_bandwidth=1e9)  # copies of the one product, to 4 ranks
    took = model.estimate("matmul_all_to_all", exchanges[0], "float32", copies)["chunked"]
    assert took == close(4 * 512 * 256 * 4 / 1e9)


CROSSED = Cut(0, parts_of_sizes((3, 1)), parts_of_sizes((3, 1)))  # the largest part of either dim stays where it is


@pytest.mark.parametrize(("latency", "padded"), [(5.9, False), (6.1, True)])
def test_a_gpu_pads_where_latencies_cost_more(latency: float, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded 9 bytes go to the peer, and otherwise 3, after another latency."""
    bandwidth = dict.fromkeys(KINDS, 1.0)
    monkeypatch.setitem(DEFAULTS, "cuda", replace(GPU, link_latency=latency, backend_bandwidth=bandwidth))
    assert model.pads("all_to_all", CROSSED, 1, "cuda") == padded


GATHERED, SCATTERED = CROSSED._replace(scattered=None), CROSSED._replace(gathered=None)


@pytest.mark.parametrize(
    ("kind", "cut", "seconds_per_byte", "padded"),
    [
        ("all_to_all", CROSSED, 1.0, False),
        ("all_gather", GATHERED, 0.7, False),
        ("all_gather", GATHERED, 0.6, True),
        ("reduce_scatter", SCATTERED, 0.7, False),
        ("reduce_scatter", SCATTERED, 0.6, True),
    ],
)
def test_a_cpu_pads_where_the_backend_is_that_much_faster(
    kind: str, cut: Cut, seconds_per_byte: float, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 bytes of every rank by the collective itself, or 2 on average by all_to_all, each of which takes a second."""
    bandwidth = dict.fromkeys(KINDS, 1.0) | {kind: 1 / seconds_per_byte}
    monkeypatch.setitem(DEFAULTS, "cpu", replace(CPU, backend_bandwidth=bandwidth))
    assert model.pads(kind, cut, 1, "cpu") == padded
    assert model.pads(kind, cut._replace(rank=1), 1, "cpu") == padded
