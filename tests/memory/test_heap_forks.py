"""Results in the heap: children of a process have memory of their own; and results behave as other tensors."""

import gc
import io
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from tests.helpers.symmetric_memory import BYTES, CHILD_S, MB, NUMEL, in_child, in_heap, make_heap, places
from tests.helpers.waiting import wait_until


def test_a_child_writes_into_memory_of_its_own() -> None:
    heap = make_heap()
    t = in_heap(heap).fill_(1)
    later = in_heap(make_heap()).fill_(2)  # in another heap

    def write() -> bool:
        seen = bool((t == 1).all() and (later == 2).all())
        t.fill_(3)
        later.fill_(4)
        return seen and bool((t == 3).all() and (later == 4).all())

    assert in_child(write) == 0
    assert (t == 1).all() and (later == 2).all()


def test_a_child_of_a_child_keeps_what_the_child_wrote() -> None:
    t = in_heap(make_heap()).fill_(1)

    def write() -> bool:
        t.fill_(2)
        inner = in_child(lambda: bool((t == 2).all()) and bool((t.fill_(3) == 3).all()))
        return inner == 0 and bool((t == 2).all())

    assert in_child(write) == 0
    assert (t == 1).all()


def test_a_child_hands_out_no_blocks() -> None:
    heap = make_heap()
    t = in_heap(heap)
    in_heap(heap)

    def use() -> bool:
        results = [heap.empty([NUMEL], torch.float32).fill_(5) for _ in range(4)]
        return places(heap, [t, *results]) == [None] * 5 and make_heap().live_bytes == 0

    assert in_child(use) == 0
    assert heap.place(t) == 0 and heap.place(heap.empty([NUMEL], torch.float32)) == BYTES


def test_a_block_that_a_child_may_read_is_not_used_again() -> None:
    heap = make_heap()
    t = in_heap(heap).fill_(1)
    in_heap(heap)
    to_child, from_parent = os.pipe()[::-1]
    pid = os.fork()
    if pid == 0:
        os.close(to_child)
        os.read(from_parent, 1)  # until the parent has used its heap again
        os._exit(0 if (t == 1).all() else 1)
    os.close(from_parent)
    del t
    others = [heap.empty([NUMEL], torch.float32).fill_(7) for _ in range(20)]
    assert 0 not in places(heap, others) and BYTES in places(heap, others)
    os.close(to_child)
    assert os.waitpid(pid, 0)[1] == 0


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_blocks_that_children_have_seen_are_used_again_when_those_are_gone() -> None:
    """A program that forks workers in each epoch, while results live."""
    heap = make_heap(16 * MB)
    in_heap(heap, MB // 4)
    for _ in range(20):
        t = heap.empty([MB // 4], torch.float32)
        assert in_child(lambda: True) == 0
        del t
        for _ in range(3):
            heap.empty([MB // 4], torch.float32)
    assert heap.held_bytes <= MB and heap.warm_bytes <= 2 * MB
    assert heap.place(heap.empty([MB // 4], torch.float32)) is not None


def test_a_child_of_a_child_keeps_what_it_has_seen_too() -> None:
    """All of them may close their descriptors."""
    heap = make_heap()
    t = in_heap(heap).fill_(1)
    to_child, from_parent = os.pipe()[::-1]
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S)
        inner = os.fork()
        if inner:
            os._exit(0)
        signal.alarm(CHILD_S)  # which no child inherits
        os.dup2(from_parent, 3)
        os.dup2(tells, 4)
        os.closerange(5, 1 << 20)
        os.read(3, 1)
        os.write(4, b"1" if (t == 1).all() else b"0")
        os._exit(0)
    os.close(from_parent)
    os.close(tells)
    assert os.waitpid(child, 0)[1] == 0
    del t
    for _ in range(5):
        heap.empty([NUMEL], torch.float32).fill_(7)
    assert heap.held_bytes == BYTES
    os.close(to_child)
    assert os.read(told, 1) == b"1"
    os.close(told)


def test_a_program_that_a_child_begins_has_seen_nothing() -> None:
    heap = make_heap(BYTES)  # for one block
    t = in_heap(heap)
    child = os.fork()
    if child == 0:
        os.execvp("sleep", ["sleep", str(CHILD_S)])
    del t
    wait_until(lambda: heap.place(heap.empty([NUMEL], torch.float32)) == 0)
    assert heap.held_bytes == 0
    end(child)


def test_a_fork_while_threads_use_the_heap() -> None:
    heap = make_heap()
    t = in_heap(heap)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            heap.empty([NUMEL], torch.float32)
            heap.trim(0)  # without the GIL, so that forks come at any time

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        ended = [in_child(lambda: heap.place(t) is None and heap.empty([9], torch.int8) is not None) for _ in range(25)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert ended == [0] * 25


def resized(t: Tensor) -> object:
    t.resize_(100_000)
    return t[:NUMEL].tolist(), t.untyped_storage().nbytes()


def set_to_another(t: Tensor) -> object:
    return t.set_(torch.arange(3.0)).tolist()  # type: ignore[call-overload]


def saved_and_loaded(t: Tensor) -> object:
    file = io.BytesIO()
    torch.save({"whole": t, "part": t[:3]}, file)
    file.seek(0)
    return [each.tolist() for each in torch.load(file).values()]


def shared(t: Tensor) -> object:
    before = t.is_shared()
    t.share_memory_()
    return before, t.is_shared(), in_child(lambda: t.add_(1).numel()), t.tolist()


def saved_for_backward(t: Tensor) -> object:
    weight = torch.ones(NUMEL, requires_grad=True)
    product = (weight * t).sum()
    del t
    gc.collect()
    product.backward()
    return weight.grad.tolist()


def shared_with_numpy(t: Tensor) -> object:
    array = t.numpy()
    t.add_(1)
    del t
    gc.collect()
    array += 1
    return array.tolist()


BEHAVIOURS = [resized, set_to_another, saved_and_loaded, shared, saved_for_backward, shared_with_numpy]


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_results_behave_as_other_tensors(behaviour: Callable[[Tensor], object]) -> None:
    heap = make_heap()
    values = torch.arange(float(NUMEL))
    expected = behaviour(values.clone())
    assert behaviour(heap.empty([NUMEL], torch.float32).copy_(values)) == expected  # in ordinary memory
    assert behaviour(in_heap(heap).copy_(values)) == expected
    gc.collect()
    assert (heap.live_bytes, heap.num_blocks) == (0, 0)


@pytest.mark.parametrize("change", [resized, set_to_another, Tensor.share_memory_])
def test_a_storage_that_leaves_the_heap_gives_its_block_back(change: Callable[[Tensor], object]) -> None:
    heap = make_heap()
    t = in_heap(heap)
    change(t)
    assert heap.place(t) is None and heap.live_bytes == 0
