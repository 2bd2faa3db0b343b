"""What `fusedcomm tune` fits to its measurements, and what it refuses to keep."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fusedcomm.bench import tune
from fusedcomm.bench.op_bench import OpData
from fusedcomm.bench.timing import ValuesDiffer
from fusedcomm.memory import group_member, members, topology
from fusedcomm.memory.group import resolve
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.plan.cost import model
from fusedcomm.plan.cost.model import DEFAULTS

CPU = torch.device("cpu")
FAST = replace(DEFAULTS["cpu"], source=model.TUNED, copy_bandwidth=3e9)


def test_lines_are_fitted_and_never_go_below_zero() -> None:
    sizes = (1000, 10_000, 1_000_000)
    bandwidth, latency = tune.line({size: 5e-6 + size / 2e9 for size in sizes})
    assert [bandwidth, latency] == pytest.approx([2e9, 5e-6])
    bandwidth, latency = tune.line({size: size / 2e9 - 1e-7 for size in sizes})  # as if no bytes took less than no time
    assert latency == tune.LEAST_S
    assert 2e9 < bandwidth < 3e9
    with pytest.raises(tune.Unreliable, match="more bytes must take more time, got 1000: 2000 us, 1000000: 1000 us"):
        tune.line({1000: 2e-3, 1_000_000: 1e-3})


def test_noise_is_refused_with_its_size() -> None:
    quiet = [1e-3 * (1 + 0.03 * (i % 5)) for i in range(40)]
    tune.check_noise(quiet)
    tune.check_noise([1e-3, 9e-3])  # too few references say nothing
    tune.check_noise([*quiet, 5e-3, 7e-3])  # a few slow ones are outside of the deciles
    assert tune.noise(quiet) == pytest.approx(0.12 / 1.06)
    for busy in ([*quiet[:20], *(2 * each for each in quiet[20:])], [1e-3 * (1 + i % 3) for i in range(40)]):
        with pytest.raises(tune.Unreliable, match=r"measured 40 times among the rest, differed by \d+% of its median"):
            tune.check_noise(busy)


def sample(chunked: float, unfused: float, estimated: float) -> tune.Sample:
    measured = {"chunked": chunked, "unfused": unfused}
    return tune.Sample("matmul_all_to_all", 16, 64, 64, "float32", measured, {"chunked": estimated, "unfused": 1e-3})


def test_estimates_that_choose_slow_algorithms_are_refused() -> None:
    good = [sample(1e-3, 2e-3, 5e-4)] * 9
    assert tune.misfit([*good, sample(1.5e-3, 1e-3, 5e-4)]) is None  # 50 % of one call in 10
    why = tune.misfit([*good, sample(3e-3, 1e-3, 5e-4)])
    assert why is not None and "the 10 calls measured take 20% longer than with the fastest ones" in why


@pytest.mark.parametrize("device_type", DEFAULTS)
def test_planted_rates_are_found(device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for waves that are not full, rows of a tile, and what sums take of a narrow matmul."""
    truth, sizes = DEFAULTS[device_type], tune.SIZES[device_type]
    gpu = SimpleNamespace(multi_processor_count=truth.num_sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)

    def matmuls(dtype: str, sizes: Any, repeat: int = 1) -> dict[Any, float]:
        return {size: truth.matmul(dtype, 1, *size) for size in sizes}

    dtype = "float32" if truth.on_cpu else "bfloat16"
    bench: Any = SimpleNamespace(device=torch.device(device_type), sizes=sizes, dtype=dtype, matmuls=matmuls)
    wrong = dict.fromkeys(truth.matmul_flops, 1e9)
    found = tune._matmul(bench, replace(truth, matmul_flops=wrong, memory_bandwidth=1e9, matmul_overhead=0.0))
    assert found.memory_bandwidth == pytest.approx(truth.memory_bandwidth, rel=0.35 if truth.on_cpu else 0.15)
    assert found.matmul_flops == pytest.approx(dict(truth.matmul_flops), rel=0.12)
    ratios = {name: rate / 1e9 * truth.matmul_flops[name] for name, rate in truth.fused_flops.items()}
    assert found.fused_flops == pytest.approx(ratios, rel=0.12)
    assert found.num_sms == truth.num_sms


def test_planted_overheads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of a machine that the model describes give back its overheads."""
    truth = replace(FAST, call_overhead={"unfused": 3e-4, "chunked": 2e-4}, chunk_overhead=1e-5)
    now: list[Any] = []

    def data(bench: Any, op: str, size: tuple[int, int, int], dtype: str, names: Any) -> Any:
        now[:] = [op, MatmulSize(*size), dtype]
        return SimpleNamespace(size=MatmulSize(*size), forced=lambda name: name)

    def seconds(variants: dict[str, Any], repeat: int, with_host: bool = False) -> dict[str, float]:
        op, size, dtype = now
        times = model.estimate(op, tune.exchange_of(op, size, 2), dtype, truth)
        return {name: times[name] for name in variants}

    monkeypatch.setattr(tune, "_data", data)
    ours: Any = SimpleNamespace(device=CPU, group_size=2, topology=topology.Topology(None, "no", 0, None))
    bench = tune._Bench(ours, tune.TuneSizes.of("cpu", quick=False), rounds=1)
    monkeypatch.setattr(bench, "seconds", seconds)
    found = tune._overheads(bench, replace(truth, call_overhead=FAST.call_overhead, chunk_overhead=0.5))
    assert found.call_overhead == {"unfused": pytest.approx(3e-4), "chunked": pytest.approx(2e-4)}
    assert found.chunk_overhead == pytest.approx(1e-5)
    assert len(bench.samples) == 5 * 4 * 2


def tune_small(rank: int, workspace_bytes: int, op: str) -> str:
    member = members.member(resolve(None)[1], CPU)
    bench = tune._Bench(member, tune.TuneSizes.of("cpu", quick=True), rounds=1)
    before = member.topology
    member.topology = replace(before, workspace_bytes=workspace_bytes)
    member.__dict__.pop("max_slot_bytes", None)
    try:
        tune._data(bench, op, (16, 64, 64), "float32", ["chunked", "unfused"])
    except (group_member.WorkspaceUnavailable, ValuesDiffer) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        member.topology = before
        member.__dict__.pop("max_slot_bytes", None)
    return "measured"


def tune_wrong_values(rank: int) -> str:
    with mock.patch.object(OpData, "check", lambda data, name, result: "wrong" * (name == "chunked" and rank == 1)):
        return tune_small(rank, 1 << 30, "matmul_all_to_all")


def test_only_what_runs_and_is_right_is_measured(ranks: Any) -> None:
    assert ranks(2).run(tune_small, 1 << 30, "matmul_all_to_all") == ["measured"] * 2
    for result in ranks(2).run(tune_small, 64, "matmul_all_to_all"):
        assert result.startswith("WorkspaceUnavailable: matmul_all_to_all: unfused (one row for every peer takes")
    assert ranks(2).run(tune_wrong_values) == ["ValuesDiffer: 'chunked' gave wrong values: rank 1: wrong"] * 2
