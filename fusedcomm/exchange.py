"""Geometry of an exchange: which elements of a matmul's result go to which rank, and where they land.

Everything is one idea: of a run of R * size indices cut as (outer, R, inner), peer p owns [:, p, :]. A `Span` is that
set for a part of the indices; rows, columns and batches of the matmul are Spans over dst_rank, and the final layout of
what arrives is a Span over src_rank. Kernels and host code read the same five integers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Indices of one peer: ``start + peer * peer_stride + (i // inner) * outer_stride + i % inner``, 0 <= i < size."""

    size: int
    start: int
    inner: int
    outer_stride: int
    peer_stride: int

    @property
    def outer(self) -> int:
        return self.size // self.inner

    def first(self, peer: int) -> int:
        return self.start + peer * self.peer_stride

    def view(self, t: Tensor, dim: int, peer: int) -> Tensor:
        """The peer's indices of ``dim`` as two dims (outer, inner); never a copy."""
        shape, stride = list(t.shape), list(t.stride())
        step = stride[dim]
        shape[dim : dim + 1] = [self.outer, self.inner]
        stride[dim : dim + 1] = [self.outer_stride * step, step]
        return t.as_strided(shape, stride, t.storage_offset() + self.first(peer) * step)


@dataclass(frozen=True)
class Range:
    """A part of one dim of a chunk."""

    start: int
    size: int


def span(sizes: Sequence[int], split_dim: int | None, group_size: int, box: Sequence[Range]) -> Span:
    """Flat indices of ``box`` in a contiguous tensor of ``sizes`` whose ``split_dim`` is cut into one block per rank.

    ``box`` has one Range per dim, relative to the peer's block. Dims before the first Range of more than one index hold
    a single one; dims after it are whole: that is what makes five integers enough.
    """
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    start = sum(r.start * stride for r, stride in zip(box, strides, strict=True))
    lengths = [r.size for r in box]
    size = math.prod(lengths)
    if split_dim is None:
        return Span(size, start, max(size, 1), 0, 0)
    peer_stride = sizes[split_dim] // group_size * strides[split_dim]
    inner = math.prod(lengths[split_dim:])
    if size in (0, inner):
        return Span(size, start, max(size, 1), 0, peer_stride)
    return Span(size, start, inner, sizes[split_dim] * strides[split_dim], peer_stride)


@dataclass(frozen=True)
class RoundSpans:
    """One round of an Exchange: what each peer's chunk is made of, and where a chunk goes when it has arrived.

    chunk[b, i, j] = x[batches(b) * M + rows(i)] @ w[batches(b)][:, columns(j)]
    out.flatten()[unpack(i)] = chunk.flatten()[i]
    """

    batches: Span
    rows: Span
    columns: Span
    unpack: Span

    @property
    def chunk_numel(self) -> int:
        return self.unpack.size


def block_shape(shape: Sequence[int], split_dim: int, group_size: int) -> list[int]:
    """``shape`` with ``split_dim`` cut into ``group_size`` blocks: the shape of one block."""
    block = list(shape)
    block[split_dim] = block[split_dim] // group_size
    return block


class Exchange:
    """``exchange((x @ w).view(out_shape), gather_dim, scatter_dim)``: checked, and cut into chunks and rounds.

    Raises ValueError for anything that the op's docstring excludes; works on symbolic sizes, so that fake tensors get
    the same checks and texts.
    """

    def __init__(
        self,
        x_shape: Sequence[int],
        w_shape: Sequence[int],
        out_shape: Sequence[int] | None,
        gather_dim: int,
        scatter_dim: int,
        group_size: int,
    ) -> None:
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        _check_matmul(x_shape, w_shape)
        self.group_size = group_size
        self.k = x_shape[-1]
        self.num_batch_dims = len(w_shape) - 2
        self.lead = list(x_shape[:-1])
        self.columns = _check_out_shape(w_shape[-1], out_shape)
        self.shape = self.lead + self.columns
        self.gather_dim = _check_dim("gather_dim", gather_dim, len(self.shape))
        self.scatter_dim = _check_dim("scatter_dim", scatter_dim, len(self.shape))
        if self.gather_dim == self.scatter_dim:
            raise ValueError(f"gather_dim and scatter_dim must differ, got {gather_dim} and {scatter_dim}")
        if self.shape[self.scatter_dim] % group_size:
            raise ValueError(
                f"scatter_dim size must be divisible by group_size={group_size}, got {self.shape[self.scatter_dim]}"
            )
        self.block = block_shape(self.shape, self.scatter_dim, group_size)
        self.out_shape = list(self.block)
        self.out_shape[self.gather_dim] = self.block[self.gather_dim] * group_size
        self._rounds: dict[int, list[RoundSpans]] = {}

    @property
    def num_lead(self) -> int:
        return len(self.lead)

    @cached_property
    def num_batches(self) -> int:
        """Matrices in a batched w; 1 for [K, N]."""
        return math.prod(self.lead[: self.num_batch_dims])

    @cached_property
    def num_rows(self) -> int:
        """Rows of x per matrix of w."""
        return math.prod(self.lead[self.num_batch_dims :])

    @cached_property
    def row_numel(self) -> int:
        """Elements that one row of the matmul adds to one chunk."""
        return math.prod(self.block[self.num_lead :])

    @cached_property
    def chunk_numel(self) -> int:
        return math.prod(self.block)

    def rounds(self, max_chunk_numel: int) -> list[RoundSpans]:
        """Cut every chunk alike, along its leading dims, into parts of at most ``max_chunk_numel`` elements."""
        if max_chunk_numel not in self._rounds:
            boxes = _boxes(self.block[: self.num_lead], self.row_numel, max_chunk_numel)
            self._rounds[max_chunk_numel] = [self._round(box) for box in boxes]
        return self._rounds[max_chunk_numel]

    def _round(self, box: list[Range]) -> RoundSpans:
        box = box + [Range(0, size) for size in self.block[self.num_lead :]]
        nb, nl = self.num_batch_dims, self.num_lead

        def part(lo: int, hi: int) -> Span:
            split_dim = self.scatter_dim - lo if lo <= self.scatter_dim < hi else None
            return span(self.shape[lo:hi], split_dim, self.group_size, box[lo:hi])

        return RoundSpans(
            batches=part(0, nb),
            rows=part(nb, nl),
            columns=part(nl, len(self.shape)),
            unpack=span(self.out_shape, self.gather_dim, self.group_size, box),
        )


def _boxes(lead: list[int], row_numel: int, max_numel: int) -> Iterator[list[Range]]:
    """Single indices in the first dims, parts of one dim, all of the rest: as few boxes as fit ``max_numel``."""
    whole = [Range(0, size) for size in lead]
    if math.prod(lead) * row_numel <= max_numel:
        yield whole
        return
    cut_dim = next(d for d in range(len(lead)) if math.prod(lead[d + 1 :]) * row_numel <= max_numel)
    step = max_numel // (math.prod(lead[cut_dim + 1 :]) * row_numel)
    for outer in range(math.prod(lead[:cut_dim])):
        singles = [Range(i, 1) for i in _unravel(outer, lead[:cut_dim])]
        for start in range(0, lead[cut_dim], step):
            yield [*singles, Range(start, min(step, lead[cut_dim] - start)), *whole[cut_dim + 1 :]]


def _unravel(index: int, sizes: list[int]) -> list[int]:
    coords = []
    for size in reversed(sizes):
        index, i = divmod(index, size)
        coords.append(i)
    return coords[::-1]


@functools.lru_cache(maxsize=1024)
def cached_exchange(
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    out_shape: tuple[int, ...] | None,
    gather_dim: int,
    scatter_dim: int,
    group_size: int,
) -> Exchange:
    """An Exchange for plain ints, made once per shape: geometry costs more than a small matmul."""
    return Exchange(x_shape, w_shape, out_shape, gather_dim, scatter_dim, group_size)


def _check_matmul(x: Sequence[int], w: Sequence[int]) -> None:
    if len(x) < 2:
        raise ValueError(f"x must have at least 2 dims [..., K], got shape {tuple(x)}")
    if len(w) not in (2, len(x)):
        raise ValueError(f"w must be 2-D [K, N] or have x's batch dims, got {len(w)} dims beside x's {len(x)}")
    if x[-1] != w[-2]:
        raise ValueError(f"x and w must agree on K, got {x[-1]} and {w[-2]}")
    if len(w) > 2 and tuple(w[:-2]) != tuple(x[:-2]):
        raise ValueError(f"batch dims of w must equal those of x, got {tuple(w[:-2])} and {tuple(x[:-2])}")


def _check_out_shape(n: int, out_shape: Sequence[int] | None) -> list[int]:
    if out_shape is None:
        return [n]
    if len(out_shape) == 0 or any(size < 0 for size in out_shape) or math.prod(out_shape) != n:
        raise ValueError(f"out_shape must be sizes whose product is N={n}, got {list(out_shape)}")
    return list(out_shape)


def _check_dim(name: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"{name} must be in [{-ndim}, {ndim - 1}], got {dim}")
    return dim % ndim


def check_tensors(x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    """dtype, device and bias rules shared by all ops; the Exchange checks the shapes."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    for name, t in (("w", w), ("bias", bias)):
        if t is None:
            continue
        if t.dtype != x.dtype:
            raise ValueError(f"{name} must have x's dtype {x.dtype}, got {t.dtype}")
        if t.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {t.device}")
    if bias is not None and tuple(bias.shape) != tuple(w.shape[-1:]):
        raise ValueError(f"bias must have shape [N] = [{w.shape[-1]}], got {list(bias.shape)}")
