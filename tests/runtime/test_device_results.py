"""The heap of results of a GPU, in the memory of this process: lifetimes, reuse in the order of streams, quarantine.

What it is on a GPU is where its memory is, and what the streams are; tests/algorithms/test_schedule_in_place.py has
their order.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from fusedcomm.errors import PeerTimeoutError
from fusedcomm.runtime import device_results
from fusedcomm.runtime.device_results import ALIGNMENT, LEAST_BYTES, DeviceResults
from fusedcomm.runtime.segment import TIMED_OUT
from fusedcomm.testing.virtual import VirtualGroup

KIB = 1 << 10


class OneStream:
    """The current stream, as its handle."""

    def __init__(self) -> None:
        self.current = 0


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> OneStream:
    found = OneStream()
    monkeypatch.setattr(DeviceResults, "_stream", lambda heap: found.current)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_in_use() -> Iterator[None]:
    yield
    gc.collect()
    for heap in list(device_results._in_use):
        heap.give_back()
    assert not device_results._in_use


def heap_of(num_bytes: int, least_bytes: int = 1) -> tuple[DeviceResults, Tensor]:
    """A heap, and all of its memory."""
    memory = torch.zeros(num_bytes, dtype=torch.uint8)

    def tensor_at(offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        storage = (ctypes.c_char * num_bytes).from_address(memory.data_ptr() + offset)
        return torch.frombuffer(storage, dtype=torch.uint8).view(dtype).view(*shape)

    return DeviceResults([torch.zeros(1), memory], 1, tensor_at, owner=memory, least_bytes=least_bytes), memory


def test_a_result_is_a_tensor_in_the_heap(stream: OneStream) -> None:
    heap, memory = heap_of(64 * KIB)
    t = heap.empty([3, 5], torch.float32)
    assert t.shape == (3, 5) and t.is_contiguous() and t.dtype == torch.float32
    place = heap.place(t)
    assert place == 0
    t.fill_(2)
    assert (memory[:60].view(torch.float32) == 2).all() and not memory[60:].any()
    other = heap.empty([1], torch.bfloat16)
    assert heap.place(other) == ALIGNMENT
    assert heap.addresses.tolist()[1] == memory.data_ptr()


def test_a_block_is_used_again_when_nothing_holds_its_tensor(stream: OneStream) -> None:
    heap, _ = heap_of(64 * KIB)
    t = heap.empty([16, KIB], torch.uint8)
    view = t[3:4].view(torch.bfloat16)
    del t
    assert heap.place(heap.empty([16, KIB], torch.uint8)) == 16 * KIB
    del view
    assert heap.place(heap.empty([16, KIB], torch.uint8)) == 0


def test_a_block_stays_its_stream_s(stream: OneStream) -> None:
    """Another stream is not behind what used it."""
    heap, _ = heap_of(32 * KIB)
    first = heap.empty([16 * KIB], torch.uint8)
    del first
    stream.current = 1
    second = heap.empty([16 * KIB], torch.uint8)
    assert heap.place(second) == 16 * KIB
    third = heap.empty([16 * KIB], torch.uint8)
    assert heap.place(third) is None  # the first half is not this stream's
    stream.current = 0
    assert heap.place(heap.empty([16 * KIB], torch.uint8)) == 0


def test_other_results_are_in_ordinary_memory(stream: OneStream) -> None:
    heap, _ = heap_of(2 * LEAST_BYTES, least_bytes=LEAST_BYTES)
    for num_bytes in (0, LEAST_BYTES - 1, 3 * LEAST_BYTES):
        t = heap.empty([num_bytes], torch.uint8)
        assert t.shape == (num_bytes,) and heap.place(t) is None
    assert heap.place(heap.empty([LEAST_BYTES], torch.uint8)) == 0


def test_a_retired_heap_gives_out_no_block(stream: OneStream) -> None:
    """A peer that was stopped may still write to one that was posted. Tensors stay as they are."""
    heap, memory = heap_of(32 * KIB)
    held = heap.empty([KIB], torch.float32).fill_(7)
    dropped = heap.empty([KIB], torch.float32)
    del dropped
    heap.retire()
    assert heap.place(held) is None
    new = heap.empty([KIB], torch.float32).data_ptr()
    assert not memory.data_ptr() <= new < memory.data_ptr() + memory.nbytes
    assert (held == 7).all()


def test_a_failed_call_retires_the_heap(stream: OneStream) -> None:
    """A kernel has found the failure, which the host learns of in its next call: no block is posted from then on."""
    workspace = VirtualGroup(2, KIB, "cpu").workspaces[0]
    heap, _ = heap_of(32 * KIB)
    workspace.results = heap
    held = heap.empty([KIB], torch.float32)
    workspace.check("op")
    assert heap.place(held) == 0
    workspace.record.fill(TIMED_OUT, 1, 0, 7, [0, 0], [1])
    with pytest.raises(PeerTimeoutError):
        workspace.check("op")
    assert heap.place(held) is None


def test_a_heap_that_was_dropped_lives_as_long_as_its_tensors(stream: OneStream) -> None:
    heap, memory = heap_of(32 * KIB)
    held = heap.empty([KIB], torch.float32).fill_(7)
    finalised = list[int]()
    token = type("Token", (), {"__del__": lambda self: finalised.append(1)})()
    heap._owner = [memory, token]
    del token, memory
    heap.retire()
    heap.give_back()
    del heap
    gc.collect()
    assert (held == 7).all() and not finalised
    del held
    other, _ = heap_of(KIB)
    other.give_back()  # any heap lets go of it
    gc.collect()
    assert finalised == [1]
