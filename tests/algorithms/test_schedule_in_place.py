"""Results in place on GPUs, recorded without one: peers write where nothing else does, and blocks are reused in order.

Every post is found in these recordings. tests/helpers/schedule has the recorder and the checker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusedcomm.algorithms.in_place import FusedResult
from fusedcomm.runtime import signals
from fusedcomm.runtime.device_results import DeviceResults, FreeBlock
from tests.helpers.problems import Problem
from tests.helpers.schedule.happens_before import HappensBefore, races
from tests.helpers.schedule.kernel_effects import Group
from tests.helpers.schedule.operations import Recording
from tests.helpers.schedule.programs import Program, World, calls
from tests.helpers.schedule.recorder import Recorder
from tests.helpers.tiers import thorough_but

PROBLEM = Problem("tokens-to-heads", (2, 128, 256), 256, 1, 2, out_shape=(4, 64), bias=True)
SLOT_BYTES = 1 << 15  # for each rank: a call takes several rounds
RESULT_BYTES = 2 * 128 * 256 * 2


def world_of(group_size: int, num_results: int = 2, num_groups: int = 1) -> World:
    size = num_results * RESULT_BYTES
    return World(group_size, SLOT_BYTES * group_size, "fused", num_groups, results_bytes=size)


def called(recorder: Recorder, group: Group) -> Tensor:
    """The result of a call with fresh inputs."""
    x, w, bias = recorder.tensor(2, 128, 256), recorder.tensor(256, 256), recorder.tensor(256)
    name, even = (len(group.ranks), group.name), (None,) * 5
    out: Tensor = torch.ops.fusedcomm.matmul_all_to_all(x, w, bias, [4, 64], 1, 2, *even, *name)
    return out


def reading(streams: int = 1, num_calls: int = 4, read: Callable[[Tensor], Any] = torch.sum) -> Program:
    """Calls on streams by turns, each of whose results is read and dropped."""

    def program(recorder: Recorder) -> None:
        turns = [torch.cuda.Stream() for _ in range(streams)]
        for i in range(num_calls):
            with torch.cuda.stream(turns[i % streams]):
                for group in recorder.groups.values():
                    read(called(recorder, group))

    return program


def found(world: World, program: Program) -> list[str]:
    return races(HappensBefore(world.record(program)))


def places(recordings: list[Recording]) -> set[tuple[str, int]]:
    """The memories and first bytes that pushes write in heaps."""
    pushes = [each for recording in recordings for each in recording.operations if each.name == "push_matmul_kernel"]
    steps = [step for push in pushes for step in push.steps]
    return {(region.memory, region.start) for step in steps for region in step.writes if "heap" in region.memory}


@pytest.mark.parametrize("group_size", thorough_but([2], [2, 4]))
def test_nothing_races_in_place(group_size: int) -> None:
    recordings = world_of(group_size, num_results=1).record(reading())
    assert {memory for memory, _ in places(recordings)} == {f"heap of rank {r} in group 0" for r in range(group_size)}
    assert not races(HappensBefore(recordings))


def test_backwards_and_two_groups_do_not_race() -> None:
    assert not found(world_of(2, num_groups=2), calls([PROBLEM, PROBLEM]))


def test_two_streams_do_not_race() -> None:
    """Each gets blocks of its own; where there is none left, the result is in ordinary memory."""
    assert not found(world_of(2), reading(streams=2))
    assert not found(world_of(2, num_results=1), reading(streams=2))


def test_a_block_that_is_used_again_on_another_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call waits for the last one by an edge, but not for who has read the result since."""

    def taken(self: Any, num_bytes: int, stream: int) -> FreeBlock:
        (block,) = self._free
        self._free = []
        return block

    monkeypatch.setattr(DeviceResults, "_take", taken)
    texts = found(world_of(2, num_results=1), reading(streams=2))
    assert texts and all("race" in text and "heap" in text for text in texts)


def test_a_post_before_the_reads_of_the_last_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes ahead on a stream of its own."""
    post = signals.post

    def early(place: int, num_bytes: int, workspace: Any, fingerprint: int) -> None:
        with torch.cuda.stream(workspace.reading_stream()):
            post(place, num_bytes, workspace, fingerprint)

    monkeypatch.setattr(signals, "post", early)
    assert any("race" in text and "heap" in text for text in found(world_of(2, num_results=1), reading()))


def test_a_round_without_a_post_is_copied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedResult, "post", lambda self, spans: False)
    recordings = world_of(2).record(reading())
    assert not places(recordings) and not races(HappensBefore(recordings))


def test_a_reader_on_another_stream_must_be_joined() -> None:
    """`record_stream` cannot tell the heap, as it tells torch's allocator: docs/configuration.md says so."""

    def aside(joined: bool) -> Callable[[Tensor], None]:
        def read(out: Tensor) -> None:
            main, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                out.sum()
            out.record_stream(side)
            if joined:
                main.wait_stream(side)

        return read

    world = world_of(2, num_results=1)
    assert not found(world, reading(read=aside(joined=True)))
    assert any("race" in text and "heap" in text for text in found(world, reading(read=aside(joined=False))))
