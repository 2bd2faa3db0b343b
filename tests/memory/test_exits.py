"""A rank that has left: its peers hear why at once, in a wait or when they come, and no round before is spoiled.

Where a rank lives on, it only says that it ends; processes that end are below.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import HashStore, TCPStore

import fusedcomm
from fusedcomm.memory import departures, exits, members, workspace
from fusedcomm.memory.segment import LAST_WORDS_BYTES
from tests.faults.steps import at_step
from tests.helpers.groups import call, check, fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import HEADS
from tests.helpers.process_programs import NUM_RANKS, PROGRAMS
from tests.helpers.symmetric_memory import CPU, CutStore, footprint, make, timeout
from tests.helpers.tiers import nightly_but
from tests.helpers.waiting import wait_until

WORDS = "LookupError: no more data, after call 1"
AT_ONCE_S = 10.0  # long before the time-out, on a busy machine too


def leave(group: Any) -> None:
    """End as a rank does, but for its dump."""
    (member,) = members.members(group)
    assert member.workspace is not None
    member.workspace.leave(WORDS)
    departures.announce([(member.departures, WORDS)])


@on_ranks(3)
@pytest.mark.parametrize("waits", [False, True], ids=["before-they-come", "while-they-wait"])
def test_peers_hear_why_a_rank_has_left(rank: int, waits: bool, tmp_path: Path) -> None:
    waiting, left = tmp_path / "rank 0 waits", tmp_path / "rank 1 has left"
    must_stop = workspace.Workspace._must_stop

    def must_stop_seen(self: workspace.Workspace, epoch: int) -> bool:
        waiting.touch()
        return must_stop(self, epoch)

    with (
        fresh_group(TIMEOUT_S="60") as group,
        fusedcomm.force_algorithm("chunked", strict=True),
        pytest.MonkeyPatch.context() as patch,
    ):
        check(group, HEADS, call(group, HEADS))
        if rank == 0:
            patch.setattr(workspace, "LOOK_S", 0.05)
            patch.setattr(workspace.Workspace, "_must_stop", must_stop_seen)
        if rank == 1:
            wait_until(lambda: waiting.exists() or not waits)
            leave(group)
            left.touch()
        if rank == 2 or not waits:  # rank 0 waits for rank 2 too, which is not to blame
            wait_until(left.exists)
        if rank != 1:
            begun = time.monotonic()
            for _ in range(2):
                with pytest.raises(fusedcomm.PeerTimeoutError, match=f"round 2: rank 1 has left: {WORDS} ") as caught:
                    call(group, HEADS)
                assert (caught.value.peers, caught.value.epoch) == ([1], 2)
                assert "TIMEOUT_S" not in caught.value.next_step
            with pytest.raises(fusedcomm.PeerTimeoutError, match=f"close: .*: rank 1 has left: {WORDS}\n") as caught:
                fusedcomm.close(group)
            assert caught.value.peers == [1] and "TIMEOUT_S" not in caught.value.next_step
            assert time.monotonic() - begun < AT_ONCE_S
        dist.barrier(group)
        if rank == 1:  # it is there after all: its last word would end a reset that it is late for
            (gone,) = (member.departures for member in members.members(group))
            gone._store.delete_key(gone._ids[rank])
        dist.barrier(group)
        fusedcomm.reset(group)
        check(group, HEADS, call(group, HEADS, 1), 1)


@on_ranks(2)
def test_a_rank_that_ends_spoils_no_round_before(rank: int) -> None:
    """Rank 0 has yet to read what rank 1 has sent, which has completed the round and ends."""

    def late(go_on: Callable[[], Any]) -> Any:
        dist.barrier(group)  # behind the end of rank 1
        return go_on()

    with fresh_group(TIMEOUT_S="60") as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, HEADS, call(group, HEADS))
        with at_step("chunked", "read", late) if rank == 0 else nullcontext():
            check(group, HEADS, call(group, HEADS, 1), 1)
        if rank == 1:
            leave(group)
            dist.barrier(group)
        else:
            with pytest.raises(fusedcomm.PeerTimeoutError, match="rank 1 has left"):
                call(group, HEADS)


@on_ranks(2)
@pytest.mark.parametrize("error", [LookupError("no more data"), None], ids=["by-an-exception", "for-good"])
def test_a_rank_that_destroys_its_group_says_why(rank: int, error: Exception | None) -> None:
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as patch, fusedcomm.force_algorithm("chunked", strict=True):
        patch.setenv("FUSEDCOMM_TIMEOUT_S", "60")
        check(group, HEADS, call(group, HEADS))
        if rank == 1:
            with contextlib.suppress(LookupError):
                try:
                    if error is not None:
                        raise error
                finally:
                    dist.destroy_process_group(group)
                    del group
            return
        words = WORDS if error else "its group was destroyed, after call 1"
        failing = [call, lambda *_: fusedcomm.close(group)] if error else [call]
        for each in failing:
            with pytest.raises(fusedcomm.PeerTimeoutError, match=f"rank 1 has left: {words}") as caught:
                each(group, HEADS)
            assert caught.value.peers == [1]
    dist.destroy_process_group(group)


@on_ranks(2)
def test_a_process_that_is_gone_is_found(rank: int) -> None:
    with fresh_group(TIMEOUT_S="60") as group:
        check(group, HEADS, call(group, HEADS))
        if rank == 0:
            found = members.members(group)[0].departures
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(departures, "_started", lambda pid: None)
                begun = time.monotonic()
                with pytest.raises(fusedcomm.PeerTimeoutError, match=f"rank 1 has left: {departures.KILLED}") as caught:
                    call(group, HEADS)
            assert caught.value.peers == [1] and time.monotonic() - begun < AT_ONCE_S
            assert found is not None and not found.is_gone(1)
        dist.barrier(group)


@on_ranks(3)
def test_whoever_comes_later_blames_the_process_that_is_gone(rank: int) -> None:
    """Rank 2 comes when rank 0 has found rank 1 gone, and has given up."""
    with fresh_group(TIMEOUT_S="60") as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, HEADS, call(group, HEADS))
        if rank == 2:
            dist.barrier(group)
        if rank != 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(departures.Departures, "is_gone", lambda self, peer: rank == 0 and peer == 1)
                with pytest.raises(fusedcomm.PeerTimeoutError, match=f"rank 1 has left: {departures.KILLED}") as caught:
                    call(group, HEADS)
            assert caught.value.peers == [1]
        if rank != 2:
            dist.barrier(group)
        dist.barrier(group)


def test_a_killed_process_is_gone_before_its_parent_has_seen_it() -> None:
    child = subprocess.Popen(["sleep", "60"])
    lives = [{"life": name, "process": departures._started(child.pid), "host": "here"} for name in "ab"]
    lives.append(lives[1] | {"host": "another"})
    lives.append(lives[1] | {"process": f"{child.pid} 1"})  # an earlier process of that id, as if seen from elsewhere
    found = departures.Departures(HashStore(), 0, lives)
    assert not any(found.is_gone(rank) for rank in range(4))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert [found.is_gone(rank) for rank in range(4)] == [True, True, False, False]
    found.announce(WORDS)
    assert found.last_words(range(4)) == {0: WORDS, 1: departures.KILLED}
    child.wait()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LookupError("a\n  b"), "LookupError: a b, after call 12"),
        (None, "it was over, after call 12"),
        (ValueError("é" * 300), f"ValueError: {'é' * 114}, after call 12"),
    ],
    ids=["exception", "none", "long"],
)
def test_last_words_fit_into_their_place(error: Exception | None, words: str) -> None:
    said = departures.farewell(error, "it was over", 12)
    assert said == words and len(said.encode()) <= LAST_WORDS_BYTES


@pytest.mark.parametrize(("error", "waits"), [(None, True), (SystemExit(0), True), (KeyError(), False)])
def test_a_rank_on_a_gpu_ends_after_its_pushes(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, waits: bool
) -> None:
    """CUDA drops what a process that ends has launched."""
    gpu, did = torch.device("cuda", 1), list[Any]()
    monkeypatch.setattr(exits, "_left_in", 0)
    monkeypatch.setattr(exits.members, "all_members", lambda: [])  # the group is destroyed
    monkeypatch.setattr(exits.group_member, "gpus", {gpu})
    monkeypatch.setattr(exits.departures, "leaving_by", lambda: error)
    monkeypatch.setattr(exits.departures, "announce", lambda left: did.append("told"))
    monkeypatch.setattr(torch.cuda, "synchronize", did.append)
    exits._leave()
    assert did == ["told", *([gpu] if waits else [])]


# fresh processes: import, fork and interpreter exit in any order
ROOT = Path(__file__).parents[2]
RUN_S = 100  # bound of all ranks: long before pytest's own limit, which would leave them running
CRASHES = ("Fatal", "terminate called", "Segmentation", "core dumped")


def run(name: str) -> list[tuple[int, str, str]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "FUSEDCOMM_TIMEOUT_S": "30"}
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.helpers.process_programs", name]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(store.port)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    deadline = time.monotonic() + RUN_S
    try:
        ended = [process.communicate(timeout=max(0.0, deadline - time.monotonic())) for process in started]
        return [(process.returncode, *texts) for process, texts in zip(started, ended, strict=True)]
    finally:
        for process in started:
            process.kill()
            process.wait()


def crashed(code: int, errors: str) -> bool:
    return code < 0 or any(word in errors for word in CRASHES)


@pytest.mark.thorough
@pytest.mark.parametrize("name", nightly_but(["left_open", "raises", "forks"], PROGRAMS))
def test_ranks_end_without_a_crash(name: str) -> None:
    ended = run(name)
    for rank, (code, output, errors) in enumerate(ended):
        assert not crashed(code, errors), errors
        if rank == 0 and name == "raises":
            assert code == 1 and "LookupError: on purpose" in errors
        else:
            later = "waited\n" * (name == "waits_at_the_end" or (name == "thread_waits" and rank == 0))
            assert (code, output) == (0, f"done\n{later}"), errors


def test_a_crash_is_seen() -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", "import ctypes; ctypes.string_at(0)"]
    done = subprocess.run(command, capture_output=True, timeout=RUN_S)
    assert done.returncode == -signal.SIGSEGV
    assert crashed(0, done.stderr.decode())


# Ctrl-C in every phase: KeyboardInterrupt comes at once, the peers hear of it in time, and a reset makes all good.
AFTER_S = 0.2
WITHIN_S = 5.0  # less than a second where nothing else runs


@contextmanager
def interrupted(within_s: float = WITHIN_S) -> Iterator[None]:
    """SIGINT comes after a moment, and KeyboardInterrupt leaves the block soon after it."""
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(AFTER_S, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
        took = time.monotonic() - start
        assert AFTER_S <= took < AFTER_S + within_s, took
    finally:
        timer.join()
        signal.signal(signal.SIGINT, ignored)


def slow(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait_first(*args: Any) -> Any:
        time.sleep(10 * AFTER_S if dist.get_rank() else 2 * AFTER_S)
        return original(*args)

    return wait_first


@on_ranks(2)
@pytest.mark.parametrize("phase", ["vote", "rendezvous", "copy-out"])
def test_ctrl_c(rank: int, phase: str) -> None:
    before = footprint()
    with fresh_group(TIMEOUT_S="1") as group, fusedcomm.force_algorithm("chunked", strict=True):
        if phase != "vote":
            members.member(group.group_name, CPU)
        if phase == "copy-out":
            check(group, HEADS, call(group, HEADS))
        interrupt(rank, phase, group)
        dist.barrier(group)
        if phase != "vote":
            with pytest.raises(fusedcomm.PeerError, match=r"fusedcomm\.reset") as caught:
                call(group, HEADS)
            assert caught.value.peers == [1]
            assert rank == 0 or "left by KeyboardInterrupt" in str(caught.value)
            del caught
        dist.barrier(group)
        fusedcomm.reset(group)
        for seed in range(3):
            check(group, HEADS, call(group, HEADS, seed), seed)
        fusedcomm.close(group)
        assert footprint() == before


def interrupt(rank: int, phase: str, group: Any) -> None:
    """Rank 1 is interrupted; rank 0 comes at the same time where that is how rank 1 comes to this phase."""
    with pytest.MonkeyPatch.context() as patch:
        if phase == "rendezvous" and rank == 0:
            patch.setattr(members.Member, "_rendezvous", slow(members.Member._rendezvous))
        if phase == "copy-out" and rank == 1:
            patch.setattr(workspace.Workspace, "end_round", slow(workspace.Workspace.end_round))
        dist.barrier(group)
        if rank == 1:
            with interrupted():
                call(group, HEADS)
        if phase == "vote":
            dist.barrier(group)
        if rank == 0:
            try:
                call(group, HEADS)
                assert phase == "copy-out"  # its data had come
            except fusedcomm.PeerError as error:
                assert error.peers == [1]


@on_ranks(2)
def test_ctrl_c_in_a_barrier_of_a_handle(rank: int) -> None:
    tensor, handle = make(4)
    dist.barrier()
    if rank == 1:
        with interrupted():
            handle.barrier()
        with interrupted():
            handle.wait_signal(0, 0)
    dist.barrier()
    for _ in range(3):
        tensor.fill_(rank)
        handle.barrier(timeout_ms=5000)
        assert int(handle.get_buffer(1 - rank, (1,), tensor.dtype)) == 1 - rank
        handle.barrier(timeout_ms=5000)


def test_ctrl_c_while_the_store_is_cut_off() -> None:
    """The rendezvous has at most the time that it gives the store to answer, to take back what it has posted."""
    store, name = CutStore(5), "test/interrupted"
    _SymmetricMemory.set_group_info(name, 0, 2, store)
    tensor = symm_mem.empty(4, device=CPU)
    try:
        with timeout(60), interrupted(WITHIN_S + 10):
            _SymmetricMemory.rendezvous(tensor, name)
    finally:
        store.back.set()  # for the threads that are left in it
