"""CPU symmetric memory over real processes: values, order, signals, groups, no leaks."""

import gc
import re
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

from tests.helpers.on_ranks import on_ranks
from tests.helpers.symmetric_memory import CPU, error_of, footprint, make, rendezvous

WAIT_MS = 100  # for what never comes

# Values through get_buffer, order through barrier


@on_ranks()
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_push_all_to_all(rank: int, world_size: int) -> None:
    numel = 5000
    t, handle = make(world_size * numel, torch.float32)
    assert (handle.rank, handle.world_size, handle.offset) == (rank, world_size, 0)
    t.fill_(-1)
    handle.barrier()
    for round in range(6):
        for step in range(1, world_size + 1):
            dst_rank = (rank + step) % world_size
            part = handle.get_buffer(dst_rank, (numel,), t.dtype, storage_offset=rank * numel)
            part.copy_(torch.full((numel,), 100 * round + 10 * rank + dst_rank % 10))
        handle.barrier()
        want = torch.tensor([100.0 * round + 10 * src + rank % 10 for src in range(world_size)])
        assert torch.equal(t.view(world_size, numel), want[:, None].expand(-1, numel))
        handle.barrier(channel=1)


@on_ranks(2)
def test_barrier_as_op(rank: int) -> None:
    t, handle = make(1)
    t.fill_(rank)
    torch.ops.symm_mem._barrier(handle.boxed())
    assert [int(handle.get_remote_tensor(peer, (1,), t.dtype)) for peer in range(2)] == [0, 1]
    torch.ops.symm_mem._barrier(handle.boxed())


# Signals
@on_ranks(3)
def test_signals_order_data(rank: int) -> None:
    """A token that each rank increments, around the ring three times."""
    t, handle = make(1)
    t.zero_()
    handle.barrier()
    following, previous = (rank + 1) % 3, (rank - 1) % 3
    for lap in range(3):
        if not (rank == 0 and lap == 0):
            handle.wait_signal(previous, channel=2)
        handle.get_buffer(following, (1,), t.dtype).copy_(t + 1)
        handle.put_signal(following, channel=2)
    if rank == 0:
        handle.wait_signal(previous, channel=2)
        assert int(t) == 9
    handle.barrier()
    dist.barrier()
    assert not handle.get_signal_pad(rank).to(torch.int64).any()  # zero after use, as torch wants


@on_ranks(2)
def test_signal_timeouts_name_rank_peer_and_channel(rank: int) -> None:
    _, handle = make(1)
    peer = 1 - rank
    where = rf"timed out after {WAIT_MS} ms on rank {rank} of group '0', channel"
    start = time.monotonic()
    error = error_of(lambda: handle.wait_signal(peer, channel=3, timeout_ms=WAIT_MS))
    assert 0 <= time.monotonic() - start - WAIT_MS / 1e3 < 20
    assert re.search(rf"wait_signal {where} 3: no signal from rank {peer}", error)
    handle.put_signal(peer, channel=4, timeout_ms=WAIT_MS)
    error = error_of(lambda: handle.put_signal(peer, channel=4, timeout_ms=WAIT_MS))
    assert re.search(rf"put_signal {where} 4: rank {peer} has not waited", error)
    dist.barrier()
    handle.wait_signal(peer, channel=4)
    if rank == 0:
        error = error_of(lambda: handle.barrier(channel=5, timeout_ms=WAIT_MS))
        assert re.search(rf"barrier {where} 5: rank 1 has not come", error)
    dist.barrier()
    # The failed barrier left no signal: the next one waits for the late rank again.
    if rank == 1:
        time.sleep(0.1)
    came = time.monotonic()  # one clock for all processes
    handle.barrier(channel=5)
    times: list[Any] = [None, None]
    dist.all_gather_object(times, (came, time.monotonic()))
    assert min(left for _, left in times) >= max(came for came, _ in times)
    assert not handle.get_signal_pad(rank).to(torch.int64).any()


@on_ranks(2)
def test_bounds_are_checked(rank: int) -> None:
    t, handle = make(4)
    t.fill_(rank)
    num_channels = _SymmetricMemory.signal_pad_size // 4 // handle.world_size
    handle.barrier(channel=num_channels - 1)
    channel = f"ValueError: channel must be in [0, {num_channels}) for a group of 2, got "
    assert error_of(lambda: handle.barrier(channel=-1)) == channel + "-1"
    assert error_of(lambda: handle.barrier(channel=num_channels)) == channel + str(num_channels)
    assert error_of(lambda: handle.put_signal(0, channel=num_channels)) == channel + str(num_channels)
    assert error_of(lambda: handle.wait_signal(0, channel=-1)) == channel + "-1"
    for peer in (-1, 2, 2**31 - 1, -(2**31)):
        for name, call in (("dst_rank", handle.put_signal), ("src_rank", handle.wait_signal)):
            assert error_of(partial(call, peer, timeout_ms=50)) == f"ValueError: {name} must be in [0, 2), got {peer}"
        for buffer in (handle.get_buffer, handle.get_remote_tensor):  # torch's own functions
            assert error_of(partial(buffer, peer, (1,), torch.int64)).startswith("RuntimeError: ")
    assert "exceeds the allocated size" in error_of(lambda: handle.get_buffer(1, (5,), torch.int64))
    handle.get_buffer(1 - rank, (1,), torch.int64).fill_(5)
    handle.barrier()
    assert t.tolist() == [5, rank, rank, rank] and not handle.get_signal_pad(rank).to(torch.int64).any()
    dist.barrier()  # the peer's next signal could be in the pad


# Groups and buffers
@on_ranks(3)
def test_overlapping_groups(rank: int) -> None:
    members = [[0, 1], [1, 2], [0, 1, 2]]
    groups = [dist.new_group(m) for m in members]
    mine = [(g, m) for g, m in zip(groups, members, strict=True) if rank in m]
    shared = symm_mem.empty(len(members) * 3, dtype=torch.int64, device=CPU).fill_(-1)
    handles = [rendezvous(shared, group) for group, _ in mine]
    for (_, m), handle in zip(mine, handles, strict=True):
        base = members.index(m) * 3
        for peer in range(handle.world_size):
            handle.get_buffer(peer, (1,), torch.int64, storage_offset=base + handle.rank).fill_(
                10 * base + m[handle.rank]
            )
        handle.barrier()
        assert shared[base : base + len(m)].tolist() == [10 * base + r for r in m]
    # A signal in one group is none in another on the same buffer, though rank and channel agree.
    if rank == 0:
        handles[0].put_signal(1)
        handles[0].barrier(channel=1)
    if rank == 1:
        handles[0].barrier(channel=1)
        missing = error_of(partial(handles[2].wait_signal, 0, timeout_ms=50))
        assert "no signal from rank 0" in missing
        handles[0].wait_signal(0, timeout_ms=5000)
    dist.barrier()
    del handles, handle
    for group, _ in mine:
        dist.destroy_process_group(group)


@on_ranks(2)
def test_views_and_ordinary_tensors(rank: int) -> None:
    t, handle = make(100)
    # torch hands the storage's start to a backend: views of a tensor share its handle.
    view = rendezvous(t[40:60])
    assert view.buffer_ptrs == handle.buffer_ptrs and view.offset == 0
    # A storage that begins inside the allocation has an offset.
    inner = torch.from_numpy(t.numpy()[40:])
    shifted = rendezvous(inner)
    assert shifted.offset == 40 * 8 and shifted.buffer_size == 800
    shifted.get_remote_tensor(1 - rank, (2,), t.dtype).fill_(rank)
    shifted.barrier()
    assert t[40:42].tolist() == [1 - rank] * 2
    ordinary, (empty, _) = torch.empty(4), make(0)
    assert rendezvous(ordinary) is None and empty.numel() == 0
    if hasattr(symm_mem, "is_symm_mem_tensor"):  # torch 2.13
        assert symm_mem.is_symm_mem_tensor(t[40:]) and not symm_mem.is_symm_mem_tensor(ordinary)


# Memory
@on_ranks(2)
def test_free_and_allocate_again(rank: int) -> None:
    store, times = dist.distributed_c10d._get_default_store(), 20
    addresses, peer = set(), 1 - rank
    for i in range(times):
        if i == 2:  # what is made once is there
            before, num_keys = footprint(), store.num_keys()
        t, handle = make(1000 + i % 3)
        addresses.add(t.data_ptr())
        handle.get_buffer(peer, t.shape, t.dtype).fill_(2 * i + rank)
        handle.barrier()
        assert (t == 2 * i + peer).all()
        handle.barrier()
        del t, handle
    dist.barrier()
    assert footprint() == before
    assert store.num_keys() - num_keys <= 8  # pads of the last rendezvous, and of gloo's barrier
    assert len(addresses) < times  # addresses were used again


@on_ranks(2)
def test_a_live_handle_keeps_its_memory(rank: int) -> None:
    before = footprint()
    t, handle = make(1000)
    t.fill_(rank)
    handle.barrier()
    del t
    gc.collect()
    peer = handle.get_buffer(1 - rank, (1000,), torch.int64)
    own = handle.get_buffer(rank, (1000,), torch.int64)
    assert int(peer.sum()) == 1000 * (1 - rank) and int(own.sum()) == 1000 * rank
    handle.barrier()
    assert footprint()[0] - before[0] == 4  # own and peer's buffer, own and peer's signal pad
    del peer, own, handle
    assert footprint() == before
