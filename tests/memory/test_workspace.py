"""The protocol over real processes: rounds, growth, races with their negative controls, votes."""

import dataclasses
import itertools
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore

import fusedcomm
from fusedcomm import env
from fusedcomm.memory import group_member, members, patience, segment, topology, workspace
from fusedcomm.memory.group_member import Member
from fusedcomm.memory.topology import Topology
from fusedcomm.memory.vote import agree
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import planner
from fusedcomm.plan.geometry import shapes
from tests.helpers.groups import call, check, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.problems import HEADS, Problem, integers
from tests.helpers.symmetric_memory import native
from tests.helpers.waiting import wait_until

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
        for _ in range(3):
            check(group, small, call(group, small))
        assert len(member.prepared) > 0  # calls beside graphs run natively too
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


@pytest.mark.parametrize(("uuid", "reason"), [("gpu", "kernels wait for at most 32 ranks, got 33"), ("", None)])
def test_kernels_wait_for_as_many_ranks_as_a_warp_has_threads(uuid: str, reason: str | None) -> None:
    facts = [{"no_workspace": None, "host": "host", "uuid": uuid}] * 33
    assert topology._no_workspace(facts) == reason and topology._no_workspace(facts[1:]) is None


def test_kernels_are_launched_early_where_the_driver_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for architecture, driver, setting, expected in (
        (90, 12030, "1", True),
        (100, 13000, "1", True),
        (80, 13000, "1", False),
        (90, 12020, "1", False),
        (90, 13000, "0", False),
    ):
        monkeypatch.setattr(topology, "architecture", lambda device, found=architecture: found)
        monkeypatch.setattr(topology, "driver_version", lambda found=driver: found)
        monkeypatch.setenv("FUSEDCOMM_EARLY_LAUNCH", setting)
        assert topology.launches_early(torch.device("cuda")) == expected


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


def test_a_gpu_s_rank_says_that_it_has_no_native_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    able = Topology(no_workspace=None, no_fused=None, workspace_bytes=1 << 30, algorithm=None)
    made = [Member(0, 2, "group", torch.device(kind), HashStore(), able) for kind in ("cuda", "cpu")]
    monkeypatch.setattr(group_member, "native", None)
    for each in made:
        each.prepare_calls()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "calls run in Python, hundreds of microseconds each"
    ]


def test_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "soon"):
        monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", value)
        with pytest.raises(ValueError, match=f"FUSEDCOMM_TIMEOUT_S must be a positive number, got '{value}'"):
            env.timeout_s()
    for value in ("inf", "1e30"):
        for name in ("TIMEOUT_S", "WORKSPACE_BYTES", "PLAN_BYTES"):
            monkeypatch.setenv(f"FUSEDCOMM_{name}", value)
        assert env.timeout_s() == 1e9 < threading.TIMEOUT_MAX
        assert env.workspace_bytes() == env.plan_bytes() == 1 << 62


# words in shared memory
def word(value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int64)


def test_signal_and_load() -> None:
    t = word()
    native.signal(t.data_ptr(), 7 << 24 | 5)
    assert native.load(t.data_ptr()) == int(t) == 7 << 24 | 5
    with pytest.raises(ValueError, match="64-bit word, got 0"):
        native.load(0)
    with pytest.raises(ValueError, match="64-bit word"):
        native.signal(t.data_ptr() + 4, 1)


@pytest.mark.parametrize("timeout_s", [0, 0.002, 0.05])
def test_wait_returns_in_time(timeout_s: float) -> None:
    t, broken = word(3 << 24 | 9), torch.zeros(2, dtype=torch.int64)
    assert native.wait(t.data_ptr(), 3, broken.data_ptr(), 2, 60) == int(t)
    late: list[float] = []
    while len(late) < 5 or (min(late) >= 0.005 and len(late) < 100):  # on a busy machine few return at once
        start = time.monotonic()
        assert native.wait(t.data_ptr(), 4, broken.data_ptr(), 2, timeout_s) == int(t)
        late.append(time.monotonic() - start - timeout_s)
    assert 0 <= min(late) < 0.005


def test_wait_sees_signal_and_broken_while_python_runs() -> None:
    t, broken = word(), torch.zeros(2, dtype=torch.int64)
    threading.Timer(0.02, native.signal, (t.data_ptr(), 1 << 24)).start()
    assert native.wait(t.data_ptr(), 1, broken.data_ptr(), 2, 20) == 1 << 24
    threading.Timer(0.02, native.signal, (broken.data_ptr() + 8, 1)).start()
    start = time.monotonic()
    assert native.wait(t.data_ptr(), 2, broken.data_ptr(), 2, 20) == 1 << 24
    assert time.monotonic() - start < 10


def test_wait_can_be_interrupted() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    t = word()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            native.wait(t.data_ptr(), 1, 0, 0, 20)
    finally:
        signal.signal(signal.SIGALRM, before)


# long waits
SECONDS = r"\d+(\.\d+)?"


@on_ranks(3)
def test_a_long_wait_is_logged_once(rank: int, tmp_path: Path) -> None:
    """It names all ranks that are missing, not only the one whose turn it is."""
    looks, texts, must_stop = list[int](), list[str](), workspace.Workspace._must_stop
    waited_long = tmp_path / "rank 0 has waited for twenty looks"

    def counted(self: workspace.Workspace, epoch: int) -> bool:
        looks.append(epoch)
        if len(looks) == 20:
            waited_long.touch()
        return must_stop(self, epoch)

    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, HEADS, call(group, HEADS))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patience, "PATIENCE_S", 0.05)
            patch.setattr(workspace, "LOOK_S", 0.01)
            patch.setattr(workspace.Workspace, "_must_stop", counted)
            patch.setattr(patience.log, "warning", lambda text, *args: texts.append(text % args))
            if rank:
                wait_until(waited_long.exists)
            check(group, HEADS, call(group, HEADS, 1), 1)
        name = group.group_name
    if rank == 0:
        (text,) = texts
        where = f"in matmul_all_to_all, call 2 of group {name!r}"
        assert re.fullmatch(rf"still waiting for ranks 1, 2 \({SECONDS} s\) {re.escape(where)}", text)


def test_a_long_vote_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.2)
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "1")
    with pytest.raises(fusedcomm.PeerTimeoutError):
        agree(HashStore(), 0, 2, {}, what="a vote", names=[4, 7])
    (text,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(rf"still waiting for rank 7 \({SECONDS} s\) in a vote", text)
