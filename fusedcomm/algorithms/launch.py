"""Launches of the Triton kernels: arguments, descriptors, grids. Imports Triton when first used."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from fusedcomm.algorithms import tiles
from fusedcomm.exchange import RoundSpans, Span
from fusedcomm.topology import tf32_allowed
from fusedcomm.workspace import HeaderLayout

_TMA_ALIGNMENT = 16  # bytes: bases and strides of tensor descriptors
_INT32_MAX = 2**31 - 1  # descriptors are indexed by int32


class Segments(Protocol):
    """What kernels need of workspace.Workspace. ``segments`` [R]: addresses, on the device."""

    rank: int
    group_size: int
    segments: Tensor
    slot_bytes: int
    num_slots: int
    layout: HeaderLayout

    def num_programs(self, kind: str) -> int: ...


def push(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    spans: RoundSpans,
    workspace: Segments,
    fingerprint: int,
) -> None:
    """Compute every dst_rank's chunk of x @ w + bias into its slot, and signal it.

    x [..., K]; w [K, N] or [..., K, N].
    """
    if spans.chunk_numel == 0:
        signal(workspace, None, fingerprint)
        return
    from fusedcomm.kernels.triton.push_matmul import push_matmul_kernel

    num_m = x.shape[-2]  # rows per batch; unused where w has no batches
    x, w = _matrices(x, w)
    _, num_k, num_n = w.shape
    config, use_tma = _push_config(x, w, spans, workspace)
    x_operand, w_operand = descriptors(x, w, config) if use_tma else (x, w)
    num_tiles = workspace.group_size * tiles.num_tiles(config, spans)
    push_matmul_kernel[(min(workspace.num_programs("push"), num_tiles),)](
        x_operand,
        w_operand,
        None if bias is None else bias.contiguous(),
        workspace.segments,
        _span(spans.batches),
        _span(spans.rows),
        _span(spans.columns),
        num_m,
        num_n,
        num_k,
        w.stride(),
        spans.chunk_numel,
        workspace.slot_bytes,
        fingerprint,
        workspace.rank,
        workspace.layout.tiles_done,
        workspace.layout.flags,
        workspace.layout.header_bytes,
        workspace.group_size,
        _triton_dtype(x.dtype),
        use_tma,
        w.stride(2) != 1,
        tiles.in_runs(spans.rows, config.block_m),
        tiles.in_runs(spans.columns, config.block_n),
        num_k % config.block_k == 0,
        tf32_allowed(),
        config.block_m,
        config.block_n,
        config.block_k,
        config.group_m,
        config.halves,
        workspace.num_slots,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def unpack(out: Tensor, span: Span, workspace: Segments, fingerprint: int) -> None:
    """Wait for every src_rank's chunk and copy it to its place in ``out``; this ends the round."""
    assert out.is_contiguous()
    if span.size == 0:
        wait(workspace, fingerprint)
        return
    from fusedcomm.kernels.triton.unpack import unpack_kernel

    config = tiles.unpack_config(tiles.architecture(out.device), span, out.itemsize)
    num_tiles = -(-(span.size // span.inner) // config.block_runs) * -(-span.inner // config.block_inner)
    unpack_kernel[(min(workspace.num_programs("unpack"), num_tiles),)](
        out,
        workspace.segments,
        _span(span),
        workspace.slot_bytes,
        fingerprint,
        workspace.rank,
        workspace.layout.flags,
        workspace.layout.header_bytes,
        workspace.group_size,
        config.block_runs,
        config.block_inner,
        workspace.num_slots,
        num_warps=config.num_warps,
    )


def signal(workspace: Segments, dst_rank: int | None, fingerprint: int) -> None:
    """Signal one rank, or all from rank + 1 on, that what the stream wrote before is there."""
    from fusedcomm.kernels.triton.handshake import signal_kernel

    group_size = workspace.group_size
    first = (workspace.rank + 1) % group_size if dst_rank is None else dst_rank
    signal_kernel[(1,)](
        workspace.segments,
        first,
        group_size if dst_rank is None else 1,
        fingerprint,
        workspace.rank,
        workspace.layout.flags,
        group_size,
        workspace.num_slots,
        num_warps=1,
    )


def wait(workspace: Segments, fingerprint: int) -> None:
    """Wait for all ranks' signals and end a round in which nothing is to be read."""
    from fusedcomm.kernels.triton.handshake import wait_kernel

    wait_kernel[(1,)](
        workspace.segments,
        fingerprint,
        workspace.rank,
        workspace.layout.flags,
        workspace.group_size,
        workspace.num_slots,
        num_warps=1,
    )


def _matrices(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows of all batches, K] and w [num_batches, K, N], K or N contiguous, as the kernel takes them: K > 0."""
    if w.shape[-2] == 0:
        x, w = x.new_zeros(*x.shape[:-1], 1), w.new_zeros(*w.shape[:-2], 1, w.shape[-1])
    x = x.flatten(0, -2).contiguous()
    w = w.unsqueeze(0).flatten(0, -3)
    return x, w if 1 in w.stride()[1:] else w.contiguous()


def _push_config(x: Tensor, w: Tensor, spans: RoundSpans, workspace: Segments) -> tuple[tiles.TileConfig, bool]:
    """Tile sizes, and whether tensor descriptors load x and w."""
    arch = tiles.architecture(x.device)
    describable = arch >= 90 and can_describe(x, w)
    group_size, num_programs = workspace.group_size, workspace.num_programs("push")
    allow_tf32 = tf32_allowed()
    config = tiles.matmul_config(arch, x.dtype, spans, w.shape[1], group_size, num_programs, describable, allow_tf32)
    return config, describable and tiles.boxes(config, spans)


def can_describe(x: Tensor, w: Tensor) -> bool:
    """Whether tensor descriptors can load x [rows, K] and w [num_batches, K, N], K or N contiguous.

    Batches of w lie below one another; a block of K must not reach into the next.
    """
    num_batches, num_k, num_n = w.shape
    step = w.stride(1) if w.stride(2) == 1 else w.stride(2)
    length = num_k if w.stride(2) == 1 else num_n
    batches_follow = num_batches == 1 or (w.stride(0) == length * step and num_k % tiles.BLOCK_K == 0)
    aligned = all(
        number % _TMA_ALIGNMENT == 0 for number in (x.data_ptr(), w.data_ptr(), num_k * x.itemsize, step * w.itemsize)
    )
    return batches_follow and aligned and max(x.shape[0], num_batches * length, num_n, num_k) <= _INT32_MAX


def descriptors(x: Tensor, w: Tensor, config: tiles.TileConfig) -> tuple[Any, Any]:
    """x and w as the kernel's loads see them: two dims each, the batches of w below one another."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    num_batches, num_k, num_n = w.shape
    if w.stride(2) == 1:
        shape, step, block = (
            (num_batches * num_k, num_n),
            w.stride(1),
            (config.block_k, config.block_n),
        )
    else:
        shape, step, block = (
            (num_batches * num_n, num_k),
            w.stride(2),
            (config.block_n, config.block_k),
        )
    return (
        TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [config.block_m, config.block_k]),
        TensorDescriptor(w, list(shape), [step, 1], list(block)),
    )


def _span(span: Span) -> tuple[int, int, int, int, int]:
    return span.size, span.start, span.inner, span.outer_stride, span.peer_stride


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
