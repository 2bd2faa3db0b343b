"""Calls before and in the capture of a CUDA graph, with stand-ins for a GPU: what runs, is loaded and is refused."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusedcomm
from fusedcomm.memory import captures, workspace
from fusedcomm.memory.group_member import Member
from fusedcomm.memory.topology import Topology
from fusedcomm.ops import dispatch
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.plan import fused, planner
from fusedcomm.plan.builder import Device
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.scaling import Scaled
from fusedcomm.run import calls

OP, GPU, BF16 = "matmul_all_to_all", torch.device("cuda:0"), torch.bfloat16
ABLE = Topology(no_workspace=None, no_fused=None, workspace_bytes=1 << 30, algorithm=None)
ROWS = (16384, 16386, 16388, 20000)  # estimated to run chunked; in a capture fused
FEW_ROWS = 1024  # estimated to run fused


class GpuWorkspace:
    """The part of Workspace that a call needs before an algorithm runs."""

    def __init__(self, slot_bytes: int = 1 << 30) -> None:
        self.slot_bytes = self.usable_bytes = slot_bytes
        self.captured, self.epoch, self.call_number = False, 0, 0

    def enter(self, *args: Any) -> None:
        pass

    check = forget_error = enter

    def memory_facts(self) -> Any:
        return SimpleNamespace(slot_bytes=self.slot_bytes)


class GpuTensor:
    device, dtype, is_cuda = GPU, BF16, True


X: Any = GpuTensor()


class Gpu:
    """One rank of a group of two: ``ran`` has the algorithms of the calls in their order."""

    def __init__(self) -> None:
        self.capturing, self.ran, self.ran_on = False, list[str](), list[Any]()
        self.member = Member(0, 2, "group", GPU, None, ABLE)
        self.member.workspace = GpuWorkspace()  # type: ignore[assignment]

    def prepare(self, op: str, exchange: Any, dtype: torch.dtype, *others: Any) -> tuple[Any, Member]:
        return planner.plan(op, exchange, dtype, self.member), self.member

    def call(self, num_rows: int) -> str:
        exchange = shapes.matmul_all_to_all((num_rows, 512), (512, 2048), None, 0, 1, 2)
        self.num_rows = num_rows
        operands: Any = (), {}
        spec: Any = SimpleNamespace(
            name=OP,
            exchange_of=lambda args: exchange,
            check_outs=lambda args: None,
            sent_dtype=lambda args: args.x.dtype,
            multiplied=lambda args, exchange: None,
            program="push_matmul",
            operands=lambda args: operands,
            gathers=False,
            takes_lists=False,
        )
        dispatch.run(spec, Arguments(X, [], [None], 2, "group"))
        return self.ran[-1]

    def run(self, plan: Any, memory: Any, *program: Any) -> Any:
        self.ran.append(plan.algorithm)
        if plan.has_workspace:
            plan.schedule = SimpleNamespace(can_be_captured=plan.algorithm == "fused", steps=())
            assert not (plan.algorithm == "chunked" and memory.captured), "its host would have to ask for the epoch"
            memory.captured |= self.capturing
            self.ran_on.append(memory)
        return SimpleNamespace(returned=[])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(dispatch, "prepare", found.prepare)
    monkeypatch.setattr(dispatch, "kind_of", lambda spec, args: found.num_rows)
    monkeypatch.setattr(calls, "run", found.run)
    monkeypatch.setattr(dispatch, "on_device", lambda device: nullcontext())
    yield found
    assert not captures.is_for_capture(torch.device("cpu"))


def test_batches_of_varying_length_run_what_was_planned_and_keep_nothing(gpu: Gpu) -> None:
    assert {gpu.call(num_rows) for num_rows in ROWS} == {"chunked"}
    assert len(gpu.member.loaded) == 0
    assert gpu.call(FEW_ROWS) == "fused"


def test_a_capture_runs_what_a_call_before_it_has_loaded(gpu: Gpu) -> None:
    assert gpu.call(ROWS[0]) == "chunked"
    gpu.capturing = True
    refused = "its kernels cannot be loaded while a CUDA graph is captured; call the op once with these shapes on every"
    for num_rows in (*ROWS, FEW_ROWS):
        with pytest.raises(RuntimeError, match=refused):
            gpu.call(num_rows)
    assert gpu.ran == ["chunked"] and gpu.member.num_calls == 1  # a call that was refused does not count
    gpu.capturing = False
    with fusedcomm.before_capture():
        assert gpu.call(ROWS[0]) == "fused"
    assert gpu.call(ROWS[0]) == "chunked"
    gpu.capturing = True
    assert gpu.call(ROWS[0]) == "fused"
    with pytest.raises(RuntimeError, match=refused):
        gpu.call(ROWS[1])


def test_a_planned_fused_loads_what_a_capture_needs(gpu: Gpu) -> None:
    assert gpu.call(FEW_ROWS) == "fused"
    gpu.capturing = True
    assert gpu.call(FEW_ROWS) == "fused"


def test_kernels_are_specialised_on_the_size_of_a_slot(gpu: Gpu) -> None:
    """As an int of 32 or 64 bits: a workspace that has grown since can need other ones."""
    gpu.member.workspace = GpuWorkspace(1 << 28)  # type: ignore[assignment]
    assert gpu.call(FEW_ROWS) == "fused"
    gpu.member.workspace, gpu.capturing = GpuWorkspace(1 << 30), True  # type: ignore[assignment]
    assert gpu.call(FEW_ROWS) == "fused"
    gpu.member.workspace = GpuWorkspace(1 << 31)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        gpu.call(FEW_ROWS)


def test_before_a_capture_the_plan_is_the_captures(gpu: Gpu) -> None:
    for num_rows in (16, FEW_ROWS, *ROWS):
        exchange = shapes.matmul_all_to_all((num_rows, 512), (512, 2048), None, 0, 1, 2)
        with fusedcomm.before_capture():
            before = planner.plan(OP, exchange, BF16, gpu.member)
            with fusedcomm.force_algorithm("chunked"):
                assert "would fix the slots" in planner.plan(OP, exchange, BF16, gpu.member).reason
        gpu.capturing = True
        assert before == planner.plan(OP, exchange, BF16, gpu.member)
        gpu.capturing = False


def test_it_nests_and_ends_with_an_error(gpu: Gpu) -> None:
    with pytest.raises(KeyError), fusedcomm.before_capture():
        with fusedcomm.before_capture():
            pass
        assert captures.is_for_capture(GPU) and not captures.is_for_capture(torch.device("cpu"))
        raise KeyError
    assert not captures.is_for_capture(GPU)


def test_what_is_kept_is_bounded_and_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "MOST_LOADED", 3)
    loaded = captures.LoadedCalls()
    for call in (1, 2, 3, 1, 4):
        loaded.add(call, 128)
    assert len(loaded) == 3 and [loaded.has(call, 256) for call in (1, 2, 3, 4)] == [True, False, True, True]


def made_by(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def make(ours: Member, num_bytes: int, op: str, fingerprint: int) -> Any:
        ours.workspace = GpuWorkspace(max(num_bytes, 1 << 30))  # type: ignore[assignment]
        made.append(ours.workspace)
        return ours.workspace

    monkeypatch.setattr(Member, "_make", make)
    monkeypatch.setattr(Member, "_come_together", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


def test_calls_leave_a_captured_workspace_to_the_graphs(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however often calls and captures take turns; fused calls too, as those of peers may run chunked."""
    made, first = made_by(gpu, monkeypatch), gpu.member.workspace
    with fusedcomm.before_capture():
        assert gpu.call(ROWS[0]) == "fused"
    for _ in range(3):
        gpu.capturing = True
        assert gpu.call(ROWS[0]) == "fused" and gpu.ran_on[-1] is first
        gpu.capturing = False
        assert gpu.call(FEW_ROWS) == "fused" and gpu.ran_on[-1] is made[0]
        for num_rows in ROWS:
            assert gpu.call(num_rows) == "chunked" and gpu.ran_on[-1] is made[0]
    assert gpu.member.retired == [first] and len(made) == 1


def test_a_first_capture_drops_native_plans_alone(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[Member] = []
    with fusedcomm.before_capture():
        gpu.call(ROWS[0])
    monkeypatch.setattr(Member, "_forget_prepared", lambda ours: dropped.append(ours))
    kept, gpu.capturing = dict(gpu.member.plans), True
    for _ in range(3):
        assert gpu.call(ROWS[0]) == "fused"
    assert dropped == [gpu.member] and kept == gpu.member.plans != {}


def test_a_call_that_outgrows_the_graphs_workspace_is_captured_on_the_groups(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gpu.member.workspace = GpuWorkspace(1 << 26)  # type: ignore[assignment]
    made, (small, large) = made_by(gpu, monkeypatch), (ROWS[0], 4 * ROWS[0])  # 64 MiB and 256 MiB of a slot
    for num_rows, workspaces in ((small, 0), (large, 1)):
        with fusedcomm.before_capture():
            assert gpu.call(num_rows) == "fused"
        gpu.capturing = True
        assert gpu.call(num_rows) == "fused" and gpu.ran_on[-1] is [first, *made][workspaces]
        gpu.capturing = False
        assert gpu.call(small) == "chunked" and len(made) == workspaces + 1
    assert gpu.member.retired == [first, made[0]] and gpu.member.for_graphs is made[0]


def test_a_failure_in_a_capture_leaves_the_group_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No captured round has run. The workspace stays with the graphs, as on ranks whose capture goes on."""
    segments = [torch.zeros(workspace.Workspace.num_bytes(2, 1024), dtype=torch.uint8) for _ in range(2)]
    own, other = (workspace.Workspace(rank, segments, "group") for rank in range(2))
    monkeypatch.setattr(workspace, "is_capturing", lambda device: True)
    with pytest.raises(MemoryError), own.guarded("op"):
        raise MemoryError
    assert own.captured and own.error is None
    assert not own.breakers(1) and not other.breakers(1)
    monkeypatch.setattr(workspace, "is_capturing", lambda device: False)
    with pytest.raises(MemoryError), own.guarded("op"):
        raise MemoryError
    assert own.error is not None and other.breakers(1)


@pytest.mark.parametrize("column_run", [128, 100])
def test_a_graph_holds_no_cut_blocks(column_run: int) -> None:
    w = Scaled(torch.empty(256, 256), torch.empty(2, 2), BF16)
    exchange: Any = SimpleNamespace(gathers=False, splits_columns=True, column_run=column_run)
    builder: Any = SimpleNamespace(device=Device(is_gpu=True, for_capture=True))
    with pytest.raises(RuntimeError, match="100") if column_run == 100 else nullcontext():
        assert not fused._cuts_blocks(builder, exchange, w)
    builder.device = Device(is_gpu=True)
    assert fused._cuts_blocks(builder, exchange, w) == (column_run == 100)
