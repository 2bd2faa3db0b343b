"""Tensor descriptors (TMA) of a kernel's operands: which operands may have one, and its shape, strides and block."""

import math

import torch
from torch import Tensor

from fusedcomm.kernels.triton.bundles import Span
from fusedcomm.plan import tiles
from fusedcomm.plan.builder import Builder
from fusedcomm.plan.geometry.spans import RoundSpans
from fusedcomm.plan.schedule import Described

_LEAST_BLOCK_K = 16  # of tensor cores, at 2 bytes an element or more; 32 at 1 byte
_TMA_ALIGNMENT = 16  # bytes: bases and strides of tensor descriptors
_INT32_MAX = 2**31 - 1  # descriptors are indexed by int32
_DESCRIBED_BYTES = 1 << 40  # strides of descriptors are below it


def can_describe_x(s: Builder, x: Tensor) -> bool:
    """Whether a tensor descriptor can load x [rows, K]."""
    return are_multiples_of_16(s.address_mod_16(x), x.shape[1] * x.itemsize) and max(x.shape) <= _INT32_MAX


def can_describe_w(s: Builder, w: Tensor, num_parts: int, whole: bool) -> bool:
    """Whether a tensor descriptor can load w [num_batches, K, N], K or N contiguous, each part of K by itself.

    ``whole``: no block of K ends early.
    """
    view = _view_of(w, num_parts, whole)
    if view is None:
        return False
    shape, strides = view
    num_bytes = [stride * w.itemsize for stride in strides]
    return (
        max(num_bytes) < _DESCRIBED_BYTES
        and are_multiples_of_16(s.address_mod_16(w), *num_bytes)
        and max(*shape, w.shape[1]) <= _INT32_MAX
    )


def _view_of(w: Tensor, num_parts: int, whole: bool) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape of w's descriptor, and its strides but the last, 1. None if rows overlap, as in an expanded tensor.

    Batches lie below one another where no block of K ends early. Otherwise such a block would reach into the next
    batch, or the next source's part of K. Then batches or parts have a dim in front, and loads behind the end of each
    give zeros.
    """
    num_batches, num_k, num_n = w.shape
    step, row_major = row_step(w), w.stride(2) == 1
    length, row = (num_k, num_n) if row_major else (num_n, num_k)
    follow = num_batches == 1 or w.stride(0) == length * step
    if step < row or (not follow and (num_parts > 1 or w.stride(0) < length * step)):
        return None
    if follow and (whole or num_batches * num_parts == 1):
        return (num_batches * length, row), (step,)
    if num_parts == 1:
        return (num_batches, length, row), (w.stride(0), step)
    if row_major:
        return (num_batches * num_parts, length // num_parts, row), (length // num_parts * step, step)
    return None  # parts lie side by side in a row: a driver wants each stride to step over the dims before it


def can_describe_slots(spans: RoundSpans, group_size: int, itemsize: int, row_numel: int) -> bool:
    """Whether a tensor descriptor can load every source's chunk [batches * rows, columns]: in whole blocks of K, or as
    one run, behind which lie zeros. ``row_numel``: elements from a row to the next.
    """
    columns, least = spans.columns, _LEAST_BLOCK_K * (2 if itemsize == 1 else 1)
    if columns.size == 0 or (columns.inner < columns.size and columns.inner % least):
        return False
    num_rows = group_size * (spans.chunk_numel // row_numel)
    return are_multiples_of_16(row_numel * itemsize) and max(num_rows, columns.size) <= _INT32_MAX


def column_shift(w: Tensor, columns: Span) -> int:
    """Most elements from the start of the first tile of a run back to the multiple of 16 bytes where TMA loads must
    begin. Elsewhere a load is an illegal instruction, and ends the CUDA context.
    """
    outer_stride = columns.outer_stride if columns.inner < columns.size else 0
    starts = (each * w.itemsize for each in (columns.start, columns.peer_stride, outer_stride))
    return 0 if w.stride(2) != 1 or are_multiples_of_16(*starts) else _TMA_ALIGNMENT // w.itemsize - 1


def row_step(w: Tensor) -> int:
    return w.stride(1) if w.stride(2) == 1 else w.stride(2)


def unit(itemsize: int, *numbers: int) -> int:
    """The largest common divisor of the numbers, up to 16 bytes; 1 where Triton sees it by itself."""
    return 1 if are_multiples_of_16(*numbers) else math.gcd(16 // itemsize, *numbers)


def are_multiples_of_16(*numbers: int) -> bool:
    return all(number % _TMA_ALIGNMENT == 0 for number in numbers)


def describe_x(s: Builder, x: Tensor, config: tiles.TileConfig) -> Described:
    # A contiguous x of one row may have any stride there: it may be a part of a wider tensor.
    return Described(s.place(x), tuple(x.shape), (x.shape[1], 1), (config.block_m, config.block_k))


def describe_slots(
    s: Builder, spans: RoundSpans, dtype: torch.dtype, config: tiles.TileConfig, row_numel: int
) -> Described:
    """Both slots of this rank [num_slots, rows of all chunks, columns]: the kernel takes its epoch's."""
    num_rows = s.group_size * (spans.chunk_numel // row_numel)
    return Described(
        s.place(s.slots(dtype)),
        (s.memory.layout.num_slots, num_rows, spans.columns.size),
        (s.memory.slot_bytes // dtype.itemsize, row_numel, 1),
        (1, config.block_m, config.block_k),
    )


def describe_w(s: Builder, w: Tensor, config: tiles.TileConfig, num_parts: int, whole: bool) -> Described:
    view = _view_of(w, num_parts, whole)
    assert view is not None
    shape, strides = view
    block = (config.block_k, config.block_n) if w.stride(2) == 1 else (config.block_n, config.block_k)
    return Described(s.place(w), shape, (*strides, 1), (1,) * (len(shape) - 2) + block)
