"""The planner's rule table and the peer-access vote, GPU rules included: no GPU is needed to decide for one."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import geometry, planner, topology
from fusedcomm.exchange import Exchange
from fusedcomm.ops import dispatch
from fusedcomm.registry import Member
from fusedcomm.topology import Topology

OP = "matmul_all_to_all"
ABLE = Topology(no_workspace=None, no_fused=None, workspace_bytes=1 << 30, algorithm=None)
SMALL = geometry.matmul_all_to_all((1024, 512), (512, 1024), None, 0, 1, 2)  # 1 MiB per peer in bf16
DECODE = geometry.matmul_all_to_all((16, 512), (512, 1024), None, 0, 1, 2)  # 16 KiB
FEW_ROWS = geometry.matmul_reduce_scatter((64, 512), (512, 1 << 16), "sum", 0, 2)
BATCHES = geometry.matmul_reduce_scatter((64, 4, 512), (64, 512, 1 << 12), "sum", 0, 2)  # 1 MiB; each its own w
GATHERED_K = geometry.all_to_all_matmul((4096, 8192), (16384, 64), 1, 0, 2)  # 32 MiB
GATHERED_ROWS = geometry.all_gather_matmul((4096, 4096), ((4096, 64),), 0, 2)  # 32 MiB
DECODED = geometry.matmul_all_reduce((16, 512), (512, 1 << 20), "sum", 2)  # 16 MiB, cut along N: one pass over w
LARGE = geometry.matmul_all_to_all((16384, 512), (512, 2048), None, 0, 1, 2)  # 32 MiB
HUGE_ROW = geometry.matmul_all_to_all((4, 8), (8, 1 << 29), None, 0, 1, 2)


def member(device: str = "cuda:0", verdict: Topology = ABLE) -> Member:
    return Member(0, 2, "group", torch.device(device), None, verdict)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Append True: a CUDA graph is being captured."""
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[-1])
    return state


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    state = [False]
    monkeypatch.setattr(planner, "tf32_allowed", lambda: state[-1])
    return state


BF16, FP32 = torch.bfloat16, torch.float32
NO_PEERS = replace(ABLE, no_workspace="rank 1 is on another host than rank 0")
NO_TRITON = replace(ABLE, no_fused="Triton is not installed")


@pytest.mark.parametrize(
    "exchange, dtype, us, graph, allowed, algorithm, reason",
    [
        (SMALL, BF16, member("cpu"), False, False, "chunked", "CPU: matmuls read and write"),
        (SMALL, BF16, member(), False, False, "fused", "1 MiB per peer"),
        (LARGE, BF16, member(), False, False, "chunked", "32 MiB per peer: the copy engines"),
        (SMALL, FP32, member(), False, False, "chunked", "float32 without TF32"),
        (SMALL, FP32, member(), False, True, "fused", "2 MiB per peer"),
        (LARGE, BF16, member(), True, False, "fused", "CUDA graph"),
        (SMALL, FP32, member(), True, False, "fused", "CUDA graph"),
        (SMALL, BF16, member(verdict=NO_TRITON), False, False, "chunked", "Triton is not installed"),
        (SMALL, BF16, member(verdict=NO_TRITON), True, False, "unfused", "Triton is not installed"),
        (SMALL, BF16, member(verdict=NO_PEERS), False, False, "unfused", "rank 1 is on another host"),
        (HUGE_ROW, BF16, member(), False, False, "unfused", "one row for every peer takes"),
        (SMALL, BF16, None, False, False, "unfused", "one rank"),
        (DECODE, BF16, member(), False, False, "unfused", "16 KiB per peer, less than 64"),
        (DECODE, BF16, member(), True, False, "fused", "CUDA graph"),
        (DECODE, BF16, member("cpu"), False, False, "chunked", "CPU"),
        (FEW_ROWS, BF16, member(), False, False, "unfused", "32 rows per rank, fewer than 128"),
        (FEW_ROWS, BF16, member("cpu"), False, False, "chunked", "CPU"),
        (BATCHES, BF16, member("cpu"), False, False, "chunked", "CPU"),
        (DECODED, BF16, member("cpu"), False, False, "chunked", "CPU"),
        (GATHERED_K, BF16, member(), False, False, "fused", "32 MiB per peer: tiles"),
        (GATHERED_ROWS, BF16, member(), False, False, "chunked", "32 MiB per peer: the copy engines"),
    ],
)
def test_each_rule(
    capturing: list[bool],
    tf32: list[bool],
    exchange: Exchange,
    dtype: torch.dtype,
    us: Member | None,
    graph: bool,
    allowed: bool,
    algorithm: str,
    reason: str,
) -> None:
    capturing.append(graph)
    tf32.append(allowed)
    plan = planner.plan(OP, exchange, dtype, us)
    assert plan.algorithm == algorithm
    assert plan.reason.startswith(reason)


def test_forced_algorithms(capturing: list[bool]) -> None:
    for name in ("unfused", "chunked", "fused"):
        with fusedcomm.force_algorithm(name):
            assert planner.plan(OP, LARGE, BF16, member()) == planner.plan(OP, LARGE, BF16, member())
            assert planner.plan(OP, LARGE, BF16, member()).algorithm == name
    with fusedcomm.force_algorithm("fused"):
        assert planner.plan(OP, SMALL, BF16, member(verdict=NO_TRITON)).algorithm == "unfused"
    capturing.append(True)
    with fusedcomm.force_algorithm("chunked"):
        assert planner.plan(OP, SMALL, BF16, member()).algorithm == "unfused"
    with fusedcomm.force_algorithm("chunked", strict=True), pytest.raises(RuntimeError, match="a CUDA graph would fix"):
        planner.plan(OP, SMALL, BF16, member())
    assert planner.plan(OP, SMALL, BF16, member()).algorithm == "fused"


def test_a_capture_needs_one_eager_call(capturing: list[bool]) -> None:
    """That call runs fused even if chunked is planned; the next one follows the plan."""
    ours, call = member(), (LARGE, BF16)
    capturing.append(True)
    with pytest.raises(RuntimeError, match="call it once with these shapes on every rank before a CUDA graph"):
        dispatch._loading("fused", OP, call, ours)
    capturing.append(False)
    assert dispatch._loading("chunked", OP, call, ours) == "fused"
    ours.loaded.add(call)  # as the op does when that call has run
    assert dispatch._loading("chunked", OP, call, ours) == "chunked"
    capturing.append(True)
    assert dispatch._loading("fused", OP, call, ours) == "fused"


def test_a_fallback_is_logged_once(caplog: pytest.LogCaptureFixture, capturing: list[bool]) -> None:
    verdict = replace(ABLE, no_workspace="a reason of this test")
    for _ in range(3):
        planner.plan(OP, SMALL, BF16, member(verdict=verdict))
    assert [record.getMessage() for record in caplog.records] == [f"{OP} runs unfused: a reason of this test"]


class FakeNVML:
    """GPUs named by their UUID; ``cut`` are the pairs without NVLink."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_CAPS_INDEX_WRITE, NVML_P2P_STATUS_OK = 2, 1, 0

    def __init__(self, *cut: tuple[str, str]) -> None:
        self.cut = {frozenset(pair) for pair in cut}

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid.startswith("GPU-")
        return uuid[-1]

    def nvmlDeviceGetP2PStatus(self, mine: str, peer: str, index: int) -> int:
        cut = frozenset((mine, peer)) in self.cut
        return 5 if cut and index == self.NVML_P2P_CAPS_INDEX_NVLINK else 0


def test_nvml_decides_on_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(("a", "c")))
    assert topology._no_peer_access(1, ["a", "b", "c"]) is None
    for rank, peer in ((0, 2), (2, 0)):
        reason = topology._no_peer_access(rank, ["a", "b", "c"])
        assert reason == f"no NVLink peer access between the GPUs of ranks {rank} and {peer} (NVML status 5)"
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace())  # whatever NVML fails with
    assert "rank 0: NVML cannot tell" in str(topology._no_peer_access(0, ["a", "b"]))
    assert "several ranks share one GPU" in str(topology._no_peer_access(0, ["a", "a"]))
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert topology._no_peer_access(0, ["a", "a"]) is None


def explain_meta(rank: int) -> Any:
    x, w = torch.empty(4, 8, device="meta"), torch.empty(8, 6, device="meta")
    with pytest.raises(ValueError, match=r"op must be one of matmul_all_to_all, .*, got 'matmul'"):
        fusedcomm.explain("matmul", x, w, 0, 1)
    return fusedcomm.explain(OP, x, w, 0, 1, dist.group.WORLD, verbose=False)


def test_explain_takes_meta_tensors(ranks: Any) -> None:
    first, second = ranks(2).run(explain_meta)
    assert first == second
    assert str(first) == f"{OP}: chunked (CPU: matmuls read and write the peers' memory)"
