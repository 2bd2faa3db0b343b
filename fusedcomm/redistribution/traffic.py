"""How much ranks send: of an exchange exactly, of all ways from one sharding to another at least."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fusedcomm.redistribution.sharding import Sharding, intersection, numel

if TYPE_CHECKING:
    from fusedcomm.redistribution.steps import Step

_ONE = np.ones((), np.int64)


def least_traffic(before: Sharding, after: Sharding) -> float:
    """Elements that the busiest rank sends or receives, whatever the steps.

    Nothing reduced: what a rank needs and does not hold. Else, of `parts` of an element, as many less one are sent
    until one rank has it; and each other rank that needs it receives it then. Nor can a rank keep but what it needs.
    """
    sizes = before.mesh_shape
    last = tuple(size - 1 for size in sizes)
    boxes = [(before.box(each), after.box(each)) for each in ((0,) * len(sizes), last)]
    kept = [numel(shared) if (shared := intersection(*both)) else 0 for both in boxes]
    if before.partial == after.partial:
        return max(numel(needed) - own for (_, needed), own in zip(boxes, kept, strict=True))
    parts = owners = ranks = 1
    copied = False
    for size, op, op_after, dim, dim_after in zip(
        sizes, before.partial, after.partial, before.tensor_dims, after.tensor_dims, strict=True
    ):
        if op_after is not None:
            continue  # as if each index were a tensor by itself
        ranks *= size
        parts *= size if op is not None else 1
        owners *= size if dim_after is None else 1
        copied |= op is None and dim is None and size > 1
    mean = math.prod(before.shape) * (parts + owners - 2) / ranks
    return mean if copied else max(mean, *(numel(held) - own for (held, _), own in zip(boxes, kept, strict=True)))


def exchanged(step: Step) -> tuple[float, float]:
    """Elements that a rank of the group whose other coordinates are 0 sends: on average, and the busiest.

    Each sends each other what that needs of its box; the busiest may receive more than any sends. A mesh dim cuts one
    tensor dim at most, so the sum over the others is a product over tensor dims.
    """
    before, after, group = step.before, step.after, step.mesh_dims
    sizes = [before.mesh_shape[i] if i in group else 1 for i in range(len(before.mesh_shape))]
    sent = received = shared = _ONE
    for size, dims, dims_after in zip(before.shape, before.cuts, after.cuts, strict=True):
        of_dim = _exchanged(size, before.mesh_shape, dims, dims_after, group)
        sent, received, shared = sent * of_dim[0], received * of_dim[1], shared * of_dim[2]
    copies = math.prod(size for size, dim in zip(sizes, after.tensor_dims, strict=True) if dim is None)
    parts = math.prod(size for size, dim in zip(sizes, before.tensor_dims, strict=True) if dim is None)
    sent, received = copies * sent - shared, parts * received - shared  # alike in all coordinates that they lack
    return float(sent.sum()) / sent.size, float(max(sent.max(), received.max()))


@lru_cache(maxsize=4096)
def _exchanged(
    size: int, mesh_shape: tuple[int, ...], dims: tuple[int, ...], dims_after: tuple[int, ...], group: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of one tensor dim, by coordinate: of what a rank holds, what others need; of what it needs, what others hold; and
    what it holds and needs. Others: one per coordinate of the mesh dims of the group that cut this dim."""
    num = len(mesh_shape)
    start, stop = (_of_group(each, group) for each in _ranges(size, mesh_shape, dims))
    start_after, stop_after = (_of_group(each, group) for each in _ranges(size, mesh_shape, dims_after))
    apart = (...,) + (None,) * num  # the others' coordinates are axes of their own
    pairs = _overlap(start[apart], stop[apart], start_after, stop_after)
    sent, received = pairs.sum(tuple(range(num, 2 * num))), pairs.sum(tuple(range(num)))
    return sent, received, _overlap(start, stop, start_after, stop_after)


def _of_group(each: np.ndarray, group: tuple[int, ...]) -> np.ndarray:
    return each[tuple(slice(None) if i in group else slice(1) for i in range(each.ndim))]


def _overlap(start: np.ndarray, stop: np.ndarray, other_start: np.ndarray, other_stop: np.ndarray) -> np.ndarray:
    return np.maximum(np.minimum(stop, other_stop) - np.maximum(start, other_start), 0)


@lru_cache(maxsize=4096)
def _ranges(size: int, mesh_shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Where boxes start and stop in a tensor dim, by coordinate: `nested_chunk`; 1 coordinate where nothing is cut."""
    start, stop = np.zeros((1,) * len(mesh_shape), np.int64), np.full((1,) * len(mesh_shape), size)
    for i in dims:
        index = np.arange(mesh_shape[i]).reshape([-1 if axis == i else 1 for axis in range(len(mesh_shape))])
        chunk = -((start - stop) // mesh_shape[i])  # ceil
        start, stop = np.minimum(start + index * chunk, stop), np.minimum(start + (index + 1) * chunk, stop)
    return start, stop
