"""Tensor descriptors (TMA) of a kernel's operands: which operands may have one, and its shape, strides and block."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedcomm.kernels.triton.bundles import Span
from fusedcomm.plan import tiles
from fusedcomm.plan.builder import Builder
from fusedcomm.plan.geometry.spans import RoundSpans
from fusedcomm.plan.schedule import Described

_TMA_ALIGNMENT = 16  # bytes: bases and strides of tensor descriptors
_INT32_MAX = 2**31 - 1  # descriptors are indexed by int32
_DESCRIBED_BYTES = 1 << 40  # strides of descriptors are below it


def can_describe_x(s: Builder, x: Tensor) -> bool:
    """Whether a tensor descriptor can load x [rows, K]."""
    return are_multiples_of_16(s.address_mod_16(x), x.shape[1] * x.itemsize) and max(x.shape) <= _INT32_MAX


def can_describe_w(s: Builder, w: Tensor) -> bool:
    """Whether a tensor descriptor can load w [num_batches, K, N], K or N contiguous.

    Batches of w lie below one another, so a block of K must not reach into the next batch. Rows that overlap, as in an
    expanded tensor, have no descriptor.
    """
    num_batches, num_k, num_n = w.shape
    step = row_step(w)
    length, row = (num_k, num_n) if w.stride(2) == 1 else (num_n, num_k)
    batches_follow = num_batches == 1 or (w.stride(0) == length * step and num_k % tiles.BLOCK_K == 0)
    return (
        batches_follow
        and step >= row
        and step * w.itemsize < _DESCRIBED_BYTES
        and are_multiples_of_16(s.address_mod_16(w), step * w.itemsize)
        and max(num_batches * length, num_n, num_k) <= _INT32_MAX
    )


def can_describe_slots(spans: RoundSpans, group_size: int) -> bool:
    """Whether a tensor descriptor can load every source's chunk [batches * rows, columns] in whole blocks of K."""
    num_columns = spans.columns.size
    if spans.columns.inner % tiles.BLOCK_K:
        return False
    return max(group_size * (spans.chunk_numel // num_columns), num_columns) <= _INT32_MAX


def column_shift(w: Tensor, columns: Span) -> int:
    """The most elements by which the first tile of a run of columns begins before the run, so that TMA loads begin at
    multiples of 16 bytes. One that begins elsewhere is an illegal instruction, which ends the CUDA context.
    """
    outer_stride = columns.outer_stride if columns.inner < columns.size else 0
    starts = (each * w.itemsize for each in (columns.start, columns.peer_stride, outer_stride))
    return 0 if w.stride(2) != 1 or are_multiples_of_16(*starts) else _TMA_ALIGNMENT // w.itemsize - 1


def row_step(w: Tensor) -> int:
    return w.stride(1) if w.stride(2) == 1 else w.stride(2)


def are_multiples_of_16(*numbers: int) -> bool:
    return all(number % _TMA_ALIGNMENT == 0 for number in numbers)


def describe_x(s: Builder, x: Tensor, config: tiles.TileConfig) -> Described:
    # A contiguous x of one row may have any stride there: it may be a part of a wider tensor.
    return Described(s.place(x), tuple(x.shape), (x.shape[1], 1), (config.block_m, config.block_k))


def describe_slots(s: Builder, spans: RoundSpans, dtype: torch.dtype, config: tiles.TileConfig) -> Described:
    """Both slots of this rank [num_slots, rows of all chunks, columns]: the kernel takes its epoch's."""
    num_slots, num_columns = s.memory.layout.num_slots, spans.columns.size
    num_rows = s.group_size * (spans.chunk_numel // num_columns)
    return Described(
        s.place(s.slots(dtype)),
        (num_slots, num_rows, num_columns),
        (s.memory.slot_bytes // dtype.itemsize, num_columns, 1),
        (1, config.block_m, config.block_k),
    )


def describe_w(s: Builder, w: Tensor, config: tiles.TileConfig) -> Described:
    """w as the kernels load it: two dims, with the batches below one another."""
    num_batches, num_k, num_n = w.shape
    if w.stride(2) == 1:
        shape, block = (num_batches * num_k, num_n), (config.block_k, config.block_n)
    else:
        shape, block = (num_batches * num_n, num_k), (config.block_n, config.block_k)
    return Described(s.place(w), shape, (row_step(w), 1), block)
