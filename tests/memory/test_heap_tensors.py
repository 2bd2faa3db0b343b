"""Results in symmetric memory are tensors as any other: what is done with them gives the same."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from tests.helpers.heaps import NUMEL, in_child, in_heap, make_heap


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
