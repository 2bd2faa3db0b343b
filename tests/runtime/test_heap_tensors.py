"""Results in symmetric memory are tensors as any other: what is done with them gives the same."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from tests.helpers.heaps import NUMEL, in_child, in_heap, make_heap


def resized(t: Tensor) -> object:
    t.resize_(100_000)
    return t[:NUMEL].tolist(), t.untyped_storage().nbytes()


def storage_freed(t: Tensor) -> object:
    t.untyped_storage().resize_(0)
    return t.untyped_storage().nbytes(), t.shape


def storage_freed_and_back(t: Tensor) -> object:
    t.untyped_storage().resize_(0)
    t.untyped_storage().resize_(4 * NUMEL)
    return t.fill_(2).tolist()


def set_to_another(t: Tensor) -> object:
    return t.set_(torch.arange(3.0)).tolist()  # type: ignore[call-overload]


def data_of_another(t: Tensor) -> object:
    t.data = torch.arange(3.0)
    return t.tolist()


def deep_copied(t: Tensor) -> object:
    other = copy.deepcopy(t)
    t.zero_()
    return other.tolist()


def saved_and_loaded(t: Tensor) -> object:
    file = io.BytesIO()
    torch.save({"whole": t, "part": t[:3]}, file)
    file.seek(0)
    return [each.tolist() for each in torch.load(file).values()]


def pickled(t: Tensor) -> object:
    return pickle.loads(pickle.dumps(t)).tolist()


def shared(t: Tensor) -> object:
    before = t.is_shared()
    t.share_memory_()
    return before, t.is_shared(), in_child(lambda: t.add_(1).numel()), t.tolist()


def sent_to_a_child(t: Tensor) -> object:
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(t)
    return in_child(lambda: queue.get().add_(1).numel()), t.tolist()


def viewed(t: Tensor) -> object:
    part = t.view(64, 32).t()[3:5]
    del t
    gc.collect()
    return part.tolist()


def saved_for_backward(t: Tensor) -> object:
    weight = torch.ones(NUMEL, requires_grad=True)
    product = (weight * t).sum()
    del t
    gc.collect()
    product.backward()
    return weight.grad.tolist()


def changed_after_it_was_saved(t: Tensor) -> object:
    product = torch.ones(NUMEL, requires_grad=True) * t
    t.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    return t.tolist()


def a_leaf(t: Tensor) -> object:
    t.requires_grad_().square().sum().backward()
    return t.grad.tolist()


def shared_with_numpy(t: Tensor) -> object:
    array = t.numpy()
    t.add_(1)
    del t
    gc.collect()
    array += 1
    return array.tolist()


def shared_by_dlpack(t: Tensor) -> object:
    other = torch.from_dlpack(t)
    t.add_(1)
    del t
    return other.tolist()


def in_inference_mode(t: Tensor) -> object:
    with torch.inference_mode():
        return t.add_(1).is_inference(), t.tolist()


BEHAVIOURS = [
    *(resized, storage_freed, storage_freed_and_back, set_to_another, data_of_another, deep_copied, saved_and_loaded),
    *(pickled, shared, sent_to_a_child, viewed, saved_for_backward, changed_after_it_was_saved, a_leaf),
    *(shared_with_numpy, shared_by_dlpack, in_inference_mode),
]


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_results_behave_as_other_tensors(behaviour: Callable[[Tensor], object]) -> None:
    heap = make_heap()
    values = torch.arange(float(NUMEL))
    expected = behaviour(values.clone())
    assert behaviour(heap.empty([NUMEL], torch.float32).copy_(values)) == expected  # in ordinary memory
    assert behaviour(in_heap(heap).copy_(values)) == expected
    gc.collect()
    assert (heap.live_bytes, heap.num_blocks) == (0, 0)


@pytest.mark.parametrize("change", [resized, storage_freed, set_to_another, data_of_another, Tensor.share_memory_])
def test_a_storage_that_leaves_the_heap_gives_its_block_back(change: Callable[[Tensor], object]) -> None:
    heap = make_heap()
    t = in_heap(heap)
    change(t)
    assert heap.place(t) is None and heap.live_bytes == 0
