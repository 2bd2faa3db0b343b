"""`fused` is proved with results in place where the group has a heap of them.

CPU ranks stand in for GPUs: Triton interprets the kernels, and the heap is the one of GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

import fusedcomm
from fusedcomm.algorithms import in_place
from fusedcomm.algorithms.in_place import FusedResult, in_place_from
from fusedcomm.ops import explain, proof
from fusedcomm.runtime import members, topology
from fusedcomm.runtime.device_results import ALIGNMENT
from fusedcomm.runtime.group_member import Member
from tests.helpers.groups import fresh_group
from tests.helpers.on_ranks import on_ranks

OP, NAME = "matmul_all_to_all", "matmul_all_to_all fused float32"
IN_PLACE = f"{NAME} with results in place"


@contextmanager
def gpu_heaps(**env: str) -> Iterator[tuple[Member, list[list[int]]]]:
    """This rank's part in a group, and whose chunks the last round of each proof has had in place."""
    arrived: list[list[int]] = []
    by_workspace = proof._by_workspace

    def counted(own: Member, *args: Any) -> Any:
        results = by_workspace(own, *args)
        assert own.workspace is not None
        arrived.append(in_place_from(own.workspace))
        return results

    def device_results(self: Member, segments: list[torch.Tensor], _: str, owner: Any) -> Any:
        return self._device_results(segments, owner)

    with (
        mock.patch.object(topology, "_must_prove", lambda device: True),
        mock.patch.object(Member, "_results_in", device_results),
        mock.patch.object(proof, "_by_workspace", counted),
        TemporaryDirectory() as folder,
        fresh_group(CACHE_DIR=folder, **env) as group,
    ):
        yield members.member(group.group_name, torch.device("cpu")), arrived
        dist.barrier(group)


def prove(ours: Member) -> str:
    return proof.prove(OP, "fused", explain.algorithms_of(OP), torch.float32, ours, uneven=False)


@on_ranks(2)
def test_every_chunk_of_its_rounds_comes_in_place(rank: int) -> None:
    """Although nobody waits for a post: the ranks of a proof meet behind theirs."""
    with gpu_heaps() as (ours, arrived):
        assert prove(ours) == ""
        assert ours.outcomes == {IN_PLACE: ""} and arrived == [[0, 1]]


def shifted(landing: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """A rank stores its chunks behind their place in the results of others."""

    def landing_of(spans: Any, src_rank: int, *args: Any) -> Any:
        found = landing(spans, src_rank, *args)
        return found._replace(start=found.start + 1) if rank == 1 and found is not None else found

    return landing_of


@on_ranks(2)
@pytest.mark.thorough
@pytest.mark.parametrize("heap_bytes", ["0", "1000000"])
def test_what_is_wrong_in_place_alone_is_found_there(rank: int, heap_bytes: str) -> None:
    plant = mock.patch.object(in_place, "landing_of", shifted(in_place.landing_of, rank))
    with plant, gpu_heaps(RESULTS_BYTES=heap_bytes) as (ours, _):
        wrong = prove(ours)
    if heap_bytes == "0":
        assert wrong == ""
    else:
        assert wrong.startswith("fused of float32 with results in place failed its proof on ")
        assert "gave wrong values" in wrong and ours.outcomes == {IN_PLACE: wrong}


def without_heap(rank: int) -> Any:
    """Rank 1 has no memory but for a workspace."""
    allocate = Member._allocate

    def without(self: Member, size: int, *, initialise: bool) -> Any:
        return (None, "has no memory") if rank == 1 and not initialise else allocate(self, size, initialise=initialise)

    return mock.patch.object(Member, "_allocate", without)


@on_ranks(2)
@pytest.mark.nightly
def test_a_heap_that_the_group_has_goes_too(rank: int) -> None:
    """An op that is not proved so has made it; without the proof no call may write in it."""
    with gpu_heaps() as (ours, _):
        with fusedcomm.force_algorithm("chunked", strict=True):
            fusedcomm.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2), 0, ours.group_name)
        assert ours.workspace is not None and ours.workspace.results is not None
        with without_heap(rank):
            assert prove(ours) == ""
        assert ours.outcomes == {NAME: ""} and ours.results is None and ours.workspace.results is None


@on_ranks(2)
@pytest.mark.nightly
def test_before_a_capture_too(rank: int) -> None:
    """Calls go through the slots there, but what is proved there holds for calls behind it."""
    capture = mock.patch.object(in_place, "is_for_capture", lambda device: True)
    with capture, gpu_heaps() as (ours, arrived):
        assert prove(ours) == ""
        assert ours.outcomes == {IN_PLACE: ""} and arrived == [[0, 1]]


Fused = Callable[..., Any]


def proved_with(ours: Member, plant: Callable[[Fused, Any], Any]) -> str:
    """What a proof says of `fused` where calls in place are ``plant``'s: it gets what runs them, and the call."""
    algorithms = dict(explain.algorithms_of(OP))
    right = algorithms["fused"]

    def planted(call: Any, *args: Any, **options: Any) -> Any:
        if call.posted is None:
            return right(call, *args, **options)
        return plant(lambda call: right(call, *args, **options), call)

    return proof.prove(OP, "fused", algorithms | {"fused": planted}, torch.float32, ours, uneven=False)


@on_ranks(2)
@pytest.mark.thorough
def test_what_is_written_beside_a_result_is_found(rank: int) -> None:
    def overruns(run: Fused, call: Any) -> Any:
        result = run(call)
        if rank == 1:
            ctypes.memset(result.data_ptr() + result.nbytes // ALIGNMENT * ALIGNMENT + ALIGNMENT, 0, 4)
        return result

    with gpu_heaps() as (ours, _):
        wrong = proved_with(ours, overruns)
    assert "rank 1 raised RuntimeError: matmul_all_to_all: a rank has written beside a result of rank 1" in wrong


@on_ranks(2)
@pytest.mark.thorough
def test_chunks_that_come_through_slots_prove_nothing(rank: int) -> None:
    """It is not kept: it says that something was late, or that nothing finds a post."""

    def finds_nothing(run: Fused, call: Any) -> Any:
        with mock.patch.object(FusedResult, "at_peers", lambda self, spans: None):
            return run(call)

    with gpu_heaps() as (ours, _):
        wrong = proved_with(ours, finds_nothing)
        assert "rank 0 was late: PeerTimeoutError: matmul_all_to_all: chunks of ranks [0, 1] came through" in wrong
        assert ours.passing == {IN_PLACE}
