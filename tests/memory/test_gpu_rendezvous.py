"""torch's rendezvous on GPUs among ranks with different counts. Here Python does what torch's C++ does to the store."""

import datetime
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.distributed.distributed_c10d as c10d
from torch.distributed import HashStore, PrefixStore, Store

from fusedcomm.memory import gpu_rendezvous, group_member
from fusedcomm.memory.gpu_rendezvous import CountedStore, Counter, private_name, registered
from fusedcomm.memory.group import store as store_of
from fusedcomm.memory.group_member import Member
from fusedcomm.memory.topology import Topology
from tests.helpers.groups import fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.symmetric_memory import CPU, make, timeout

ABLE = Topology(no_workspace=None, no_fused=None, workspace_bytes=1 << 30, algorithm=None)
OP = "matmul_all_reduce"


class Exchange:
    """torch's StoreExchange: ``count`` is of the process. PrefixStore calls ``store`` from C++."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.names: list[str] = []  # of groups that have met
        self.multicast: list[str | None] = []

    def all_gather(self, store: Store, rank: int, size: int, value: str) -> list[bytes]:
        keys = [f"{self.count}/{r}" for r in range(size)]
        self.count += 1
        within = PrefixStore("CUDASymmetricMemory", store)
        within.set(keys[rank], value)
        return within.multi_get(keys)

    def barrier(self, store: Store, size: int) -> None:
        self.count += 1
        within: Any = PrefixStore("CUDASymmetricMemory", store)
        within.barrier(str(self.count - 1), size)

    def rendezvous(self, segment: Any, name: Any) -> None:
        self.names.append(name)
        self.multicast.append(os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST"))
        group: Any = c10d._resolve_process_group(name)
        for i in range(2):
            found = self.all_gather(group.get_group_store(), group.rank(), group.size(), f"{i} of {group.rank()}")
            assert found == [f"{i} of {r}".encode() for r in range(group.size())]
            self.barrier(group.get_group_store(), group.size())


def meets(exchange: Exchange, store: Store, rank: int, size: int) -> list[list[bytes]]:
    found = []
    for i in range(3):
        found.append(exchange.all_gather(store, rank, size, f"{i} of {rank}"))
        exchange.barrier(store, size)
    return found


def all_meet(wrapped: Callable[[Store], Store]) -> list[Any]:
    store = HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.5))
    counts = [0, 7, 70]
    with ThreadPoolExecutor(len(counts)) as pool:
        return list(pool.map(lambda r: meets(Exchange(counts[r]), wrapped(store), r, len(counts)), range(len(counts))))


def test_ranks_with_different_counts_meet() -> None:
    assert all_meet(CountedStore) == [[[f"{i} of {r}".encode() for r in range(3)] for i in range(3)]] * 3


def test_ranks_with_different_counts_do_not_meet_in_the_group_s_own_store() -> None:
    """Negative control."""
    with pytest.raises(dist.DistStoreError):
        all_meet(lambda store: store)


def test_other_keys_stay() -> None:
    store = HashStore()
    counted = CountedStore(store)
    for key in ("3", "CUDASymmetricMemory", "other/CUDASymmetricMemory/3"):
        counted.set(key, "here")
        assert store.get(key) == counted.get(key) == b"here"
    assert counted.add("5", 1) == store.add("5", 0) == 1


def test_calls_from_c_plus_plus_reach_the_store_while_python_is_busy() -> None:
    store, done = HashStore(), threading.Event()
    counted, found = CountedStore(store), []

    def run() -> None:
        found.append(meets(Exchange(70), counted, 0, 1))
        done.set()

    threading.Thread(target=run, daemon=True).start()
    while not done.is_set():
        sum(range(100_000))
    assert found == [[[f"{i} of 0".encode()] for i in range(3)]]
    assert store.check([f"CUDASymmetricMemory/{2 * i}/0" for i in range(3)])


def test_a_name_is_private_unless_all_have_one_known_count() -> None:
    assert private_name(["3 3 a", "3 3 b"]) is None
    names = [private_name(facts) for facts in (["3 3 a", "2 2 b"], ["3 3 a", "2 2 c"], ["3 2 a", "3 2 b"])]
    assert None not in names and len(set(names)) == 3
    assert private_name(["3 3 a", "2 2 b"]) == names[0]


def test_torch_finds_the_private_group_and_its_store_inside() -> None:
    name, store = "fusedcomm/private", HashStore()
    with registered(name, store, 1, 3):
        group: Any = c10d._resolve_process_group(name)  # type: ignore[arg-type]
        assert (group.rank(), group.size(), group.use_pg_for_symm_mem_rendezvous) == (1, 3, False)
        assert isinstance(group.get_group_store(), CountedStore)
        group.get_group_store().set("CUDASymmetricMemory/9/1", "here")
        assert store.get(f"{name}/CUDASymmetricMemory/0/1") == b"here"
    with pytest.raises(RuntimeError):
        c10d._resolve_process_group(name)  # type: ignore[arg-type]


@on_ranks(2)
def test_torch_s_op_meets_in_a_private_group(rank: int) -> None:
    """fusedcomm's CPU memory asks torch for the group, and its store for all else, without the GIL."""
    with fresh_group() as group, registered("fusedcomm/cpu", store_of(group, "test"), rank, 2):
        t = symm_mem.empty(4, dtype=torch.int64, device=CPU)
        torch.ops.symm_mem._rendezvous(t, "fusedcomm/cpu")
        handle = symm_mem._SymmetricMemory.rendezvous(t, "fusedcomm/cpu")
        t.fill_(rank)
        dist.barrier(group)
        assert handle.get_buffer(1 - rank, (4,), torch.int64).tolist() == [1 - rank] * 4
        dist.barrier(group)


@contextmanager
def emulated(count: int = 0) -> Iterator[Exchange]:
    """torch's rendezvous on GPUs, in a process that has made none with fusedcomm."""
    exchange = Exchange(count)
    handles = SimpleNamespace(_SymmetricMemory=SimpleNamespace(rendezvous=lambda segment, name: name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.symm_mem, "_rendezvous", exchange.rendezvous)
        patch.setattr(group_member, "symm_mem", handles)
        patch.setattr(gpu_rendezvous, "counter", Counter())
        yield exchange


def share(group: Any, comes: bool = True) -> tuple[Any, str | None]:
    """(The name under which the handle is found, why there is none)."""
    pg = group or dist.group.WORLD
    ours = Member(pg.rank(), pg.size(), pg.group_name, torch.device("cuda", 0), store_of(pg, "test"), ABLE)
    assert ours._agree(OP, 1, "", "allocated") is None
    found, error = ours._rendezvous("a segment", OP) if comes else (None, "is elsewhere")  # type: ignore[arg-type]
    return found, ours._agree(OP, 1, error, "mapped")


@on_ranks(3)
def test_an_op_on_some_ranks_leaves_all_able_to_meet(rank: int) -> None:
    some, every = dist.new_group([0, 1]), dist.new_group()
    assert some is not None and every is not None
    with emulated() as exchange, timeout(10):
        if rank < 2:
            assert share(some) == (some.group_name, None)
        for _ in range(2):
            assert share(every) == (exchange.names[-1], None)
        assert len(set(exchange.names)) == len(exchange.names)
        assert all(name.startswith("fusedcomm/") for name in exchange.names[-2:])
    dist.barrier()
    dist.destroy_process_group(every)
    if rank < 2:
        dist.destroy_process_group(some)


@on_ranks(3)
def test_ranks_with_one_count_meet_in_their_own_group(rank: int) -> None:
    """And make no multicast object."""
    with fresh_group() as group, emulated(5) as exchange, timeout(10):
        assert [share(group) for _ in range(3)] == [(group.group_name, None)] * 3
        assert exchange.names == [group.group_name] * 3
        assert exchange.multicast == ["1"] * 3 and gpu_rendezvous._DISABLE not in os.environ


@on_ranks(3)
def test_a_wait_that_is_left_behind_blocks_neither_votes_nor_the_next_rendezvous(rank: int) -> None:
    with fresh_group() as group, emulated(rank) as exchange, timeout(10):
        gpu_rendezvous.counter.begun = gpu_rendezvous.counter.ended = rank
        late = "rank 0 cannot map its peers' memory: torch's rendezvous has not ended within 5 s"
        assert share(group, comes=rank < 2)[1] == late
        exchange.count = 10 * rank
        assert share(group) == (exchange.names[-1], None)


@on_ranks(2)
def test_memory_of_cpus_meets_in_its_own_group(rank: int) -> None:
    """Also where the counts of GPUs differ."""
    with fresh_group() as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_rendezvous, "counter", Counter())
        gpu_rendezvous.counter.begun = rank
        ours = Member(rank, 2, group.group_name, torch.device("cpu"), store_of(group, "test"), ABLE)
        assert not isinstance(ours._share(1 << 20, OP, 1), str)
        assert ours.private_name is None
        ours.close()
    assert make(8)[1].rank == rank
