"""A lower bound of the busiest rank's traffic over all steps from one sharding to another."""

from __future__ import annotations

import math

from fusedcomm.redistribution.sharding import Sharding, intersection, numel


def least_traffic(before: Sharding, after: Sharding) -> float:
    """Lower bound of the elements that the busiest rank sends or receives, for any steps.

    Without a reduction: the elements that a rank needs and does not hold. Summing `parts` values on one rank takes
    `parts - 1` transfers, and each further rank that needs the sum takes one more. A rank also sends all elements that
    it holds and does not keep.
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
            continue  # each index of a mesh dim that stays partial is like a tensor by itself
        ranks *= size
        parts *= size if op is not None else 1
        owners *= size if dim_after is None else 1
        copied |= op is None and dim is None and size > 1
    mean = math.prod(before.shape) * (parts + owners - 2) / ranks
    return mean if copied else max(mean, *(numel(held) - own for (held, _), own in zip(boxes, kept, strict=True)))
