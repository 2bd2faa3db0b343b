"""Kernels store and signal what tests/helpers/schedule/kernel_effects.py says: that is what checkers know of them."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.memory.segment import FINGERPRINT_BITS
from fusedcomm.plan.geometry import exchange
from fusedcomm.plan.schedule import Launch
from tests.helpers.plain_cases import NormCase
from tests.helpers.schedule.kernel_effects import EFFECTS, Group, KernelCall
from tests.helpers.schedule.random_orders import Gpus, Queued
from tests.kernels.test_token_rows import program
from tests.ops.test_moe import Case
from tests.run.test_chunked_orders import ROWS, SUM, Run, cut_in

GROUP = Group("group", (0, 1))


@pytest.fixture(autouse=True)
def two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a slot that is new, so that all stores are seen."""
    monkeypatch.setattr(exchange, "FEW_ROWS", 0)
    cut_in(2, monkeypatch)


def compared(queued: Queued, run: Callable[[], object]) -> None:
    """Run a kernel and compare what has changed in all segments."""
    workspace, epoch = queued.workspace, queued.next_epoch()
    call = KernelCall(queued.work, GROUP, epoch, lambda place: None)
    steps = list(EFFECTS[call.name](call))
    before = [segment.clone() for segment in workspace.buffers]
    run()
    for rank, (old, new) in enumerate(zip(before, workspace.buffers, strict=True)):
        regions = [each for step in steps for each in step.writes if each.memory == GROUP.segment(rank)]
        others = old != new
        for region in regions:
            is_slot = region.start >= workspace.layout.header_bytes
            assert not is_slot or (new[region.start : region.end] != old[region.start : region.end]).any()
            others[region.start : region.end] = False
        assert not others.any(), f"{call.name} stores elsewhere at rank {rank}"
    for flag in (each for step in steps for each in step.signals):
        start = workspace.layout.flag(epoch, call.rank)
        assert int(workspace.buffers[flag.dst_rank][start:][:8].view(torch.int64)) >> FINGERPRINT_BITS == epoch
    assert queued.next_epoch() == epoch + call.ends_round


def run_compared(gpus: Gpus) -> set[str]:
    launches = [each for each in gpus.queued if isinstance(each.work, Launch)]
    for each in launches:
        each.run = partial(compared, each, each.run)
    gpus.run_all(0)
    return {each.name for each in launches}


def check(problem: Any, algorithm: str) -> set[str]:
    run = Run(problem, 2, num_calls=1, writes_words=False, algorithm=algorithm, least_copied=1 << 62)
    return run_compared(run.gpus)


def check_rows() -> set[str]:
    """Each rank sends each rank two tokens, its part of the slot."""
    tokens, ids = [torch.ones(2, 1, 6) for _ in GROUP.ranks], [torch.arange(2).repeat(2) for _ in GROUP.ranks]
    scores = [torch.ones(2, 1, 2) for _ in GROUP.ranks]
    facts = {"w": torch.ones(2, 6, 6), "num_experts": 2, "capacity": 4}
    problem: Any = SimpleNamespace(case=Case(k=2, own=1), xs=tokens, ids=ids, scores=scores, **facts)
    gpus = Gpus()
    for workspace in VirtualGroup(2, 4 * (6 * 4 + 8), "cpu").workspaces:
        workspace.segment[workspace.layout.header_bytes :] = 0xFF
        program(gpus, workspace, problem, pieces=1)
    return run_compared(gpus)


def test_kernels_store_and_signal_what_is_said() -> None:
    ways = (4, "one_shot"), (4, "two_shot"), (3, "two_shot")  # the last has no whole rows
    norms = [NormCase("matmul_all_reduce_norm", (rows, 7), splits=way) for rows, way in ways]
    norms.append(NormCase("matmul_reduce_scatter_norm", (8, 7)))
    seen = [check(each, "fused") for each in (SUM, ROWS, *norms)]
    assert set().union(*seen, check(ROWS, "chunked"), check_rows()) == set(EFFECTS)


def test_an_effect_that_is_not_said_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = EFFECTS["pack_kernel"]
    monkeypatch.setitem(EFFECTS, "pack_kernel", lambda call: iter([*pack(call)][:-1]))
    with pytest.raises(AssertionError, match="pack_kernel stores elsewhere"):
        check(ROWS, "fused")
