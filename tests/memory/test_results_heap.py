"""Results in symmetric memory: which of them are there, when they go, what a forked child sees, and their memory."""

import ctypes
import gc
import itertools
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from tests.helpers.groups import empty_is_nan
from tests.helpers.symmetric_memory import BYTES, CPU, MB, NUMEL, PAGE, in_heap, make_heap, native, places

ROOT = Path(__file__).parents[2]
SPAN = 1024  # results from one look at what is needed to the next: kernels/cpu/heap_memory.h


def stats(heap: Any) -> tuple[int, int, int, int]:
    return heap.live_bytes, heap.free_bytes, heap.warm_bytes, heap.num_blocks


# Which results are in the heap
def test_the_heap_grows_for_results_that_are_freed() -> None:
    heap = make_heap()
    seen = [heap.place(heap.empty([NUMEL], torch.float32)) for _ in range(5)]
    assert seen == [None, None, 0, 0, 0]
    assert stats(heap) == (0, BYTES, BYTES, 0)


def test_it_never_grows_for_results_that_are_kept() -> None:
    heap = make_heap()
    kept = [heap.empty([NUMEL], torch.float32) for _ in range(50)]
    assert places(heap, kept) == [None] * 50 and stats(heap) == (0, 0, 0, 0)
    del kept[:20]  # fewer than are kept
    kept.append(heap.empty([NUMEL], torch.float32))
    assert places(heap, kept) == [None] * 31


def test_what_does_not_fit_is_in_ordinary_memory() -> None:
    heap = make_heap(4 * PAGE)
    a = in_heap(heap, 3 * PAGE // 4)
    for _ in range(4):
        assert heap.place(heap.empty([3 * PAGE], torch.uint8)) is None
        assert heap.place(heap.empty([1, 5, PAGE], torch.uint8)) is None
    assert heap.live_bytes == 3 * PAGE and heap.place(a) == 0


def test_shapes_and_dtypes() -> None:
    heap = make_heap()
    in_heap(heap)
    for sizes, dtype in [([], torch.float64), ([3, 0, 2], torch.int8), ([2, 3, 4], torch.bfloat16)]:
        t = heap.empty(sizes, dtype)
        assert (list(t.shape), t.dtype, t.device, t.stride()) == (sizes, dtype, CPU, torch.empty(sizes).stride())
        assert t.untyped_storage().nbytes() == t.numel() * t.itemsize and not t.requires_grad
        assert heap.place(t) == (0 if t.numel() else None)
        del t
    with pytest.raises(RuntimeError, match="negative dimension"):
        heap.empty([-1], torch.int8)
    with pytest.raises(RuntimeError, match="overflow"):
        heap.empty([1 << 40, 1 << 40], torch.int8)


def test_random_programs_keep_their_values() -> None:
    heap = make_heap(64 * PAGE)
    choose = random.Random(0)
    live: list[tuple[Tensor, int]] = []
    num_placed = 0
    for step in range(3000):
        if live and choose.random() < 0.5:
            t, value = live.pop(choose.randrange(len(live)))
            assert (t == value).all()
            del t
        elif len(live) < 24:
            t = heap.empty([choose.randint(1, 6 * PAGE)], torch.int8)
            live.append((t.fill_(step % 127), step % 127))
        if step % 500 == 499:
            heap.trim(choose.randrange(64) * PAGE)
        placed = sorted((heap.place(t), -(-t.numel() // PAGE) * PAGE) for t, _ in live if heap.place(t) is not None)
        num_placed += len(placed)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(placed))
        assert heap.live_bytes == sum(size for _, size in placed) and heap.num_blocks == len(placed)
    assert num_placed > 3000
    assert all((t == value).all() for t, value in live)
    live.clear()
    t = torch.empty(0)
    assert heap.live_bytes == 0 and heap.free_bytes == heap.warm_bytes


# When and where they go
def test_tensors_outlive_heap_and_segment_and_then_memory_goes() -> None:
    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("/memfd:fusedcomm-")

    before = mapped()
    heap = make_heap()
    block, ordinary = in_heap(heap).fill_(3), heap.empty([4 * NUMEL], torch.float32)
    assert mapped() == before + 1
    del heap
    assert (block == 3).all() and mapped() == before + 1
    del block
    assert mapped() == before  # for a result in ordinary memory no segment stays
    ordinary.fill_(1)


AT_THE_END = """
import torch
from tests.helpers.groups import empty_is_nan
from tests.helpers.symmetric_memory import in_heap, make_heap

heap = make_heap()
t = in_heap(heap)
t.itself = t
held = torch.ones(t.numel(), requires_grad=True) * in_heap(heap)
array = in_heap(heap).numpy()
torch.kept = in_heap(heap)
print("done")
"""


@pytest.mark.thorough
def test_an_interpreter_ends_with_live_results() -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", AT_THE_END]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# Memory
def segment_blocks() -> int:
    """Bytes of this process's segments that the system holds."""
    gc.collect()
    held = {}
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if os.path.islink(path) and os.readlink(path).startswith("/memfd:fusedcomm-"):
            held[os.readlink(path)] = os.stat(path).st_blocks * 512
    return sum(held.values())


def test_results_of_a_retired_heap_stay_and_none_follow() -> None:
    heap = make_heap()
    t = in_heap(heap).fill_(1)
    in_heap(heap)
    heap.retire()
    assert heap.place(t) is None
    others = [heap.empty([NUMEL], torch.float32).fill_(2) for _ in range(4)]
    assert places(heap, others) == [None] * 4 and (t == 1).all()
    address = t.data_ptr()
    del t
    assert heap.live_bytes == 0
    assert address not in [heap.empty([NUMEL], torch.float32).data_ptr() for _ in range(4)]


def test_a_heap_gives_back_what_a_program_needs_no_more() -> None:
    before = segment_blocks()
    heap = make_heap(64 * MB)
    in_heap(heap, 8 * MB)
    in_heap(heap)
    assert segment_blocks() - before == 32 * MB
    for _ in range(3 * SPAN):
        heap.empty([NUMEL], torch.float32)
    assert stats(heap) == (0, 2 * BYTES, 2 * BYTES, 0) and segment_blocks() - before == 2 * BYTES
    t = in_heap(heap, 8 * MB).fill_(1)
    assert segment_blocks() - before == 32 * MB and (t == 1).all()


def test_small_results_take_no_blocks() -> None:
    heap = make_heap(least_bytes=PAGE)
    in_heap(heap)
    results = [heap.empty([n], torch.uint8) for n in (1, PAGE - 1, PAGE)]
    assert places(heap, results) == [None, None, 0] and heap.num_blocks == 1
    with empty_is_nan():
        assert heap.empty([3], torch.float32).isnan().all()


def test_a_heap_in_pieces_costs_no_long_search() -> None:
    heap = make_heap(256 * MB)
    num_holes = 10_000

    def seconds() -> float:
        in_heap(heap)
        took = []
        for _ in range(200):
            start = time.perf_counter()
            heap.empty([NUMEL], torch.float32)
            took.append(time.perf_counter() - start)
        return min(took)

    in_one_piece = seconds()
    kept: list[Tensor] = []
    while heap.num_blocks < 2 * num_holes - 10:  # the heap grows for results that are freed
        kept.clear()
        kept += [heap.empty([1], torch.float32) for _ in range(2 * num_holes)]
    del kept[::2]
    assert heap.free_bytes >= num_holes * PAGE
    in_pieces = seconds()
    assert in_pieces < 10 * in_one_piece  # 50 times without a bound
    assert heap.place(heap.empty([NUMEL], torch.float32)) is not None  # behind the pieces


def page_faults(address: int, num_bytes: int) -> int:
    """Page faults of this thread that writing takes."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ctypes.memset(address, 1, num_bytes)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_a_block_is_warm_before_it_is_written() -> None:
    heap = make_heap(16 * MB)
    t = in_heap(heap, MB)
    assert heap.warm_bytes == 4 * MB and page_faults(t.data_ptr(), 4 * MB) < 20
    cold = symm_mem.empty(4 * MB, dtype=torch.uint8, device=CPU)
    assert page_faults(cold.data_ptr(), 4 * MB) > 4 * MB // PAGE // 64  # control, however many are mapped at once


# What no heap can be in
def test_other_memory_is_refused() -> None:
    segment = symm_mem.empty(4 * PAGE, dtype=torch.uint8, device=CPU)
    for wrong in (torch.empty(4 * PAGE, dtype=torch.uint8), segment[100:]):
        with pytest.raises(ValueError, match="must begin at a page of this rank's symmetric memory"):
            native.ResultsHeap(wrong, 0)
    for wrong in (segment.view(torch.int8), segment.view(4, -1).t(), segment.to("meta")):
        with pytest.raises(ValueError, match="must be a contiguous uint8 tensor on CPU"):
            native.ResultsHeap(wrong, 0)


def test_memory_in_use_by_another_heap_is_refused() -> None:
    segment = symm_mem.empty(8 * PAGE, dtype=torch.uint8, device=CPU)
    first = native.ResultsHeap(segment[: 4 * PAGE], 0)
    native.ResultsHeap(segment[4 * PAGE :], 0)
    t = in_heap(first, 4)
    del first
    with pytest.raises(ValueError, match="in use by another heap"):
        native.ResultsHeap(segment, 0)
    del t
    assert native.ResultsHeap(segment, 0).warm_bytes == 0
