"""DTensor's placements as text, for an op's schema, and as a `Sharding`.

R          Replicate
S(1)       Shard(1)
S(1, 4)    _StridedShard(1, split_factor=4): later mesh dims, of together 4 ranks, cut tensor dim 1 before this one
P(sum)     Partial("sum"); max, min, product, avg
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from fusedcomm.redistribution.sharding import REDUCE_OPS, Sharding

_SHARD = re.compile(r"S\((-?\d+)(?:, (\d+))?\)")
_PARTIAL = re.compile(r"P\((\w+)\)")


class Unsupported(Exception):
    """A case left to torch. The first argument is the reason without values."""

    def __init__(self, what: str, got: object) -> None:
        super().__init__(f"{what}, got {got}")
        self.what = what


def encode(placements: Any, now: Sequence[Any] = ()) -> list[str]:
    """One text per placement. One of another class becomes ``=`` if it is as in ``now``, else begins with ``?``."""
    if placements is None:
        raise RuntimeError("placements must be given, one per dim of the mesh, got None")
    if not isinstance(placements, Sequence):  # not a set, whose order differs by rank
        raise TypeError(f"placements must be a list, one per dim of the mesh, got {placements!r}")
    texts = [_encode(placement) for placement in placements]
    stays = [placement == then for placement, then in zip(placements, now, strict=False)]
    return ["=" if text[0] == "?" and stays[i : i + 1] == [True] else text for i, text in enumerate(texts)]


# torch.compile guards on the placements. torch.compiler.assume_constant_result sets the same mark, but imports dynamo.
encode._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _encode(placement: Any) -> str:
    from torch.distributed.tensor import Partial, Placement, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kind = type(placement)  # the exact class, because one derived from Partial reduces in its own way
    if not issubclass(kind, Placement):
        raise TypeError(f"placements must be Replicate, Shard or Partial, got {placement!r}")
    if kind is Shard:
        return f"S({placement.dim})"
    if kind is Replicate:
        return "R"
    if kind is _StridedShard:
        return f"S({placement.dim}, {placement.split_factor})"
    return f"P({placement.reduce_op})" if kind is Partial else f"?{placement!r}"


def decode(texts: Sequence[str], ndim: int, now: Sequence[Any]) -> tuple[Any, ...]:
    """The placements of a tensor of ``ndim`` dims, which are counted from the front. Raises as torch does."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: list[Any] = []
    for text, as_now in zip(texts, now, strict=True):
        if text == "=":
            found.append(as_now)
        elif text == "R":
            found.append(Replicate())
        elif match := _SHARD.fullmatch(text):
            dim, dims = int(match[1]), f"[{-ndim}, {ndim}) for a tensor of {ndim} dims"
            if not -ndim <= dim < ndim:
                raise IndexError(f"the dim of {text} must be in {dims}, got {dim}")
            found.append(_StridedShard(dim % ndim, split_factor=int(match[2])) if match[2] else Shard(dim % ndim))
        elif match := _PARTIAL.fullmatch(text):
            found.append(Partial(match[1]))
        else:
            raise RuntimeError(f"placements must be Replicate, Shard or Partial, or as they are, got {text[1:]}")
    return tuple(found)


def sharding(placements: Sequence[Any], shape: Sequence[int], mesh_shape: Sequence[int]) -> Sharding:
    """The Sharding of these placements. Raises Unsupported."""
    texts = encode(placements)
    cuts: list[list[int]] = [[] for _ in shape]
    partial: list[str | None] = [None] * len(mesh_shape)
    for i, text in reversed(list(enumerate(texts))):
        if match := _SHARD.fullmatch(text):
            dims = cuts[int(match[1])]
            dims.insert(_position([mesh_shape[j] for j in dims], int(match[2] or 1), text), i)
        elif match := _PARTIAL.fullmatch(text):
            if match[1] not in REDUCE_OPS:
                raise Unsupported(f"the reduce op is not one of {', '.join(REDUCE_OPS)}", match[1])
            partial[i] = match[1]
        elif text != "R":
            raise Unsupported("a placement is not one of Replicate, Shard and Partial", text[1:])
    _check_strided(texts, cuts, shape, mesh_shape)
    return Sharding.of(shape, mesh_shape, cuts, partial)


def _position(sizes: Sequence[int], split_factor: int, text: str) -> int:
    """The number of later mesh dims, of these sizes, that cut before this one."""
    for position in range(len(sizes) + 1):
        if math.prod(sizes[:position]) == split_factor:
            return position
    raise Unsupported("a split_factor is no product of sizes of mesh dims behind it", text)


def _check_strided(
    texts: Sequence[str], cuts: Sequence[Sequence[int]], shape: Sequence[int], mesh_shape: Sequence[int]
) -> None:
    """Raises Unsupported where strided shards are uneven: their parts are not boxes."""
    for size, dims in zip(shape, cuts, strict=True):
        if list(dims) != sorted(dims) and size % math.prod(mesh_shape[i] for i in dims):
            strided = next(texts[i] for i in sorted(dims) if "," in texts[i])
            raise Unsupported("a strided shard divides its tensor dim unevenly", f"{strided} of size {size}")
