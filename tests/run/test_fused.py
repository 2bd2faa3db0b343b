"""Who sends what a gather of `fused` takes: copy engines, or a kernel."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusedcomm
from fusedcomm.memory import stream_writes, topology
from fusedcomm.ops.table import OPS
from fusedcomm.plan import fused
from fusedcomm.plan.builder import Device, build, layout_of
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.padded_rows import padded
from fusedcomm.plan.schedule import Base, Copy, Launch, Multiply, Stream
from fusedcomm.testing.virtual import VirtualGroup
from tests.helpers import norm_cases
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


def launches_of(program: Any, exchange: Any, device: Device, *operands: Any, **facts: Any) -> list[Launch]:
    made = build(program, exchange, memory_of(0, 2, 1 << 27), device, operands, **facts)
    return [step.work for step in made.steps if isinstance(step.work, Launch)]


@pytest.mark.parametrize("case", [norm_cases.ONE_SHOT, norm_cases.TWO_SHOT], ids=str)
def test_a_graph_holds_a_norm(case: norm_cases.NormCase) -> None:
    """Few rows in a matmul and two launches, however large; in others copies would be of fixed slots."""
    made = schedule(case, memory_of(0, 2, 1 << 27), SM_90._replace(for_capture=True, least_copied=4096), "fused")
    assert made.can_be_captured
    if case is norm_cases.ONE_SHOT:
        assert made.counts() == {"Multiply": 1, "Launch": 2, "EndRound": 1}
    eager = schedule(case, memory_of(0, 2, 1 << 27), SM_90._replace(least_copied=4096), "fused")
    assert not eager.can_be_captured


@pytest.mark.parametrize("for_capture", [True, False])
@pytest.mark.parametrize("case", IN_ROUNDS, ids=str)
def test_a_plain_op_multiplies_nothing(case: Case, for_capture: bool) -> None:
    """Copy engines send long runs; in a graph, and for short ones, a kernel does."""
    spec, args = OPS[case.op], case.arguments(0, 2, torch.bfloat16)
    device = SM_90._replace(for_capture=for_capture, least_copied=4096)
    (x, *others), facts = spec.operands(args)
    exchange = spec.exchange_of(args)
    program = partial(padded, fused.push_reduce_gather) if case.op == "all_reduce" else getattr(fused, spec.program)
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
    found = launches_of(fused.gather_matmul, exchange, device, x, [w], [None], return_gathered=True)
    kernels = [launch.kernel.partition(".")[2] for launch in found]
    in_front = kernels[kernels.index("unpack_kernel") - 1]
    assert in_front == ("gather_matmul_kernel" if num_columns else "finish_kernel")
