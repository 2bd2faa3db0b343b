"""Functions of torch.distributed._symmetric_memory in CPU memory."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from fusedcomm.symm_mem import enable_cpu
from tests.helpers.on_ranks import on_ranks
from tests.helpers.symmetric_memory import CPU, error_of, make, timeout

enable_cpu()
NAME = "0"  # WORLD


@on_ranks(3)
def test_a_workspace_is_kept_and_grows(rank: int) -> None:
    handle = symm_mem.get_symm_mem_workspace(NAME, 4096)
    size = handle.buffer_size
    assert size >= 4096
    assert symm_mem.get_symm_mem_workspace(NAME, min_size=1).buffer_ptrs == handle.buffer_ptrs
    grown = symm_mem.get_symm_mem_workspace(NAME, size + 1)
    assert grown.buffer_size > size
    words = grown.get_buffer((rank + 1) % 3, (3,), torch.int64).fill_(rank)
    grown.barrier(timeout_ms=5000)
    assert grown.get_buffer(rank, (3,), torch.int64).tolist() == [(rank - 1) % 3] * 3
    grown.barrier(timeout_ms=5000)
    del words


@pytest.mark.skipif(not hasattr(symm_mem, "put_signal"), reason="this release of torch has no put_signal")
@on_ranks(2)
def test_put_signal_puts_and_signals(rank: int) -> None:
    t, handle = make(4, torch.float32)
    for round in range(4):
        if rank == round % 2:
            symm_mem.put_signal(torch.full((4,), float(round)), handle, 1 - rank)
        else:
            symm_mem.wait_signal(handle, 1 - rank)
            assert (t == round).all()
    with timeout(0.1):
        assert "no signal from rank" in error_of(lambda: symm_mem.wait_signal(handle, 1 - rank))
    assert error_of(lambda: symm_mem.put_signal(t, handle, 2)) == (
        "ValueError: put_signal: peer must be in [0, 2), got 2"
    )
    assert "exceeds the allocated size" in error_of(lambda: symm_mem.put_signal(torch.ones(5), handle, 1 - rank))
    dist.barrier()


@on_ranks(2)
def test_enabling_a_group_changes_nothing_else(rank: int) -> None:
    group = dist.new_group([0, 1])
    assert not symm_mem.is_symm_mem_enabled_for_group(group.group_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch: there is no need to call it anymore
        symm_mem.enable_symm_mem_for_group(group.group_name)
    assert symm_mem.is_symm_mem_enabled_for_group(group.group_name)
    t = symm_mem.empty(2, device=CPU).fill_(rank)
    symm_mem.rendezvous(t, group).barrier()
    assert torch.ops.symm_mem.one_shot_all_reduce(t, "sum", group.group_name).tolist() == [1, 1]
    dist.destroy_process_group(group)
