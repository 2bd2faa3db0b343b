"""Rendezvous of CPU symmetric memory: reused names, missing and killed ranks, retries, a store that is cut off."""

import contextlib
import datetime
import fcntl
import importlib
import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

from tests.helpers.on_ranks import on_ranks
from tests.helpers.symmetric_memory import CPU, MISSING_S, CutStore, error_of, make, rendezvous, timeout


@on_ranks(3)
def test_same_name_other_members(rank: int) -> None:
    """Two groups of one name, one after the other, on one tensor. The backend is fake: keys of gloo would be stale."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    t = symm_mem.empty(2, dtype=torch.int64, device=CPU)
    names = set()
    first_count = dist.distributed_c10d._world.group_count
    for members in ([0, 1], [0, 2]):
        dist.barrier()
        dist.distributed_c10d._world.group_count = first_count
        group = dist.new_group(members, backend="fake")
        if rank in members:
            names.add(group.group_name)
            handle = rendezvous(t, group)
            assert rendezvous(t, group).buffer_ptrs == handle.buffer_ptrs
            t.fill_(rank)
            handle.barrier()
            peer = 1 - handle.rank
            assert int(handle.get_buffer(peer, (1,), t.dtype)) == members[peer]
            handle.barrier()
            dist.destroy_process_group(group)
        del group
    dist.distributed_c10d._world.group_count = first_count + 1
    dist.barrier()
    assert len(names) == 1


# Rendezvous that fail
def check_peers(t: torch.Tensor, handle: Any) -> None:
    t.fill_(handle.rank)
    handle.barrier()
    peers = range(handle.world_size)
    assert [int(handle.get_buffer(peer, (1,), t.dtype)) for peer in peers] == list(peers)
    handle.barrier()


@on_ranks(3)
def test_sizes_that_differ(rank: int) -> None:
    error = error_of(lambda: make(8 * (rank + 1)))
    must = "size in bytes of the allocation must be equal on all ranks, got 64 on rank 0 and 128 on rank 1"
    assert error.split(": ", 2)[2].startswith(must)
    check_peers(*make(8))


@on_ranks(2)
@pytest.mark.parametrize("ids", ["ab", "aa"])
def test_hosts_are_told_apart_by_their_ids(rank: int, ids: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDCOMM_HOST_ID", ids[rank])
        error = error_of(lambda: make(8))
    must = "host (hash of FUSEDCOMM_HOST_ID or of the boot id) must be equal on all ranks, got "
    assert must in error if ids == "ab" else error == "no error"


@on_ranks(2)
def test_the_time_out_of_the_store_is_no_bound(rank: int) -> None:
    """The default is that of all waits, and the one of gloo's store is half an hour."""
    store: Any = dist.distributed_c10d._get_default_store()
    before = store.timeout
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FUSEDCOMM_TIMEOUT_S", raising=False)
        dist.barrier()
        store.set_timeout(datetime.timedelta(seconds=MISSING_S / 2))
        try:
            time.sleep(rank * MISSING_S)
            assert len(make(8)[1].buffer_ptrs) == 2
        finally:
            store.set_timeout(before)


@on_ranks(3)
def test_missing_rank_is_named_and_retry_works(rank: int) -> None:
    t = symm_mem.empty(8, dtype=torch.int64, device=CPU)
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 2:
        store.wait([f"test/missing/{peer}" for peer in range(2)])
    else:
        with timeout(MISSING_S):
            start = time.monotonic()
            error = error_of(lambda: rendezvous(t))
            assert time.monotonic() - start < MISSING_S + 20
        assert error.startswith("DistStoreError: ")
        assert error.endswith(f"in group '0' on rank {rank}: rank 2 did not come within 0.5 s")
        store.set(f"test/missing/{rank}", "")
    check_peers(t, rendezvous(t))  # at once and without a barrier: stale offers must not matter


@on_ranks(3)
def test_memory_that_cannot_be_opened(rank: int) -> None:
    t = symm_mem.empty(8, device=CPU)
    if rank == 1:  # as in another pid namespace: what it tells its peers leads elsewhere
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:fusedcomm-"):
                    with open("/dev/null") as other:
                        os.dup2(other.fileno(), int(fd))
    error = error_of(lambda: rendezvous(t))
    assert re.search(r"rank [02] cannot use the memory of rank 1: .* is /dev/null", error)
    assert "one pid namespace" in error


# Memory that a peer could cut off under the ranks that have mapped it
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NOBODY = 65534


def replace_segment(num_bytes: int, seals: int, user: int) -> None:
    """Put other memory in the place of what this process has allocated, under the same name."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed since
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("/memfd:fusedcomm-"):
                made = os.memfd_create(name.removeprefix("/memfd:").removesuffix(" (deleted)"), os.MFD_ALLOW_SEALING)
                os.ftruncate(made, num_bytes)
                os.fchown(made, user, -1)
                fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
                os.dup2(made, fd)
                os.close(made)


@on_ranks(2)
@pytest.mark.parametrize(
    ("num_bytes", "seals", "user", "found"),
    [
        (PAGE_BYTES, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, os.geteuid(), "seals 5"),
        (PAGE_BYTES, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, os.geteuid(), "seals 6"),
        (PAGE_BYTES - 1, SEALS, os.geteuid(), f"{PAGE_BYTES - 1} bytes, seals 7"),
        pytest.param(
            *(PAGE_BYTES, SEALS, NOBODY, f"got user {NOBODY}"),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of somebody else"),
        ),
    ],
    ids=["not sealed", "seals not sealed", "too small", "another user's"],
)
def test_memory_that_could_be_cut_off_is_refused(rank: int, num_bytes: int, seals: int, user: int, found: str) -> None:
    t = symm_mem.empty(PAGE_BYTES, dtype=torch.uint8, device=CPU)
    if rank == 1:
        replace_segment(num_bytes, seals, user)
    error = error_of(lambda: rendezvous(t))
    assert "rank 0 cannot use the memory of rank 1: /proc/" in error
    assert f"must be sealed memory of user {os.geteuid()} of at least {PAGE_BYTES} bytes, got " in error
    assert found in error


# A store that is cut off
@pytest.mark.thorough
def test_a_store_that_is_cut_off_ends_the_rendezvous_in_time() -> None:
    store, name = CutStore(1), "test/cut-off"
    _SymmetricMemory.set_group_info(name, 0, 2, store)
    t, start = symm_mem.empty(4, device=CPU), time.monotonic()
    with timeout(0.2):
        error = error_of(lambda: _SymmetricMemory.rendezvous(t, name))
    assert 0.2 <= time.monotonic() - start < 20
    store.back.set()  # for the threads that are left in it
    assert error.startswith("DistStoreError: ")
    assert error.endswith("the store of the process group does not answer: is its host cut off?")
