"""Ctrl-C in every phase: KeyboardInterrupt comes at once, the peers hear of it in time, and a reset makes all good."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

import fusedcomm
from fusedcomm.memory import members, workspace
from tests.helpers.groups import call, check, fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import HEADS
from tests.helpers.symmetric_memory import CPU, CutStore, footprint, make, timeout

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
