"""What the planner decides, and the peer-access vote, GPUs included: no GPU is needed to decide for one."""

import contextlib
import importlib.util
import io
import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.bench import tune
from fusedcomm.bench.op_bench import PROGRAMS
from fusedcomm.memory import topology, triton_probe
from fusedcomm.memory.group_member import Member
from fusedcomm.memory.segment import MOST_SLOT_BYTES
from fusedcomm.memory.topology import Topology
from fusedcomm.ops import proof
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.plan import planner
from fusedcomm.plan.cost import model
from fusedcomm.plan.cost.links import INTER, Reach
from fusedcomm.plan.geometry import norm, shapes
from fusedcomm.plan.geometry.cut import Splits
from fusedcomm.plan.geometry.exchange import Exchange

OP = "matmul_all_to_all"
ABLE = Topology(no_workspace=None, no_fused=None, workspace_bytes=1 << 30, algorithm=None)
SMALL = shapes.matmul_all_to_all((1024, 512), (512, 1024), None, 0, 1, 2)  # 1 MiB per peer in bf16
DECODE = shapes.matmul_all_to_all((16, 512), (512, 1024), None, 0, 1, 2)  # 16 KiB
FEW_ROWS = shapes.matmul_reduce_scatter((64, 512), (512, 1 << 13), "sum", 0, 2)  # 512 KiB, as a usual call 64 rows
FEW_SUMS = shapes.matmul_all_reduce((64, 512), (512, 1 << 13), "sum", 2)  # likewise, cut in rows; usual in columns
BATCHES = shapes.matmul_reduce_scatter((64, 4, 512), (64, 512, 1 << 12), "sum", 0, 2)  # 1 MiB; each its own w
GATHERED_K = shapes.all_to_all_matmul((4096, 8192), (16384, 64), 1, 0, 2)  # 32 MiB
GATHERED_ROWS = shapes.all_gather_matmul((4096, 4096), ((4096, 64),), 0, 2)  # 32 MiB
DECODED = shapes.matmul_all_reduce((16, 512), (512, 1 << 20), "sum", 2)  # 16 MiB, cut along N: one pass over w
LARGE = shapes.matmul_all_to_all((16384, 512), (512, 2048), None, 0, 1, 2)  # 32 MiB
WIDE = shapes.matmul_all_to_all((16384, 8192), (8192, 8192), None, 0, 1, 2)  # 128 MiB, usual matmul of 1.4 ms
UNEVEN = shapes.matmul_all_to_all((16384, 512), (512, 2051), None, 0, 1, 2, Splits(gather_size=32767, rank=0))
ONE_SHOT = norm.one_shot((1024, 4096), 512, 1e-6, 2)
DECODED_TAIL = norm.one_shot((4, 2048), 512, 1e-6, 2)
SCATTERED = norm.reduce_scatter((16384, 4096), (4096, 4096), 1e-6, 0, 2)
UNEVEN_ROWS = norm.reduce_scatter((16383, 4096), (4096, 4096), 1e-6, 0, 2, Splits(rank=0))
TWO_SHOT = norm.two_shot((16384, 4096), (4096, 4096), 1e-6, 2)
HUGE_ROW = shapes.matmul_all_to_all((4, 8), (8, 1 << 29), None, 0, 1, 2)


def member(device: str = "cuda:0", verdict: Topology = ABLE) -> Member:
    return Member(0, 2, "group", torch.device(device), None, verdict)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Append True to say that a CUDA graph is being captured."""
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[-1])
    return state


BF16, FP32 = torch.bfloat16, torch.float32
NO_PEERS = replace(ABLE, no_workspace="rank 1 is on another host than rank 0")
ACROSS = replace(NO_PEERS, backend="nccl", across=Reach(INTER, 2, 1, 1))
TF32 = replace(ABLE, tf32=True)
NO_TRITON = replace(ABLE, no_workspace="rank 0: Triton is not installed")


MEASURED = replace(model.DEFAULTS["cuda"], source=model.TUNED)
TUNED = replace(ABLE, constants=MEASURED)  # the same numbers, but measured
SLOW_HOST = replace(ABLE, constants=replace(MEASURED, call_overhead={"unfused": 0.0, "chunked": 1e-3, "fused": 1e-3}))
ESTIMATED = "estimated "


@pytest.mark.parametrize(
    "op, exchange, dtype, us, graph, algorithm, reason",
    [
        (OP, SMALL, BF16, member("cpu"), False, "chunked", ESTIMATED),
        (OP, SMALL, BF16, member(), False, "fused", ESTIMATED),
        (OP, LARGE, BF16, member(), False, "chunked", ESTIMATED),
        (OP, LARGE, FP32, member(), False, "chunked", ESTIMATED),
        (OP, LARGE, FP32, member(verdict=replace(ABLE, workspace_bytes=1 << 19)), False, "unfused", ESTIMATED),
        (OP, SMALL, FP32, member(verdict=TF32), False, "fused", ESTIMATED),
        (OP, LARGE, BF16, member(), True, "fused", ESTIMATED),
        (OP, SMALL, BF16, member(verdict=NO_TRITON), False, "unfused", "rank 0: Triton is not installed"),
        (OP, SMALL, BF16, member(verdict=NO_PEERS), False, "unfused", "rank 1 is on another host"),
        (OP, HUGE_ROW, BF16, member(), False, "unfused", "one row for every peer takes"),
        (OP, SMALL, BF16, None, False, "unfused", "one rank"),
        (OP, UNEVEN, BF16, member(), False, "chunked", ESTIMATED),
        (OP, UNEVEN, BF16, member("cpu"), False, "chunked", ESTIMATED),
        (OP, UNEVEN, BF16, member(), True, "unfused", "parts of different sizes, gather_splits=[16384, 16383]"),
        (OP, DECODE, BF16, member(), False, "unfused", "16 KiB per peer, a decode size"),
        (OP, DECODE, BF16, member(), True, "unfused", "16 KiB per peer, a decode size"),
        (OP, DECODE, BF16, member("cpu"), False, "chunked", ESTIMATED),
        (OP, DECODE, BF16, member(verdict=TUNED), False, "fused", ESTIMATED),
        (OP, SMALL, BF16, member(verdict=SLOW_HOST), False, "unfused", ESTIMATED),
        (OP, WIDE, BF16, member(verdict=SLOW_HOST), False, "chunked", ESTIMATED),
        ("matmul_reduce_scatter", FEW_ROWS, BF16, member(), False, "unfused", "512 KiB per peer, a decode size"),
        ("matmul_reduce_scatter", FEW_ROWS, BF16, member("cpu"), False, "chunked", ESTIMATED),
        ("matmul_all_reduce", FEW_SUMS, BF16, member(), True, "unfused", "512 KiB per peer, a decode size"),
        ("matmul_reduce_scatter", BATCHES, BF16, member("cpu"), False, "chunked", ESTIMATED),
        ("matmul_all_reduce", DECODED, BF16, member("cpu"), False, "chunked", ESTIMATED),
        ("all_to_all_matmul", GATHERED_K, BF16, member(), False, "fused", ESTIMATED),
        ("all_gather_matmul", GATHERED_ROWS, BF16, member(), False, "fused", ESTIMATED),
        ("matmul_all_reduce_norm", ONE_SHOT, BF16, member(), True, "fused", ESTIMATED),
        ("matmul_all_reduce_norm", DECODED_TAIL, BF16, member(), True, "fused", "CUDA graph: few rows"),
        ("matmul_all_reduce_norm", DECODED_TAIL, BF16, member(), False, "unfused", "16 KiB per peer, a decode size"),
        ("matmul_all_reduce_norm", TWO_SHOT, BF16, member(), False, "chunked", ESTIMATED),
        ("matmul_reduce_scatter_norm", FEW_ROWS, BF16, member(), True, "fused", "CUDA graph: few rows"),
        ("all_reduce_norm", TWO_SHOT, BF16, member(verdict=ACROSS), False, "pipelined", "rank 1 is on another host"),
        ("all_reduce_norm", ONE_SHOT, BF16, member(verdict=ACROSS), False, "unfused", "rank 1 is on another host"),
    ],
)
def test_each_rule(
    capturing: list[bool], op: str, exchange: Any, dtype: Any, us: Any, graph: bool, algorithm: str, reason: str
) -> None:
    capturing.append(graph)
    plan = planner.plan(op, exchange, dtype, us)
    assert plan.algorithm == algorithm, plan
    assert plan.reason.startswith(reason)


@pytest.mark.parametrize("exchange", [SCATTERED, UNEVEN_ROWS, FEW_ROWS, BATCHES])
@pytest.mark.parametrize("graph", [False, True])
def test_a_scattered_norm_has_the_wire_of_the_plain_op(capturing: list[bool], exchange: Exchange, graph: bool) -> None:
    """Also after a proof that failed: a peer may have the plain op."""
    capturing.append(graph)
    for verdict in (ABLE, replace(ABLE, prove=True)):
        us = member(verdict=verdict)
        for kind in planner.KINDS.values() if verdict.prove else ():
            names = [verdict.name_of_proof(kind, each, BF16, exchange.cut is not None) for each in ("chunked", "fused")]
            us.outcomes.update(dict.fromkeys(names, "wrong values"))
        plain, ours = (planner.plan(f"matmul_reduce_scatter{form}", exchange, BF16, us) for form in ("", "_norm"))
        assert ours == replace(plain, op=ours.op) and ours.fingerprint == plain.fingerprint


@pytest.mark.parametrize("name", [None, "chunked"])
def test_parts_of_different_sizes_are_in_no_cuda_graph(capturing: list[bool], name: str | None) -> None:
    """Before a capture neither, so that what has run then is what the graph holds."""
    capturing.append(False)
    with fusedcomm.force_algorithm(name):
        assert planner.plan(OP, UNEVEN, BF16, member()).algorithm == "chunked"
        with fusedcomm.before_capture():
            plan = planner.plan(OP, UNEVEN, BF16, member())
    assert plan.algorithm == "unfused" and plan.reason.endswith("a CUDA graph would fix the slots of chunked")


def test_parts_of_different_sizes_are_not_fused(capturing: list[bool]) -> None:
    capturing.append(False)
    assert planner.plan(OP, UNEVEN, BF16, member()).reason.endswith("; parts of different sizes: not fused")
    reason = "the kernels of fused take chunks of one size"
    for device in ("cpu", "cuda"):
        with fusedcomm.force_algorithm("fused"):
            plan = planner.plan(OP, UNEVEN, BF16, member(device))
        assert plan.algorithm == "unfused" and plan.reason.endswith(reason)
        with fusedcomm.force_algorithm("fused", strict=True), pytest.raises(RuntimeError, match=reason):
            planner.plan(OP, UNEVEN, BF16, member(device))


NO_NVLINK = replace(NO_TRITON, backend="nccl")
ON_MPI = replace(ACROSS, backend="mpi")


@pytest.mark.parametrize(
    ("op", "exchange", "verdict", "algorithm", "reason"),
    [
        (OP, WIDE, ACROSS, "pipelined", "rank 1 is on another host than rank 0; estimated "),
        (OP, LARGE, NO_NVLINK, "unfused", "rank 0: Triton is not installed; estimated "),
        (OP, WIDE, ON_MPI, "unfused", "rank 1 is on another host than rank 0"),
        (OP, SMALL, ACROSS, "unfused", "rank 1 is on another host than rank 0; estimated "),
        (OP, DECODE, ACROSS, "unfused", "rank 1 is on another host than rank 0; 16 KiB per peer"),
        ("matmul_reduce_scatter", FEW_ROWS, ACROSS, "unfused", "rank 1 is on another host than rank 0; 512 KiB per"),
    ],
)
def test_without_a_workspace_the_estimates_choose(
    capturing: list[bool], op: str, exchange: Exchange, verdict: Topology, algorithm: str, reason: str
) -> None:
    capturing.append(False)
    plan = planner.plan(op, exchange, BF16, member(verdict=verdict))
    assert plan.algorithm == algorithm and plan.reason.startswith(reason), plan
    assert plan.slot_bytes == 0 and not plan.has_workspace and (plan.num_rounds > 1) == (algorithm == "pipelined")
    plan = planner.plan(op, exchange, torch.float64, member(verdict=verdict))
    assert plan.reason == "float64 has no overlapped algorithm"


def test_no_graph_has_a_pipelined_call(capturing: list[bool]) -> None:
    capturing.append(True)
    assert planner.plan(OP, WIDE, BF16, member(verdict=ACROSS)).algorithm == "unfused"
    with fusedcomm.force_algorithm("pipelined", strict=True), pytest.raises(RuntimeError, match="nobody has captured"):
        planner.plan(OP, WIDE, BF16, member(verdict=ACROSS))


def test_a_pipelined_call_is_proved_first(capturing: list[bool]) -> None:
    capturing.append(False)
    ours = member(verdict=replace(ACROSS, prove=True))
    plan = planner.plan(OP, WIDE, BF16, ours)
    assert plan.reason.endswith("; proved at its first call") and proof.is_unproved(plan, BF16, ours, uneven=False)
    with fusedcomm.force_algorithm("pipelined"):
        assert not proof.is_unproved(planner.plan(OP, WIDE, BF16, ours), BF16, ours, uneven=False)
    ours.outcomes["all_to_all pipelined bfloat16"] = "pipelined of bfloat16 failed its proof"
    assert planner.plan(OP, WIDE, BF16, ours).reason == "pipelined of bfloat16 failed its proof"


def test_float8_runs_where_its_matmul_is_fast(capturing: list[bool]) -> None:
    """torch dequantises blocks, and kernels that add in float32 are slow."""
    capturing.append(False)
    exchange = shapes.matmul_all_to_all((8192, 4096), (4096, 4096), None, 0, 1, 8)
    kinds = [model.FLOAT8, model.FAST_FLOAT8, model.BLOCKS]
    plans = [planner.plan(f"scaled_{OP}", exchange, BF16, member(), multiplied=kind) for kind in kinds]
    assert [plan.algorithm for plan in plans] == ["chunked", "fused", "fused"]
    assert len({plan.fingerprint for plan in plans}) == 1


def test_where_one_algorithm_failed_its_proof_the_other_runs(capturing: list[bool]) -> None:
    capturing.append(False)
    ours = member(verdict=replace(ABLE, prove=True))
    assert planner.plan(OP, LARGE, BF16, ours).algorithm == "chunked"
    ours.outcomes |= {"all_to_all fused bfloat16": "", "all_to_all chunked bfloat16": "it was wrong"}
    assert planner.plan(OP, LARGE, BF16, ours).algorithm == "fused"
    ours.outcomes["all_to_all fused bfloat16"] = "it was late"
    assert planner.plan(OP, LARGE, BF16, ours).reason == "it was late"
    with fusedcomm.force_algorithm("fused", strict=True):  # without a proof, and after a failed one
        plan = planner.plan(OP, LARGE, BF16, ours)
        assert plan.reason == planner.FORCED and not proof.is_unproved(plan, BF16, ours, uneven=False)


TERABYTES = replace(ABLE, workspace_bytes=1 << 50)
REDUCED, GATHERED, BOTH = "matmul_reduce_scatter", "all_gather_matmul", "all_to_all_matmul"


def test_a_slot_has_fewer_than_2_31_elements(capturing: list[bool]) -> None:
    """A chunk that is larger runs in rounds, and a row that is larger unfused."""
    fits = MOST_SLOT_BYTES // 4 // 1024 * 1024  # elements of 2 bytes for each of 2 ranks
    whole = shapes.all_gather_matmul((fits // 1024, 1024), ((1024, 64),), 0, 2)
    more = shapes.all_gather_matmul((fits // 1024 + 1, 1024), ((1024, 64),), 0, 2)
    ours = member(verdict=TERABYTES)
    assert ours.max_slot_bytes == MOST_SLOT_BYTES < 2**32 and member().max_slot_bytes < 1 << 29
    for name in ("chunked", "fused"):
        with fusedcomm.force_algorithm(name):
            plans = [planner.plan(GATHERED, exchange, BF16, ours) for exchange in (whole, more)]
            assert [(plan.algorithm, plan.num_rounds) for plan in plans] == [(name, 1), (name, 2)]
            row = shapes.matmul_reduce_scatter((2, 8), (8, fits + 1024), "sum", 0, 2)
            assert planner.plan(REDUCED, row, BF16, ours).reason.startswith("one row for every peer takes 4294")


@pytest.mark.parametrize(
    ("what", "op", "make"),
    [
        ("K", REDUCED, lambda size: shapes.matmul_reduce_scatter((1024, size), (size, 64), "sum", 0, 2)),
        ("K", BOTH, lambda size: shapes.all_to_all_matmul((1024, size // 2), (size // 2 * 2, 64), 1, 0, 2)),
        ("N", GATHERED, lambda size: shapes.all_gather_matmul((1024, 64), ((64, 8), (64, size)), 0, 2)),
        ("the number of rows", GATHERED, lambda size: shapes.all_gather_matmul((size, 0), ((0, 8),), 0, 2)),
    ],
)
def test_what_a_slot_does_not_bound_is_counted_in_32_bits(
    what: str, op: str, make: Callable[[int], Exchange], capturing: list[bool]
) -> None:
    ours = member(verdict=replace(TERABYTES, constants=TUNED.constants))
    fits, wide = make(1 << 30), make((1 << 30) + 2)
    reason = f"{what} must be at most 1073741824 for fused, got 1073741826"
    with fusedcomm.force_algorithm("fused"):
        assert planner.plan(op, fits, BF16, ours).algorithm == "fused"
        plan = planner.plan(op, wide, BF16, ours)
        assert (plan.algorithm, plan.reason) == ("unfused", reason)
    with fusedcomm.force_algorithm("chunked"):
        assert planner.plan(op, wide, BF16, ours).algorithm == "chunked"
    assert planner.plan(op, wide, BF16, ours).algorithm != "fused"
    capturing.append(True)
    assert planner.plan(op, wide, BF16, ours).algorithm == "unfused"


@pytest.mark.parametrize("op", PROGRAMS)
@pytest.mark.parametrize("group_size, within", [(2, 1.0), (4, 1.1), (8, 1.1)])
def test_default_numbers_say_chunked_on_a_cpu_in_the_shapes_of_the_benches(
    op: str, group_size: int, within: float
) -> None:
    """On this choice the README's figures for 2 ranks rest."""
    program = PROGRAMS[op]
    few, many = (256, 512, 1024, 2048), (2048, 4096)
    forward = itertools.product((512, 2048, 2500), *((many, few) if program.gathers else (few, many)))
    each = group_size if program.cut == "rows" else 1
    k_n = itertools.product((1024, 2048, 4096), repeat=2)
    decode = [(rows * each, k, n) for k, n in k_n for rows in (1, 4, 16, 64)]
    for shape, dtype in itertools.product([*forward, *decode], ("float32", "bfloat16")):
        exchange = tune.exchange_of(op, program.divisible(MatmulSize(*shape), group_size), group_size)
        seconds = model.estimate(op, exchange, dtype, model.DEFAULTS["cpu"])
        assert seconds["chunked"] <= within * seconds["unfused"], (shape, dtype, seconds)


def test_the_matmul_does_not_change_the_wire(capturing: list[bool]) -> None:
    """By any numbers, and however many columns and K there are."""
    for verdict, device, rows in itertools.product((ABLE, SLOW_HOST, ACROSS), ("cpu", "cuda:0"), (16, 1024, 8192)):
        plans = [
            planner.plan(OP, shapes.matmul_all_to_all((rows * 4096 // n, k), (k, n), None, 0, 1, 2), BF16, ours)
            for k, n in ((1, 64), (4096, 64), (64, 4096))
            for ours in [member(device, replace(verdict, backend="gloo" if device == "cpu" else "nccl"))]
        ]
        assert len({(each.has_workspace, each.algorithm == "unfused") for each in plans}) == 1, plans
        assert len({each.slot_bytes for each in plans}) == 1


def test_few_columns_are_multiplied_once_on_a_cpu() -> None:
    """Each chunk's matmul would read x again. It was measured: 70 and 32 ms in float32, 16 and 9 ms in bfloat16."""
    narrow = shapes.matmul_all_to_all((8192, 4096), (4096, 16), None, 0, 1, 2)
    assert narrow.multiplies_once and planner.plan(OP, narrow, FP32, member("cpu")).algorithm == "chunked"


def test_a_reason_says_the_estimates_and_whose_numbers_they_are(capturing: list[bool]) -> None:
    seconds = model.estimate(OP, SMALL, "bfloat16", model.DEFAULTS["cuda"])
    times = f"estimated {seconds['fused'] * 1e6:.3g} us, unfused {seconds['unfused'] * 1e6:.3g} us"
    assert planner.plan(OP, SMALL, BF16, member()).reason == f"{times}, default numbers"
    assert planner.plan(OP, SMALL, BF16, member(verdict=TUNED)).reason == f"{times}, tuned numbers"
    on_cpu = planner.plan(OP, LARGE, BF16, member("cpu")).reason
    assert re.fullmatch(r"estimated 1\d\d ms, unfused 1\d\d ms, default numbers", on_cpu), on_cpu
    capturing.append(True)
    assert planner.plan(OP, LARGE, BF16, member()).reason.endswith(", default numbers; CUDA graph: not chunked")


def test_a_capture_never_plans_what_an_eager_call_has_not_loaded(capturing: list[bool]) -> None:
    """A call that is unfused outside of a capture loads no kernels that a capture could use."""
    for verdict, exchange in itertools.product((ABLE, TUNED), (DECODE, SMALL, LARGE)):
        capturing.append(False)
        eager = planner.plan(OP, exchange, BF16, member(verdict=verdict)).algorithm
        capturing.append(True)
        captured = planner.plan(OP, exchange, BF16, member(verdict=verdict)).algorithm
        assert captured in ("fused", "unfused")
        assert eager != "unfused" or captured == "unfused"


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


def test_a_fallback_is_logged_once(caplog: pytest.LogCaptureFixture, capturing: list[bool]) -> None:
    verdict = replace(ABLE, no_workspace="a reason of this test")
    for _ in range(3):
        planner.plan(OP, SMALL, BF16, member(verdict=verdict))
    assert [record.getMessage() for record in caplog.records] == [f"{OP} runs unfused: a reason of this test"]


class FakeNVML:
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
    three = ["a", "b", "c"], [0, 1, 2]
    assert topology._no_peer_access(1, *three) is None
    for rank, peer in ((0, 2), (2, 0)):
        reason = f"no NVLink peer access between the GPUs of ranks {rank} and {peer} (NVML status 5)"
        assert topology._no_peer_access(rank, *three) == reason
    of_one_name, of_one_gpu = (["a", "b"], [0, 0]), (["a", "a"], [0, 0])
    assert "one name (cuda:0, cuda:0): show all GPUs" in str(topology._no_peer_access(0, *of_one_name))
    assert "several ranks share one GPU" in str(topology._no_peer_access(0, *of_one_gpu))
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert topology._no_peer_access(0, *of_one_name) is topology._no_peer_access(0, *of_one_gpu) is None
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace())  # whatever NVML fails with
    assert "rank 0: NVML cannot tell" in str(topology._no_peer_access(0, *of_one_name))


def explain_meta(rank: int) -> Any:
    x, w = torch.empty(4, 8, device="meta"), torch.empty(8, 6, device="meta")
    with pytest.raises(ValueError, match=r"op must be one of matmul_all_to_all, .*, got 'matmul'"):
        fusedcomm.explain("matmul", x, w, 0, 1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        plan = fusedcomm.explain(OP, x, w, 0, 1, dist.group.WORLD)
    return plan, printed.getvalue()


def test_explain_takes_meta_tensors_and_prints_nothing(ranks: Any) -> None:
    (first, printed), second = ranks(2).run(explain_meta)
    assert ((first, printed), printed) == (second, "")
    assert repr(first) == str(first)  # what a REPL shows
    assert str(first).startswith(f"{OP}: chunked (estimated ")
    assert first.reason.endswith(", default numbers")


@pytest.mark.parametrize(("device", "key"), [("cpu", "no_fused"), ("cuda", "no_workspace")])
def test_without_triton(monkeypatch: pytest.MonkeyPatch, device: str, key: str) -> None:
    """On a GPU not even chunked runs, because its signals are kernels."""
    gpu = SimpleNamespace(uuid="0", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(triton_probe, "cannot_launch", lambda device: None)
    for installed in (True, False):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=installed: object() if found else None)
        assert topology._found(torch.device(device))[key] == (None if installed else "Triton is not installed")


def test_an_all_reduce_has_the_same_pieces_by_every_algorithm(capturing: list[bool]) -> None:
    """Whatever matmul a rank has, as that decides between `chunked` and `fused`. 32 MiB to each peer."""
    capturing.append(False)
    found = {}
    for k, name in itertools.product((1024, 4096), ("chunked", "fused", None)):
        exchange = shapes.matmul_all_reduce((4096, k), (k, 8192), "sum", 2)
        with fusedcomm.force_algorithm(name):
            plan = planner.plan("matmul_all_reduce", exchange, BF16, member(), wire=planner.GRAPH)
        found[k, name] = plan.num_rounds, plan.slot_bytes, plan.fingerprint
    assert {plan[:2] for plan in found.values()} == {(4, 1 << 24)} and len(set(found.values())) == 1, found


def test_a_plan_has_the_rounds_of_a_gather_in_pieces(capturing: list[bool]) -> None:
    """33 MiB to each peer: four pieces of 8 MiB and more, on a GPU alone, and as many rounds as the slots ask for."""
    capturing.append(False)
    parts = Splits(gather_size=8191, rank=0)
    gathered = shapes.all_to_all_matmul((2 * 4224, 4096), (8191, 4096), 1, 0, 2, parts)
    assert gathered.chunk_numel * 2 == 33 << 20
    with fusedcomm.force_algorithm("chunked"):
        assert planner.plan("all_to_all_matmul", gathered, BF16, member()).num_rounds == 4
        assert planner.plan("all_to_all_matmul", gathered, FP32, member()).num_rounds == 1
        assert planner.plan("all_to_all_matmul", gathered, BF16, member("cpu")).num_rounds == 1
    for rows, want in ((2 * 16377, (7, 2340 << 13)), (2 * 3, (3, 1 << 26))):  # cut between rows, which may be long
        k = 4096 if rows > 6 else 1 << 25
        gathered = shapes.all_to_all_matmul((rows, k // 2), (k - 1, 8), 1, 0, 2, Splits(gather_size=k - 1, rank=0))
        with fusedcomm.force_algorithm("chunked"):
            plan = planner.plan("all_to_all_matmul", gathered, BF16, member())
        assert (plan.num_rounds, plan.slot_bytes) == want
    even = shapes.all_to_all_matmul((2 * 4224, 4096), (8192, 4096), 1, 0, 2)
    for name in ("chunked", "fused"):
        with fusedcomm.force_algorithm(name):
            assert planner.plan("all_to_all_matmul", even, BF16, member()).num_rounds == 1
