"""Who sends what a gather of `fused` takes: copy engines, or a kernel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusedcomm
from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.memory import stream_writes, topology
from fusedcomm.ops import dispatch, table
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.table import OPS
from fusedcomm.plan import fused
from fusedcomm.plan.builder import Device, build, layout_of
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.planner import Plan
from fusedcomm.plan.schedule import Base, Copy, Launch, Multiply, Stream
from fusedcomm.run import calls, python_executor
from tests.helpers import plain_cases
from tests.helpers.plain_cases import IN_ROUNDS, Case
from tests.helpers.schedule.programs import GPU as SM_90
from tests.helpers.schedule.programs import memory_of, schedule

MIB = 1 << 20


GPU = Device(is_gpu=True, writes_by_stream=True, least_copied=MIB)


@pytest.mark.parametrize(
    ("device", "run_bytes", "sends"),
    [
        (GPU, MIB, True),
        (GPU, MIB - 2, False),  # copies of short runs take SMs
        (GPU._replace(is_gpu=False), MIB, False),
        (GPU._replace(for_capture=True), MIB, False),  # a graph would fix the slots, and move the epoch
        (GPU._replace(shares_gpu=True), MIB, False),  # copies within a GPU take SMs
        (GPU._replace(writes_by_stream=False), MIB, False),  # kernels that signal take SMs
        (GPU._replace(least_copied=0), 2, True),  # a proof
    ],
    ids=str,
)
def test_copy_engines_send_only_what_takes_no_sms(device: Device, run_bytes: int, sends: bool) -> None:
    exchange: Any = SimpleNamespace(sent_run=run_bytes // 2)
    assert fused.copy_engines_send(exchange, device, 2) == sends


@pytest.mark.parametrize(
    ("captured", "least_copied", "for_capture"),
    [(True, MIB, True), (False, MIB, True), (False, 0, False), (True, 0, True)],
)
def test_a_workspace_knows_what_is_for_a_capture(
    captured: bool, least_copied: int, for_capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside `before_capture` every call is, but for a proof, and a workspace of graphs always."""
    (found,) = VirtualGroup(1, 128, "cpu").workspaces
    found.device, found.captured, found.least_copied = torch.device("cuda"), captured, least_copied
    for name in ("architecture", "triton_version"):
        monkeypatch.setattr(topology, name, lambda *args: 0)
    monkeypatch.setattr(stream_writes, "available", lambda device: True)
    with fusedcomm.before_capture():
        assert found.device_facts().for_capture == for_capture


@pytest.mark.parametrize("case", [plain_cases.ONE_SHOT, plain_cases.TWO_SHOT, plain_cases.FEW_SCATTERED], ids=str)
def test_a_graph_holds_a_norm(case: plain_cases.NormCase) -> None:
    """Few rows in a matmul and two launches; in others copies would be of fixed slots."""
    made = schedule(case, memory_of(0, 2, 1 << 27), SM_90._replace(for_capture=True, least_copied=4096), "fused")
    assert made.can_be_captured
    counts = {"Launch": 2, "EndRound": 1, "Multiply": 1}
    assert made.counts() == ({"Launch": 4, "EndRound": 2} if case is plain_cases.TWO_SHOT else counts)
    eager = schedule(case, memory_of(0, 2, 1 << 27), SM_90._replace(least_copied=4096), "fused")
    assert eager.counts() == made.counts() if case.scatters else not eager.can_be_captured


@pytest.mark.parametrize("for_capture", [True, False])
@pytest.mark.parametrize("case", IN_ROUNDS, ids=str)
def test_a_plain_op_multiplies_nothing(case: Case, for_capture: bool) -> None:
    """Copy engines send long runs; in a graph, and for short ones, a kernel does."""
    spec, args = OPS[case.op], case.arguments(0, 2, torch.bfloat16)
    device = SM_90._replace(for_capture=for_capture, least_copied=4096)
    (x, *others), facts = spec.operands(args)
    exchange = spec.exchange_of(args)
    program = calls.program_of("fused", spec.program)
    made = build(program, exchange, memory_of(0, 2, 1 << 27), device, [layout_of(x), *others], **facts)
    kernels = [step.work.kernel.partition(".")[2] for step in made.steps if isinstance(step.work, Launch)]
    packs = for_capture or exchange.sent_run * 2 < 4096
    assert ("pack_kernel" in kernels) == packs and not any("matmul" in kernel for kernel in kernels)
    assert not any(isinstance(step.work, Multiply) for step in made.steps)
    sent = {step.work.source.base for step in made.steps if isinstance(step.work, Copy) and step.stream == Stream.SENDS}
    assert packs or Base.INPUT in sent  # no other memory between


@pytest.mark.parametrize("num_columns", [0, 64])
def test_the_gathered_x_is_waited_for_where_no_kernel_gathers(num_columns: int) -> None:
    """Without columns nothing in front of its copy-out has waited."""
    x, w = (
        layout_of(torch.empty(*shape, dtype=torch.bfloat16, device="meta"))
        for shape in ((2048, 4096), (4096, num_columns))
    )
    exchange = shapes.all_gather_matmul((2048, 4096), [(4096, num_columns)], 0, 2)
    device = SM_90._replace(least_copied=1 << 62)
    operands, memory = (x, [w], [None]), memory_of(0, 2, 1 << 27)
    made = build(fused.gather_matmul, exchange, memory, device, operands, return_gathered=True)
    kernels = [step.work.kernel.partition(".")[2] for step in made.steps if isinstance(step.work, Launch)]
    in_front = kernels[kernels.index("unpack_kernel") - 1]
    assert in_front == ("gather_matmul_kernel" if num_columns else "finish_kernel")


# Launches of a step, and which calls have one plan and one schedule.
class Kernel:
    """Notes what it was launched with, by itself or as what it has compiled."""

    def __init__(self, compiles: Any) -> None:
        self.compiles, self.launched = compiles, list[Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: int) -> Any:
            self.launched.append((grid, args, options))
            return {True: Compiled(self), False: None, "future": object()}[self.compiles]

        return launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.kernel.launched.append((grid, args))


@pytest.mark.parametrize("compiles", [True, False, "future"])  # a future: Triton compiles on a thread
def test_the_second_launch_takes_what_was_compiled(compiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, (workspace,) = Kernel(compiles), VirtualGroup(1, 128, "cpu").workspaces
    monkeypatch.setattr(python_executor, "kernel", lambda name: kernel)
    work = Launch("module.kernel", 5, (7,), (("num_warps", 4),))
    for _ in range(2):
        python_executor.launch(work, workspace, 1, lambda place: torch.zeros(1))
    second = ((5, 1, 1), (7,)) if compiles is True else ((5,), (7,), {"num_warps": 4})
    assert kernel.launched == [((5,), (7,), {"num_warps": 4}), second]
    assert len(workspace.kernels) == (compiles is True)


def test_kernels_of_a_workspace_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_executor, "_MOST_KEPT", 4)
    monkeypatch.setattr(python_executor, "kernel", lambda name: Kernel(True))
    (workspace,) = VirtualGroup(1, 128, "cpu").workspaces
    for _ in range(9):
        python_executor.launch(Launch("module.kernel", 1, (), ()), workspace, 1, lambda place: torch.zeros(1))
    assert 0 < len(workspace.kernels) <= 4


def test_a_plan_has_another_schedule_for_another_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, x, w = VirtualGroup(2, 1 << 12, "cpu").workspaces[0], torch.zeros(8, 8), torch.zeros(8, 4)
    plan = Plan("op", "fused", "test", exchange=shapes.matmul_all_to_all(x.shape, w.shape, None, 0, 1, 2))
    made = [calls.schedule_of(plan, workspace, "push_matmul", (x, w, None, None), {}) for _ in range(2)]
    for device in (Device(num_sms=2), Device(allow_tf32=True), Device(architecture=90)):
        monkeypatch.setattr(workspace, "device_facts", lambda device=device: device)
        made.append(calls.schedule_of(plan, workspace, "push_matmul", (x, w, None, None), {}))
    assert len({id(each) for each in made}) == 4 and made[0] is made[1] and made[-1] is plan.schedule


def test_calls_that_differ_are_of_other_kinds() -> None:
    x, w = torch.zeros(8, 8), torch.zeros(8, 4)
    behind, spec = torch.zeros(65)[1:].view(8, 8), table.MATMUL_ALL_TO_ALL
    assert behind.data_ptr() % 16
    args = Arguments(x, [w], [None], 2, "group", gather_dim=0, scatter_dim=1)
    kinds = [
        dispatch.kind_of(spec, each)
        for each in (
            args,
            *(args._replace(x=t) for t in (torch.ones(8, 8), behind, x.mT, x.bfloat16(), x[:6])),
            *(args._replace(gather_dim=1), args._replace(out_shape=[2, 2]), args._replace(biases=[torch.zeros(4)])),
        )
    ]
    assert kinds[0] == kinds[1] and len({*kinds}) == len(kinds) - 1
