"""What `chunked` and `fused` enqueue on GPUs, recorded without one, has no race, and planted ones are found.

Nothing here runs on a GPU; tests/helpers/schedule has the recorder and the checker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fusedcomm.memory import launch_order, segment
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import fused, launches
from fusedcomm.plan.builder import Builder, Device
from fusedcomm.plan.moves import Moves
from tests.helpers.problems import Problem
from tests.helpers.schedule.blocked_waits import blocked_waits
from tests.helpers.schedule.happens_before import HappensBefore, races
from tests.helpers.schedule.multiprocessors import KERNELS, Footprint
from tests.helpers.schedule.operations import Kind, Recording
from tests.helpers.schedule.programs import Program, World, call, calls, on_two_streams
from tests.helpers.tiers import thorough_but

ALGORITHMS = ("chunked", "fused")
PROBLEMS = [  # with backward each of them takes two rounds or more in slots of SLOT_BYTES for each rank
    Problem("tokens-to-heads", (2, 128, 256), 256, 1, 2, out_shape=(4, 64), bias=True),
    Problem("heads-to-tokens", (2, 128, 2, 64), 256, 2, 1, op="all_to_all_matmul", k_dims=2),
    Problem("rows-to-columns", (128, 256), 256, 1, 0, op="all_to_all_matmul", bias=True),
    Problem("rows", (256, 128), (256, 128), 0, op="all_gather_matmul", bias=(True, False)),
    Problem("columns", (256, 128), 256, 1, op="all_gather_matmul"),
    Problem("rows", (256, 128), 256, scatter_dim=0, op="matmul_reduce_scatter", bias=True),
    Problem("sum", (512, 128), 256, op="matmul_all_reduce"),
]
SLOT_BYTES = 1 << 15  # for each rank
LARGE = [  # one round each, but with tiles for all SMs
    Problem("tokens-to-heads", (2048, 256), 2048, 0, 1),
    Problem("heads-to-tokens", (2048, 256), 8192, 1, 0, op="all_to_all_matmul"),
    Problem("rows", (2048, 256), 2048, scatter_dim=0, op="matmul_reduce_scatter"),
]
FEW_ROWS = [
    Problem("few-rows", (16, 128), 256, 0, 1),
    Problem("few-rows", (16, 128), 256, 0, op="all_gather_matmul"),
    Problem("few-rows", (16, 128), 256, scatter_dim=0, op="matmul_reduce_scatter"),
    Problem("no-rows", (0, 8), 8, 1, 0),
    Problem("no-rows", (0, 8), 8, 0, op="all_gather_matmul"),
]
BATCHED = Problem("batched-w", (4, 64, 128), 256, 1, 2, batched=True)


def found(world: World, program: Program) -> list[str]:
    return races(HappensBefore(world.record(program)))


def world_of(group_size: int, algorithm: str, num_groups: int = 1) -> World:
    return World(group_size, SLOT_BYTES * group_size, algorithm, num_groups)


def large_world(group_size: int, algorithm: str, num_groups: int = 1) -> World:
    return World(group_size, 1 << 26, algorithm, num_groups)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("group_size", thorough_but([2], [2, 3]))
def test_nothing_races(group_size: int, algorithm: str) -> None:
    """Every op, forward and backward, in several rounds."""
    assert not found(world_of(group_size, algorithm), calls(PROBLEMS))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("program", [calls, on_two_streams])
def test_two_groups_do_not_race(program: Any, algorithm: str) -> None:
    assert not found(world_of(2, algorithm, num_groups=2), program(PROBLEMS[::3]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_dtypes_and_batches_do_not_race(algorithm: str) -> None:
    """In float32 a gather of K adds up sources as they come; the parts of a batched w are rows of their own."""
    world = world_of(3, algorithm)
    assert not found(world, calls([Problem("k", (256, 64), 128, 1, op="all_gather_matmul")], torch.float32))
    assert not found(world, calls([BATCHED]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rounds_with_few_rows_or_none_do_not_race(algorithm: str) -> None:
    """One matmul for all chunks; and rounds in which there is nothing to send but signals."""
    assert not found(world_of(3, algorithm), calls(FEW_ROWS))


def test_collectives_of_nccl_are_joined() -> None:
    assert not found(world_of(2, "unfused"), calls(PROBLEMS))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_edge_that_is_taken_away_is_found(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one operation at a time, on all ranks, unless others say the same.

    A kernel that waits for this rank's own signal, its last one, comes after all that the side stream did before.
    """
    monkeypatch.setattr(Workspace, "least_copied", 0)
    recordings = world_of(2, algorithm).record(calls(PROBLEMS[:2]))
    needed, forks = 0, []
    for operation in [each for each in recordings[0].operations if each.after and each.stream >= 0]:
        with without_edges(recordings, operation.number):
            texts = races(HappensBefore(recordings))
        needed += bool(texts)
        same_stream = all(recordings[0].operations[number].stream == operation.stream for number in operation.after)
        to_itself = [flag for step in operation.steps for flag in step.signals if flag.dst_rank == flag.src_rank]
        fork = operation.name == "begin_push_kernel"  # a push sends nothing that the caller has made
        forks += [bool(texts)] * fork
        at_the_end = operation.kind is Kind.ALLOC  # the end of a call whose tensors live on
        assert texts or same_stream or operation.waits or to_itself or fork or at_the_end, str(operation)
    assert needed >= 7
    assert any(forks) is (algorithm == "chunked")  # whose gathers send x, which comes before READS and so before SENDS


@contextmanager
def without_edges(recordings: Sequence[Recording], number: int) -> Iterator[None]:
    kept = [recording.operations[number].after for recording in recordings]
    for recording in recordings:
        recording.operations[number].after = []
    yield
    for recording, after in zip(recordings, kept, strict=True):
        recording.operations[number].after = after


def test_signals_by_kernels_do_not_race() -> None:
    """Each reads the epoch on the device: no round may end before it."""
    world = dataclasses.replace(world_of(3, "chunked"), writes_words=False)
    assert not found(world, calls(PROBLEMS))


def test_a_round_that_ends_before_its_signals_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own signal, sent first, no longer says that the others are sent."""
    signal = Moves._signal

    def own_first(self: Moves, dst_rank: int) -> None:
        if dst_rank == self.peers[0]:
            signal(self, self.rank)
        if dst_rank != self.rank:
            signal(self, dst_rank)

    monkeypatch.setattr(Moves, "_signal", own_first)
    world = dataclasses.replace(world_of(3, "chunked"), writes_words=False)
    assert any("race" in text and "signal_kernel" in text for text in found(world, calls(PROBLEMS[:1], backward=False)))


PUSH, ROWS, COLUMNS, SUM = PROBLEMS[0], PROBLEMS[3], PROBLEMS[4], PROBLEMS[6]


def test_memory_that_nobody_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose end does not come after its copies."""
    monkeypatch.setattr(Moves, "end", lambda self: None)
    texts = found(world_of(2, "chunked"), calls(PROBLEMS[:1], backward=False))
    assert texts and all("memory is used again too early" in text for text in texts)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_single_slot_is_a_race(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "NUM_SLOTS", 1)
    texts = found(world_of(2, algorithm), calls(PROBLEMS[:1], backward=False))
    assert any("race" in text and "segment" in text for text in texts)


def test_a_missing_signal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    signal = Moves._signal

    def never_first(self: Moves, dst_rank: int) -> None:
        if self.rank != 0:
            signal(self, dst_rank)

    monkeypatch.setattr(Moves, "_signal", never_first)
    texts = found(world_of(2, "chunked"), calls(PROBLEMS[:1], backward=False))
    assert any("nobody signals" in text and "src_rank=0" in text for text in texts)


def blocked(world: World, program: Program) -> list[str]:
    return blocked_waits(HappensBefore(world.record(program)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("group_size", thorough_but([2], [2, 4]))
def test_no_wait_is_blocked(group_size: int, algorithm: str) -> None:
    assert not blocked(large_world(group_size, algorithm, num_groups=2), on_two_streams(LARGE))


STRIDED = [  # the part for a peer is in runs that copy engines do not take
    Problem("rows", (2048, 4096), 8192, 0, 1, op="all_to_all_matmul"),
    Problem("heads", (2048, 16, 256), 8192, 1, 2, op="all_to_all_matmul", k_dims=2),
]


@pytest.mark.parametrize("problem", STRIDED, ids=str)
def test_strided_copies_beside_a_gather_that_leaves_no_registers(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such copies are kernels of torch: beside a gather on all SMs they may find no room, but its pack has its own."""
    monkeypatch.setitem(KERNELS, "gather_matmul_kernel", Footprint(8, 255, 229_408))
    program = calls([problem], backward=False)
    assert not blocked(large_world(2, "fused"), program)
    monkeypatch.setattr(fused, "copy_engines_send", lambda *args: True)
    assert any("copy_" in text and "may find no room" in text for text in blocked(large_world(2, "fused"), program))


def test_waits_in_opposite_orders_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the order of `launch_order`, one group's copy-out holds the SMs that the other group's push needs."""
    monkeypatch.setattr(Device, "num_programs", lambda self, kind: self.num_sms)
    monkeypatch.setattr(launches, "_LEAST_ALONE", 1 << 62)

    def program(recorder: Any) -> None:
        streams = [torch.cuda.Stream() for _ in recorder.groups]
        for stream, group in zip(streams, recorder.groups.values(), strict=True):
            launch_order._orders.clear()
            with torch.cuda.stream(stream):
                call(LARGE[0], recorder, group, torch.bfloat16, backward=False)

    texts = blocked(large_world(2, "fused", num_groups=2), program)
    assert any("push_matmul_kernel may find no room" in text for text in texts)


def beside_nccl(recorder: Any) -> None:
    group = next(iter(recorder.groups.values()))
    total = torch.ops._c10d_functional.all_reduce(recorder.tensor(1024), "sum", group.name)
    call(LARGE[1], recorder, group, torch.bfloat16, backward=False)
    torch.ops._c10d_functional.wait_tensor(total)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_gather_beside_nccl_is_not_blocked(algorithm: str) -> None:
    world = large_world(2, algorithm)
    assert not found(world, beside_nccl) and not blocked(world, beside_nccl)


def test_a_gather_behind_its_pack_is_not_blocked_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel sends a small chunk, or one in a graph."""
    monkeypatch.setattr(Workspace, "least_copied", 1 << 62)
    assert not found(large_world(2, "fused"), beside_nccl) and not blocked(large_world(2, "fused"), beside_nccl)


@pytest.mark.parametrize("group_size", thorough_but([2], [2, 3]))
def test_copies_of_a_fused_gather_do_not_race(group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those by copy engines, which smaller chunks than these do not take."""
    monkeypatch.setattr(Workspace, "least_copied", 0)
    assert not found(world_of(group_size, "fused"), calls(PROBLEMS))


def test_a_copy_engine_that_starts_before_the_last_round_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workspace, "least_copied", 0)
    send = fused._send

    def early(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Builder, "join", lambda *args: None)
            return send(*args)

    monkeypatch.setattr(fused, "_send", early)
    assert any("race" in text for text in found(world_of(2, "fused"), calls(PROBLEMS[1:4], backward=False)))
