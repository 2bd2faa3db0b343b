"""The protocol over real processes: rounds, growth, races with their negative controls, votes."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import env
from fusedcomm.memory import members, segment, topology
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import planner
from fusedcomm.plan.geometry import shapes
from tests.helpers.groups import call, check, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.problems import HEADS, Problem, integers

# rounds and growth


@on_ranks(3)
def test_growth(rank: int) -> None:
    """The calls are small, large, small: the workspace grows between them and nothing is lost."""
    small, large = Problem("small", (6, 8), 4, 0, 1), Problem("large", (600, 8), 512, 0, 1)
    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        sizes = []
        for seed, problem in enumerate([small, small, large, small, large]):
            check(group, problem, call(group, problem, seed), seed)
            sizes.append(member_of(group).workspace.slot_bytes)
        assert sizes[0] == sizes[1] < sizes[2] == sizes[3] == sizes[4]


@on_ranks(2)
def test_a_row_that_fits_no_slot_runs_unfused_with_the_reason(rank: int) -> None:
    problem = Problem("huge-row", (3, 2), 4096, 0, 1)
    with fresh_group(WORKSPACE_BYTES="8192") as group:
        check(group, problem, call(group, problem))
        args = (*integers(problem, rank, dist.get_world_size())[:2], 0, 1, group)
        plan = fusedcomm.explain("matmul_all_to_all", *args)
        assert plan.algorithm == "unfused"
        assert "one row for every peer takes 32768 bytes" in plan.reason
        with (
            fusedcomm.force_algorithm("chunked", strict=True),
            pytest.raises(RuntimeError, match="cannot run as chunked"),
        ):
            call(group, problem)


@on_ranks(2)
def test_retired_segments_are_kept_and_watched(rank: int) -> None:
    """A segment that a CUDA graph may replay on outlives growth, and what goes wrong on it is still reported."""
    small, large = Problem("small", (6, 8), 4, 0, 1), Problem("large", (6000, 8), 512, 0, 1)
    with fresh_group() as group:
        check(group, small, call(group, small))
        member = member_of(group)
        first = member.workspace
        assert first is not None
        first.captured = True
        check(group, large, call(group, large))
        assert member.retired == [first]
        assert member.workspace is not first
        dist.barrier(group)
        if rank == 0:  # as a kernel of a replay does
            first.record.fill(segment.MISMATCHED, 9, rank, 1, [0, 0], [1])  # a call alone would time out
            for check_it in (lambda: fusedcomm.synchronize(group), lambda: call(group, small)):
                with pytest.raises(fusedcomm.PeerMismatchError, match="round 9") as caught:
                    check_it()
                assert caught.value.peers == [1]
        dist.barrier(group)
        fusedcomm.close(group)
        assert member.retired == []
        check(group, small, call(group, small, 1), 1)


# races


@on_ranks(2)
def test_many_calls_with_a_late_rank_are_exact(rank: int) -> None:
    """Calls back to back with fresh data. One rank is randomly late with its reads, while the other goes on."""
    problem, delays, wait = NAMED["rows-gathered"], random.Random(7), Workspace.wait

    def late_wait(self: Workspace, *args: Any) -> None:
        wait(self, *args)
        if rank == 1 and delays.random() < 0.2:
            time.sleep(delays.uniform(0, 0.01))

    with (
        pytest.MonkeyPatch.context() as patch,
        fresh_group() as group,
        fusedcomm.force_algorithm("chunked", strict=True),
    ):
        patch.setattr(members.Member, "prepare_calls", lambda self: None)
        patch.setattr(Workspace, "wait", late_wait)
        for seed in range(200):
            check(group, problem, call(group, problem, seed), seed)


# votes


@on_ranks(4)
def test_ranks_on_several_hosts_fall_back_together(rank: int) -> None:
    problem = NAMED["packed-qkv"]
    with fresh_group(HOST_ID=f"host {rank // 2}") as group:
        check(group, problem, call(group, problem))
        args = (*integers(problem, rank, 4)[:2], problem.gather_dim, problem.scatter_dim, group)
        plan = fusedcomm.explain("matmul_all_to_all", *args, out_shape=problem.sizes(4)[2])
        assert plan.algorithm == "unfused"
        assert plan.reason.startswith("rank 2 is on another host than rank 0; estimated ")
        assert member_of(group).workspace is None


@on_ranks(2)
def test_settings_that_differ_by_rank(rank: int) -> None:
    """If settings differ by rank, the smallest cap holds for all, and two algorithms are an error on all."""
    problem = Problem("rows", (64, 16), 32, 0, 1)
    with fresh_group(WORKSPACE_BYTES=str(20000 + 10000 * rank)) as group:
        check(group, problem, call(group, problem))
        assert member_of(group).topology.workspace_bytes == 20000
    message = "FUSEDCOMM_ALGORITHM must be the same on all ranks"
    with fresh_group(ALGORITHM="chunked" if rank else "unfused") as group, pytest.raises(ValueError, match=message):
        call(group, problem)
    with fresh_group(ALGORITHM="unfused") as group:
        check(group, problem, call(group, problem))
        assert member_of(group).workspace is None


def test_ranks_on_one_gpu_leave_room_for_each_other_s_sends() -> None:
    """All ranks but one may wait for what that one has to send."""
    header = [torch.zeros(1 << 16, dtype=torch.uint8)]
    for num_sms, num_ranks in itertools.product((108, 132), (1, 2, 4, 8)):
        ours = Workspace(0, header, "group")
        ours.num_sms = num_sms
        ours.share_gpu(num_ranks)
        device = ours.device_facts()
        for kind in ("gather", "copy-out"):
            assert (num_ranks - 1) * device.num_programs(kind) < num_sms


@on_ranks(2)
def test_ranks_that_share_a_gpu_share_its_multiprocessors(rank: int) -> None:
    assert topology._ranks_per_gpu(["a", "b", "a"]) == 2
    assert topology._ranks_per_gpu(["", ""]) == 1  # CPUs
    with fresh_group() as group, mock.patch.object(topology, "_ranks_per_gpu", lambda uuids: 2):
        call(group, HEADS)
        held = member_of(group).workspace
        assert held is not None
        assert held.num_sms == topology.num_sms(held.device) // 2


@on_ranks(2)
def test_ranks_with_other_tf32_settings_plan_alike(rank: int) -> None:
    """The estimates of float32 on GPUs depend on the setting, and a rank that runs unfused can meet no other."""
    op, exchange = "matmul_all_to_all", shapes.matmul_all_to_all((1024, 512), (512, 1024), None, 0, 1, 2)
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32" if rank == 0 else "ieee"
    try:
        with fresh_group() as group, mock.patch("torch.cuda.is_current_stream_capturing", lambda: False):
            call(group, HEADS)
            ours = dataclasses.replace(member_of(group), device=torch.device("cuda", 0))
            plans: list[Any] = [None, None]
            dist.all_gather_object(plans, planner.plan(op, exchange, torch.float32, ours), group)
            with_tf32 = dataclasses.replace(ours, topology=dataclasses.replace(ours.topology, tf32=True))
            assert plans[0] == plans[1] != planner.plan(op, exchange, torch.float32, with_tf32)
    finally:
        matmul.fp32_precision = before


def test_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "soon"):
        monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", value)
        with pytest.raises(ValueError, match=f"FUSEDCOMM_TIMEOUT_S must be a positive number, got '{value}'"):
            env.timeout_s()
