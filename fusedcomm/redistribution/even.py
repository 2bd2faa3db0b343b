"""Packing and unpacking of equal pieces: blocks on dim 0, in the order of the group's ranks.

Mesh dims become dims of the tensor, then it is permuted: one pass over the data, or none.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from fusedcomm.redistribution.sharding import Coordinate
from fusedcomm.redistribution.steps import Step, tails

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sending:
    """Views of a rank's local tensor that yield a block for each member, in row-major order."""

    shape: Shape
    selected: tuple[tuple[int, int], ...] = ()  # (dim, index), last dim first
    permuted: tuple[int, ...] | None = None  # None where blocks are outermost already
    expanded: Shape | None = None  # None where each member gets another block
    stacked: Shape = ()


@dataclass(frozen=True)
class Arriving:
    """Views that yield a rank's local tensor from the members' blocks, in row-major order."""

    blocks: Shape = ()
    permuted: tuple[int, ...] | None = None  # None where they lie as in the tensor
    shape: Shape = ()


@lru_cache(maxsize=4096)
def sending(step: Step, coordinate: Coordinate) -> Sending:
    """How this rank packs its payload of a regular all_to_all or reduce_scatter."""
    group, local = step.mesh_dims, step.before.local_shape(coordinate)
    cutting = {i for _, tail in tails(step) for i in tail}
    repeated = [i for i in group if i not in cutting]
    names: list[int | str] = list(repeated)  # mesh dims, and "" for the rest of a tensor dim
    sizes = [1] * len(repeated)
    for size, (_, tail) in zip(local, tails(step), strict=True):
        pieces = [step.before.mesh_shape[i] for i in tail]
        names += [*tail, ""]
        sizes += [*pieces, size // math.prod(pieces)]
    own = [k for k, name in enumerate(names) if name != "" and name not in group]
    left = [k for k in range(len(names)) if k not in own]
    names_left, sizes_left = [names[k] for k in left], [sizes[k] for k in left]
    permuted = [names_left.index(i) for i in group] + [k for k, name in enumerate(names_left) if name == ""]
    block = tuple(size for name, size in zip(names_left, sizes_left, strict=True) if name == "")
    return Sending(
        shape=tuple(sizes),
        selected=tuple((k, coordinate[int(names[k])]) for k in reversed(own)),
        permuted=None if not repeated and _keeps_order(permuted, sizes_left) else tuple(permuted),
        expanded=(*step.group_shape, *block) if repeated else None,
        stacked=(step.group_size * block[0], *block[1:]),
    )


@lru_cache(maxsize=4096)
def arriving(step: Step, coordinate: Coordinate) -> Arriving:
    """How this rank unpacks a regular all_gather or all_to_all."""
    group, shape = step.mesh_dims, step.after.local_shape(coordinate)
    permuted, block = [], []
    for dim, (size, (tail, _)) in enumerate(zip(shape, tails(step), strict=True)):
        permuted += [*(group.index(i) for i in tail), len(group) + dim]
        block.append(size // math.prod(step.before.mesh_shape[i] for i in tail))
    blocks = (*step.group_shape, *block)
    return Arriving(blocks, None if _keeps_order(permuted, blocks) else tuple(permuted), shape)


def stack(tensor: Tensor, layout: Sending) -> Tensor:
    blocks = viewed(tensor, layout.shape)
    for dim, index in layout.selected:
        blocks = blocks.select(dim, index)
    if layout.permuted is not None:
        blocks = blocks.permute(layout.permuted)
    if layout.expanded is not None:
        blocks = blocks.expand(layout.expanded)
    return viewed(blocks.contiguous(), layout.stacked)


def join(received: Tensor, layout: Arriving) -> Tensor:
    if layout.permuted is None:
        return viewed(received, layout.shape)
    return received.view(layout.blocks).permute(layout.permuted).contiguous().view(layout.shape)


def viewed(tensor: Tensor, shape: Shape) -> Tensor:
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def _keeps_order(permuted: list[int], sizes: list[int] | Shape) -> bool:
    moved = [k for k in permuted if sizes[k] != 1]
    return moved == sorted(moved)
