"""Steps that take one mesh dim at a time, with successive equal ones joined: every plan is compared with these.

torch goes this way where no flattened mesh is missing. If `before` cuts anything, a first pass goes from the innermost
mesh dim outwards: a mesh dim becomes as in `after`, or cuts nothing if other mesh dims cut outside it now than in
`after`. A second pass takes the mesh dims that still differ, from the outermost inwards. Successive steps are joined
where they gather, reduce or scatter the same tensor dim alike. Exchanges are never joined, nor reduce_scatters into
uneven shards.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

from fusedcomm.redistribution.sharding import Sharding
from fusedcomm.redistribution.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Step, step

# In one mesh dim: the op that it reduces ("sum" for avg too), and the tensor dims that it cut before and cuts after
_Change: TypeAlias = "tuple[str | None, int | None, int | None]"


def steps_by_dim(before: Sharding, after: Sharding) -> tuple[Step, ...]:
    found: list[Step] = []
    for (_, _, cut), changes in groupby(_changes(before, after), key=lambda change: change[1]):
        run = [each for each, _ in changes]
        together = step(run[0].before, run[-1].after) if _goes_together(run, cut) else None
        found += run if together is None else [together]
    return tuple(found)


def _changes(before: Sharding, after: Sharding) -> Iterator[tuple[Step, _Change]]:
    now = before
    if any(before.cuts):
        for i in _innermost_first(before):
            cuts = after.tensor_dims[i] is not None and _aligned(now, after, i)
            new = _moved(now, after, i, after.tensor_dims[i] if cuts else None)
            if new != now:
                yield _change(now, new, i)
                now = new
    while now != after:
        i = _next_outermost(now, after)
        new = _moved(now, after, i, after.tensor_dims[i])
        yield _change(now, new, i)
        now = new


def _innermost_first(before: Sharding) -> list[int]:
    """All mesh dims, the last first, but each after the mesh dims that cut the same tensor dim inside it."""
    found: list[int] = []
    left = list(range(len(before.mesh_shape)))
    while left:
        inner = {i for dims in before.cuts for i in [j for j in dims if j in left][:-1]}
        found.append(max(i for i in left if i not in inner))
        left.remove(found[-1])
    return found


def _next_outermost(now: Sharding, after: Sharding) -> int:
    """The first mesh dim that differs from ``after`` and can change: mesh dims that cut outside it are final."""
    return next(
        i
        for i in range(len(now.mesh_shape))
        if (now.partial[i], now.tensor_dims[i]) != (after.partial[i], after.tensor_dims[i])
        and (after.tensor_dims[i] is None or _aligned(now, after, i))
    )


def _aligned(now: Sharding, after: Sharding, mesh_dim: int) -> bool:
    """Whether the same mesh dims cut outside ``mesh_dim`` now and in ``after``."""
    dim = after.tensor_dims[mesh_dim]
    assert dim is not None
    return _outside(now.cuts[dim], mesh_dim) == _outside(after.cuts[dim], mesh_dim)


def _outside(cuts: tuple[int, ...], mesh_dim: int) -> tuple[int, ...]:
    return cuts[: cuts.index(mesh_dim)] if mesh_dim in cuts else cuts


def _moved(now: Sharding, after: Sharding, mesh_dim: int, dim: int | None) -> Sharding:
    """``now`` with ``mesh_dim`` reduced as in ``after``, and cutting tensor dim ``dim`` or none."""
    cuts = now.cuts
    if dim != now.tensor_dims[mesh_dim]:
        left = [tuple(i for i in dims if i != mesh_dim) for dims in cuts]
        cuts = tuple((*dims, mesh_dim) if d == dim else dims for d, dims in enumerate(left))
    partial = tuple(after.partial[i] if i == mesh_dim else op for i, op in enumerate(now.partial))
    return replace(now, cuts=cuts, partial=partial)


def _change(now: Sharding, new: Sharding, mesh_dim: int) -> tuple[Step, _Change]:
    found = step(now, new)
    assert found is not None, f"{now} -> {new}"
    op = now.partial[mesh_dim] if new.partial[mesh_dim] is None else None
    return found, ("sum" if op == "avg" else op, now.tensor_dims[mesh_dim], new.tensor_dims[mesh_dim])


def _goes_together(run: list[Step], cut: int | None) -> bool:
    """Whether successive steps with the same change are one step; ``cut``: the tensor dim that they cut."""
    first, group_size = run[0], math.prod(each.group_size for each in run)
    if first.kind == REDUCE_SCATTER:
        return cut is not None and first.before.shape[cut] % group_size == 0
    return first.kind in (ALL_GATHER, ALL_REDUCE)
