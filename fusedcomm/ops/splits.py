"""Each rank's part of a dim, by arguments of a call: in Python, in the schemas, and in the backward's exchange back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomm.memory.group import rank_of
from fusedcomm.ops.arguments import check_splits
from fusedcomm.plan.geometry.cut import EVEN, Parts, Splits, chunk_parts, is_divisible, parts_of_sizes
from fusedcomm.run import reference

Sizes = Sequence[int]
Ranges = Sequence[tuple[int, int]]


def splits_of(
    gather_splits: Sizes | None,
    gather_size: int | None,
    scatter_splits: Sizes | None,
    scatter_ranges: Ranges | None,
    is_divisible: bool,
    group_name: str,
) -> Splits:
    """The schemas' arguments for the splits of the Python functions. Raises ValueError and TypeError.

    ``is_divisible``: whether R divides the size at scatter_dim.
    """
    is_even = gather_splits is None and gather_size is None and scatter_splits is None and scatter_ranges is None
    if is_divisible and is_even:
        return EVEN
    check_splits(gather_splits, gather_size, scatter_splits, scatter_ranges)
    sizes = None if gather_splits is None else list(gather_splits)
    starts, lengths = None, None if scatter_splits is None else list(scatter_splits)
    if scatter_ranges is not None:
        starts, lengths = [start for start, _ in scatter_ranges], [size for _, size in scatter_ranges]
    return Splits(sizes, gather_size, starts, lengths, rank_of(group_name))


def divides(group_size: int, shape: Sizes, dim: int) -> bool:
    """Whether R divides a size, if there is such a dim."""
    return not -len(shape) <= dim < len(shape) or shape[dim] % group_size == 0


def divides_product(group_size: int, x: Tensor, w: Tensor, dim: int, out_shape: Sizes | None = None) -> bool:
    """The same of ``x @ w``, viewed as out_shape says. No slice is made: those of a torch.Size take long."""
    rows = x.shape
    columns = out_shape or w.shape or rows  # the last for a w without dims, which is refused later
    num_columns = len(out_shape) if out_shape else 1
    num_dims = len(rows) - 1 + num_columns
    if not -num_dims <= dim < num_dims:
        return True
    if dim >= 0:
        dim -= num_dims
    return (columns[dim] if dim >= -num_columns else rows[dim - 1 + num_columns]) % group_size == 0


def replica_ranges(size: int, group_size: int, replicas: int) -> list[tuple[int, int]]:
    """Return ``scatter_ranges`` that give each of R / replicas blocks of a dim to that many consecutive ranks.

    So 8 ranks can share 2 heads of keys: ``replica_ranges(2, 8, 4)`` gives the first to ranks 0 to 3.

    Args:
        size: the size at scatter_dim.
        group_size: the number of ranks, R.
        replicas: how many ranks get the same block; it must divide R, and R / replicas must divide size.

    Raises:
        ValueError: they do not divide so.

    Example::

        assert fusedcomm.replica_ranges(4, 4, 2) == [(0, 2), (0, 2), (2, 2), (2, 2)]
    """
    if replicas < 1 or group_size % replicas:
        raise ValueError(f"replicas must divide group_size={group_size}, got {replicas}")
    blocks = group_size // replicas
    if size % blocks:
        raise ValueError(f"size must be divisible by group_size / replicas = {blocks}, got {size}")
    length = size // blocks
    return [(rank // replicas * length, length) for rank in range(group_size)]


def reversed_splits(splits: Splits, scattered: int, group_size: int) -> Splits:
    """The Splits of the backward's exchange, of consecutive parts. ``scattered``: the size at scatter_dim."""
    sizes, total = splits.scatter_lengths, None
    if sizes is None and splits.rank is not None and not is_divisible(scattered, group_size):
        total = scattered
    return Splits(sizes, total, None, splits.gather_splits, splits.rank)


def exchange(t: Tensor, gather_dim: int, scatter_dim: int, splits: Splits, group_size: int, group_name: str) -> Tensor:
    return torch.ops.fusedcomm.all_to_all(t, gather_dim, scatter_dim, *splits, group_size, group_name)  # type: ignore[no-any-return]


def all_gather(t: Tensor, gather_dim: int, splits: Splits, group_size: int, group_name: str) -> Tensor:
    return torch.ops.fusedcomm.all_gather(t, gather_dim, *splits.to_gather, group_size, group_name)  # type: ignore[no-any-return]


def reduce_scatter(t: Tensor, scatter_dim: int, splits: Splits, group_size: int, group_name: str) -> Tensor:
    where = (scatter_dim, *splits.to_scatter, group_size, group_name)
    return torch.ops.fusedcomm.reduce_scatter(t, "sum", *where)  # type: ignore[no-any-return]


def all_have_several(splits: Splits, group_size: int) -> bool:
    """Whether each rank is known to have two elements or more at the gathered dim."""
    sizes = splits.gather_splits
    if sizes is None and splits.gather_size is not None:
        sizes = chunk_parts(splits.gather_size, group_size).sizes
    return sizes is None or all(size > 1 for size in sizes)


def adds_back(splits: Splits, scattered: int) -> bool:
    """Whether an element may go to several ranks, or to none: then the backward adds up gradients."""
    starts, sizes = splits.scatter_starts, splits.scatter_lengths
    return starts is not None and sizes is not None and not Parts(tuple(starts), tuple(sizes), scattered).tiles


def add_back(joined: Tensor, dim: int, splits: Splits, scattered: int) -> Tensor:
    """The gradient of the scattered tensor along ``dim``, from the gradients of all parts one after the other.

    Where parts overlap they are added in rank order, in float32, and rounded once. Else it is ``joined`` itself.
    """
    if not adds_back(splits, scattered):
        return joined
    assert splits.scatter_starts is not None and splits.scatter_lengths is not None
    shape = list(joined.shape)
    shape[dim] = scattered
    total = joined.new_zeros(shape, dtype=torch.promote_types(joined.dtype, torch.float32))
    pieces = reference.parts(joined, dim, parts_of_sizes(splits.scatter_lengths))
    for start, piece in zip(splits.scatter_starts, pieces, strict=True):
        total.narrow(dim, start, piece.shape[dim]).add_(piece)
    return total.to(joined.dtype)
