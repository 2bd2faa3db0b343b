"""torch's rendezvous on GPUs has no bound of its own. Here threads are the ranks, and stubs the rendezvous."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed import _symmetric_memory as symm_mem

from fusedcomm.errors import PeerTimeoutError
from fusedcomm.memory import group_member
from fusedcomm.memory.group_member import Member
from fusedcomm.memory.topology import Topology
from tests.helpers.groups import fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.memory.test_vote import in_threads

ABLE = Topology(no_workspace=None, no_fused=None, workspace_bytes=1 << 30, algorithm=None)
OP = "matmul_all_reduce"


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``maps(stub, departures, *ranks)``: what the vote after the rendezvous says to each of the ranks."""
    release = threading.Event()

    def run(stub: Callable[[int], str | None], departures: Any, *ranks: int) -> list[Any]:
        store = HashStore()

        def rendezvous(segment: Any, group_name: str) -> None:
            if stub(segment) == "blocks":
                release.wait(60)

        def member(rank: int) -> Any:
            ours = Member(rank, 2, "group", torch.device("cuda", 0), store, ABLE, departures=departures)
            _, error = ours._rendezvous(rank, OP)  # type: ignore[arg-type]
            return ours._agree(OP, 1, error, "mapped")

        monkeypatch.setattr(torch.ops.symm_mem, "_rendezvous", rendezvous)
        found = SimpleNamespace(_SymmetricMemory=SimpleNamespace(rendezvous=lambda segment, group_name: "handle"))
        monkeypatch.setattr(group_member, "symm_mem", found)
        return in_threads([lambda rank=rank: member(rank) for rank in ranks])

    yield run
    release.set()


def test_a_rendezvous_that_ends_leaves_nothing_to_say(maps: Any) -> None:
    assert maps(lambda rank: None, None, 0, 1) == [None, None]


def test_a_rendezvous_that_blocks_ends_in_the_vote(maps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it blocks on all ranks, or one has failed in it and the others wait for that one."""
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "1")
    late = "cannot map its peers' memory: torch's rendezvous has not ended within 0.5 s"
    assert maps(lambda rank: "blocks", None, 0, 1) == [f"rank 0 {late}"] * 2

    def fails(rank: int) -> str:
        if rank == 0:
            raise RuntimeError("there is no address space")
        return "blocks"

    assert maps(fails, None, 0, 1) == ["rank 0 cannot map its peers' memory: there is no address space"] * 2


def test_a_rank_that_dies_in_it_is_named_at_once(maps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "30")
    began = time.monotonic()
    gone = SimpleNamespace(is_gone=lambda rank: rank == 1, last_words=lambda ranks: {1: "it was killed"})
    (error,) = maps(lambda rank: "blocks", gone, 0)
    assert isinstance(error, PeerTimeoutError) and error.peers == [1]
    assert time.monotonic() - began < 10


@on_ranks(2)
def test_what_the_op_has_made_is_found_again(rank: int) -> None:
    """This is torch's own op, and CPU memory stands in for a GPU's."""
    with fresh_group() as group:
        segment = symm_mem._SymmetricMemory.empty_strided_p2p(
            (4096,), (1,), torch.uint8, torch.device("cpu"), group.group_name
        )
        torch.ops.symm_mem._rendezvous(segment, group.group_name)
        if rank == 0:  # alone: a second rendezvous would wait for rank 1
            assert symm_mem._SymmetricMemory.rendezvous(segment, group.group_name).rank == 0
        dist.barrier(group)
