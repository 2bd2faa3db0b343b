"""CPU symmetric memory over real processes: values, order, signals, groups, no leaks."""

from __future__ import annotations

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

from tests.helpers.symmetric_memory import CPU, MISSING_S, Ranks, error_of, footprint, make, rendezvous

# Values through get_buffer, order through barrier


def push_all_to_all(rank: int, dtype: torch.dtype, num_rounds: int) -> bool:
    group_size = dist.get_world_size()
    numel = 5000
    t, handle = make(group_size * numel, dtype=dtype)
    assert (handle.rank, handle.world_size, handle.offset) == (rank, group_size, 0)
    t.fill_(-1)
    handle.barrier()
    good = True
    for round in range(num_rounds):
        for step in range(1, group_size + 1):
            dst_rank = (rank + step) % group_size
            part = handle.get_buffer(dst_rank, (numel,), dtype, storage_offset=rank * numel)
            part.copy_(torch.full((numel,), 100 * round + 10 * rank + dst_rank % 10))
        handle.barrier()
        want = torch.tensor([100 * round + 10 * src + rank % 10 for src in range(group_size)])
        good &= torch.equal(t.view(group_size, numel), want.to(dtype)[:, None].expand(-1, numel))
        handle.barrier(channel=1)
    return good


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_push_all_to_all(ranks: Ranks, world_size: int) -> None:
    assert all(ranks(world_size).run(push_all_to_all, torch.float32, 6))


def test_push_all_to_all_of_int64(ranks: Ranks) -> None:
    assert all(ranks(2).run(push_all_to_all, torch.int64, 2))


def rounds_with_one_late_rank(rank: int, with_barrier: bool) -> bool:
    """Whether this rank always reads what its peers have written in the same round."""
    t, handle = make(1)
    t.zero_()
    dist.barrier()
    peers = [handle.get_buffer(peer, (1,), t.dtype) for peer in range(handle.world_size)]
    good = True
    for round in range(1, 9):
        if rank == round % handle.world_size:
            time.sleep(0.01)
        t.fill_(round)
        if with_barrier:
            handle.barrier()
        good &= all(int(peer) == round for peer in peers)
        if with_barrier:
            handle.barrier()
    dist.barrier()
    return good


def test_barrier_orders(ranks: Ranks) -> None:
    assert all(ranks(3).run(rounds_with_one_late_rank, True))


def test_without_barrier_the_same_rounds_fail(ranks: Ranks) -> None:
    assert not all(ranks(3).run(rounds_with_one_late_rank, False))


def barrier_as_op(rank: int) -> bool:
    t, handle = make(1)
    t.fill_(rank)
    torch.ops.symm_mem._barrier(handle.boxed())
    peers = range(handle.world_size)
    good = [int(handle.get_remote_tensor(peer, (1,), t.dtype)) for peer in peers] == list(peers)
    torch.ops.symm_mem._barrier(handle.boxed())
    return good


def test_barrier_as_op(ranks: Ranks) -> None:
    assert all(ranks(2).run(barrier_as_op))


# Signals


def ring(rank: int) -> int:
    """A token that each rank increments, around the ring three times."""
    t, handle = make(1)
    t.zero_()
    handle.barrier()
    following, previous = (rank + 1) % handle.world_size, (rank - 1) % handle.world_size
    for lap in range(3):
        if not (rank == 0 and lap == 0):
            handle.wait_signal(previous, channel=2)
        handle.get_buffer(following, (1,), t.dtype).copy_(t + 1)
        handle.put_signal(following, channel=2)
    if rank == 0:
        handle.wait_signal(previous, channel=2)
    handle.barrier()
    dist.barrier()
    assert not handle.get_signal_pad(rank).to(torch.int64).any()  # zero after use, as torch wants
    return int(t)


def test_signals_order_data(ranks: Ranks) -> None:
    assert ranks(3).run(ring)[0] == 9


def signal_timeouts(rank: int) -> list[str]:
    _, handle = make(1)
    peer = 1 - rank
    ms = int(MISSING_S * 200)
    start = time.monotonic()
    errors = [error_of(lambda: handle.wait_signal(peer, channel=3, timeout_ms=ms))]
    late_s = time.monotonic() - start - ms / 1e3
    assert 0 <= late_s < 20, late_s
    handle.put_signal(peer, channel=4, timeout_ms=ms)
    errors.append(error_of(lambda: handle.put_signal(peer, channel=4, timeout_ms=ms)))
    dist.barrier()
    handle.wait_signal(peer, channel=4)
    if rank == 0:
        errors.append(error_of(lambda: handle.barrier(channel=5, timeout_ms=ms)))
    dist.barrier()
    # The failed barrier left no signal: the next one waits for the late rank again.
    if rank == 1:
        time.sleep(0.1)
    came = time.monotonic()  # one clock for all processes
    handle.barrier(channel=5)
    left = time.monotonic()
    times: list[Any] = [None, None]
    dist.all_gather_object(times, (came, left))
    assert min(left for _, left in times) >= max(came for came, _ in times)
    dist.barrier()
    assert not handle.get_signal_pad(rank).to(torch.int64).any()
    return errors


def test_signal_timeouts_name_rank_peer_and_channel(ranks: Ranks) -> None:
    for rank, errors in enumerate(ranks(2).run(signal_timeouts)):
        peer = 1 - rank
        where = rf"timed out after 100 ms on rank {rank} of group '0', channel"
        assert re.search(rf"wait_signal {where} 3: no signal from rank {peer}", errors[0])
        assert re.search(rf"put_signal {where} 4: rank {peer} has not waited", errors[1])
        if rank == 0:
            assert re.search(rf"barrier {where} 5: rank 1 has not come", errors[2])


def out_of_bounds(rank: int) -> list[str]:
    _, handle = make(1)
    num_channels = _SymmetricMemory.signal_pad_size // 4 // handle.world_size
    handle.barrier(channel=num_channels - 1)
    return [
        error_of(lambda: handle.barrier(channel=-1)),
        error_of(lambda: handle.barrier(channel=num_channels)),
        error_of(lambda: handle.put_signal(0, channel=num_channels)),
        error_of(lambda: handle.wait_signal(0, channel=-1)),
        error_of(lambda: handle.put_signal(2)),
        error_of(lambda: handle.wait_signal(-1)),
        error_of(lambda: handle.get_buffer(1, (2,), torch.int64)),
        str(num_channels),
    ]


def test_bounds_are_checked(ranks: Ranks) -> None:
    *errors, num_channels = ranks(2).run(out_of_bounds)[0]
    channel = f"ValueError: channel must be in [0, {num_channels}) for a group of 2, got "
    assert errors[:4] == [channel + got for got in ("-1", num_channels, num_channels, "-1")]
    assert errors[4] == "ValueError: dst_rank must be in [0, 2), got 2"
    assert errors[5] == "ValueError: src_rank must be in [0, 2), got -1"
    assert "exceeds the allocated size" in errors[6]


# Groups and buffers


def overlapping_groups(rank: int) -> bool:
    members = [[0, 1], [1, 2], [0, 1, 2]]
    groups = [dist.new_group(m) for m in members]
    mine = [(g, m) for g, m in zip(groups, members, strict=True) if rank in m]
    shared = symm_mem.empty(len(members) * 3, dtype=torch.int64, device=CPU).fill_(-1)
    good = True
    handles = [rendezvous(shared, group) for group, _ in mine]
    for (_, m), handle in zip(mine, handles, strict=True):
        base = members.index(m) * 3
        for peer in range(handle.world_size):
            handle.get_buffer(peer, (1,), torch.int64, storage_offset=base + handle.rank).fill_(
                10 * base + m[handle.rank]
            )
        handle.barrier()
        want = [10 * base + r for r in m]
        good &= shared[base : base + len(m)].tolist() == want
    # A signal in one group is none in another on the same buffer, though rank and channel agree.
    if rank == 0:
        handles[0].put_signal(1)
        handles[0].barrier(channel=1)
    if rank == 1:
        handles[0].barrier(channel=1)
        missing = error_of(partial(handles[2].wait_signal, 0, timeout_ms=50))
        good &= "no signal from rank 0" in missing
        handles[0].wait_signal(0, timeout_ms=5000)
    dist.barrier()
    del handles, handle
    for group, _ in mine:
        dist.destroy_process_group(group)
    return good


def test_overlapping_groups(ranks: Ranks) -> None:
    assert all(ranks(3).run(overlapping_groups))


def several_buffers(rank: int) -> bool:
    buffers = [make(16 + i, dtype=dtype) for i, dtype in enumerate((torch.bfloat16, torch.int32))]
    buffers.append(make(0))
    peer = 1 - rank
    for i, (t, handle) in enumerate(buffers):
        handle.get_buffer(peer, t.shape, t.dtype).fill_(10 * i + rank)
        handle.barrier()
    return all((t == 10 * i + peer).all() for i, (t, _) in enumerate(buffers))


def test_several_buffers(ranks: Ranks) -> None:
    assert all(ranks(2).run(several_buffers))


def views(rank: int) -> bool:
    t, handle = make(100)
    # torch hands the storage's start to a backend: views of a tensor share its handle.
    view = rendezvous(t[40:60])
    good = view.buffer_ptrs == handle.buffer_ptrs and view.offset == 0
    # A storage that begins inside the allocation has an offset.
    inner = torch.from_numpy(t.numpy()[40:])
    shifted = rendezvous(inner)
    good &= shifted.offset == 40 * 8 and shifted.buffer_size == 800
    shifted.get_remote_tensor(1 - rank, (2,), t.dtype).fill_(rank)
    shifted.barrier()
    good &= t[40:42].tolist() == [1 - rank] * 2
    ordinary = torch.empty(4)
    if hasattr(symm_mem, "is_symm_mem_tensor"):  # torch 2.13
        good &= symm_mem.is_symm_mem_tensor(t[40:]) and not symm_mem.is_symm_mem_tensor(ordinary)
    return good and rendezvous(ordinary) is None


def test_views_and_ordinary_tensors(ranks: Ranks) -> None:
    assert all(ranks(2).run(views))


def named_group(rank: int, name: str) -> bool:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    _SymmetricMemory.set_group_info(name, rank, dist.get_world_size(), store)
    t = symm_mem.empty(4, dtype=torch.int64, device=CPU).fill_(rank)
    handle = _SymmetricMemory.rendezvous(t, name)
    assert _SymmetricMemory.rendezvous(t, name).buffer_ptrs == handle.buffer_ptrs  # not collective
    handle.barrier()
    good = handle.get_buffer(1 - rank, (4,), t.dtype).tolist() == [1 - rank] * 4
    handle.barrier()
    return good


def test_group_info_without_process_group(ranks: Ranks) -> None:
    for name in ("test/named/1", "test/named/2"):
        assert all(ranks(2).run(named_group, name))


def unknown_group(rank: int) -> str:
    t = symm_mem.empty(4, device=CPU)
    return error_of(lambda: _SymmetricMemory.rendezvous(t, "nobody"))


def test_unknown_group(ranks: Ranks) -> None:
    assert "nobody" in ranks(2).run(unknown_group)[0]


# Memory


def free_and_allocate(rank: int, times: int) -> dict[str, Any]:
    store = dist.distributed_c10d._get_default_store()
    good, addresses = True, set()
    peer = 1 - rank
    for i in range(times):
        if i == 2:  # what is made once is there
            before, num_keys = footprint(), store.num_keys()
        t, handle = make(1000 + i % 3)
        addresses.add(t.data_ptr())
        handle.get_buffer(peer, t.shape, t.dtype).fill_(2 * i + rank)
        handle.barrier()
        good &= bool((t == 2 * i + peer).all())
        handle.barrier()
        del t, handle
    dist.barrier()
    return {
        "good": good,
        "footprint": (before, footprint()),
        "new keys": store.num_keys() - num_keys,
        "addresses": len(addresses),
    }


def test_free_and_allocate_again(ranks: Ranks) -> None:
    times = 60
    for result in ranks(2).run(free_and_allocate, times):
        assert result["good"]
        before, after = result["footprint"]
        assert before == after
        assert result["new keys"] <= 8  # pads of the last rendezvous, and of gloo's barrier
        assert result["addresses"] < times  # addresses were used again


def live_handle_keeps_memory(rank: int) -> tuple[bool, int, bool]:
    before = footprint()
    t, handle = make(1000)
    t.fill_(rank)
    handle.barrier()
    del t
    gc.collect()
    peer = handle.get_buffer(1 - rank, (1000,), torch.int64)
    own = handle.get_buffer(rank, (1000,), torch.int64)
    good = int(peer.sum()) == 1000 * (1 - rank) and int(own.sum()) == 1000 * rank
    handle.barrier()
    maps = footprint()[0] - before[0]
    del peer, own, handle
    return good, maps, footprint() == before


def test_a_live_handle_keeps_its_memory(ranks: Ranks) -> None:
    # Mapped: own and peer's buffer, own and peer's signal pad
    assert ranks(2).run(live_handle_keeps_memory) == [(True, 4, True)] * 2
