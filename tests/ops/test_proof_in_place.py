"""`fused` is proved with results in place where the group has a heap of them.

CPU ranks stand in for GPUs: Triton interprets the kernels, and the heap is the one of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from fusedcomm.algorithms import in_place
from fusedcomm.ops import explain, proof
from fusedcomm.runtime import members
from fusedcomm.runtime.group_member import Member
from tests.helpers.groups import fresh_group
from tests.helpers.in_place import in_place_from
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
        mock.patch.object(Member, "_results_in", device_results),
        mock.patch.object(proof, "_by_workspace", counted),
        fresh_group(**env) as group,
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


@on_ranks(2)
def test_without_a_heap_nothing_is_posted(rank: int) -> None:
    with gpu_heaps(RESULTS_BYTES="0" if rank == 0 else "1000000") as (ours, arrived):
        assert prove(ours) == ""
        assert ours.outcomes == {NAME: ""} and arrived == [[]]


def shifted(landing: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """A rank stores its chunks behind their place in the results of others."""

    def landing_of(spans: Any, src_rank: int, *args: Any) -> Any:
        found = landing(spans, src_rank, *args)
        return found._replace(start=found.start + 1) if rank == 1 and found is not None else found

    return landing_of


@on_ranks(2)
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


@on_ranks(2)
def test_a_rank_without_memory_for_the_heap_leaves_all_without(rank: int) -> None:
    allocate = Member._allocate

    def without(self: Member, size: int, *, initialise: bool) -> Any:
        return (None, "has no memory") if rank == 1 and not initialise else allocate(self, size, initialise=initialise)

    with mock.patch.object(Member, "_allocate", without), gpu_heaps() as (ours, arrived):
        assert prove(ours) == ""
        assert ours.outcomes == {NAME: ""} and arrived == [[]] and ours.topology.results_bytes == 0


@on_ranks(2)
def test_ranks_that_miss_one_in_a_proof_go_on(rank: int) -> None:
    """It has failed on the way, and the vote says why."""

    def raising(*args: Any, **options: Any) -> Any:
        if rank == 1 and "out" not in options:
            raise RuntimeError("planted")
        return algorithms["fused"](*args, **options)

    algorithms = dict(explain.algorithms_of(OP))
    with gpu_heaps(TIMEOUT_S="4") as (ours, _):
        wrong = proof.prove(OP, "fused", algorithms | {"fused": raising}, torch.float32, ours, uneven=False)
    assert "rank 1 raised RuntimeError: planted" in wrong
