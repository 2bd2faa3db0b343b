"""Launches of the Triton kernels: arguments, descriptors, grids. Imports Triton when first used."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.algorithms import tiles
from fusedcomm.algorithms.part_table import NO_SPAN, are_aligned, matmul_parts, own_span, shared_spans, upload
from fusedcomm.geometry.exchange import RoundSpans
from fusedcomm.geometry.spans import ChunkSpans, Span
from fusedcomm.kernels.triton.bundles import CopyConfig, InPlace, Part, Reduced, Sizes, Traits, Unpacked
from fusedcomm.runtime.rank_order import peers_of, sources_of
from fusedcomm.runtime.signals import Segments, signal, wait
from fusedcomm.runtime.topology import tf32_allowed

_TMA_ALIGNMENT = 16  # bytes: bases and strides of tensor descriptors
_ALL_REGISTERS = (
    255  # otherwise ptxas spills, to fit a second block per multiprocessor, which persistent grids never have
)
_INT32_MAX = 2**31 - 1  # descriptors are indexed by int32
_MOST_TILES = 2**31 - 2**12  # a program adds the number of programs to the last one it has
_DESCRIBED_BYTES = 1 << 40  # strides of descriptors are below it


def push(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    spans: RoundSpans,
    workspace: Segments,
    fingerprint: int,
    results: InPlace | None = None,
) -> None:
    """Compute every dst_rank's chunk of x @ w + bias into its slot, and signal it.

    x [..., K]; w [K, N] or [..., K, N]. With ``results`` a chunk goes into the result of a dst_rank that has posted it.
    """
    if spans.chunk_numel == 0:
        signal(workspace, None, fingerprint)
        return
    from fusedcomm.kernels.triton.push_matmul import push_matmul_kernel

    num_m = x.shape[-2]  # rows per batch; unused where w has no batches
    if w.shape[-2] == 0:  # the kernel takes K > 0
        x, w = x.new_zeros(*x.shape[:-1], 1), w.new_zeros(*w.shape[:-2], 1, w.shape[-1])
    x, w = x.flatten(0, -2).contiguous(), _matrices(w)
    num_k = w.shape[1]
    shape = tiles.Shape(spans.batches.size, spans.rows, spans.columns, num_k, workspace.group_size)
    describable = can_describe_x(x) and can_describe_w(w)
    config = _matmul_config(x, shape, workspace.num_programs("push"), describable)
    use_tma = _has_tma(x) and describable and tiles.boxes(config, shape)
    traits = Traits(
        use_tma,
        w.stride(2) != 1,
        tiles.in_runs(spans.rows, config.block_m),
        tiles.in_runs(spans.columns, config.block_n),
        num_k % config.block_k == 0,
        tf32_allowed(),
    )
    parts: list[Part] = []
    num_tiles = tiles.num_tiles(config, shape) * shape.count
    if spans.by_peer:
        order = peers_of(workspace.rank, workspace.group_size)
        parts = matmul_parts(spans, order, lambda chunk: _num_tiles(chunk, chunk.columns, config, traits))
        num_tiles = sum(part.num for part in parts)
    if num_tiles == 0:
        signal(workspace, None, fingerprint)
        return
    push_matmul_kernel[_grid("push", workspace, num_tiles)](
        None if results is None else tuple(results),
        describe_x(x, config) if use_tma else x,
        *_arguments(w, bias, num_m, spans, parts, workspace, fingerprint, config, traits),
        num_warps=config.num_warps,
        num_stages=_num_stages(config, x, use_tma),
    )


def pack(
    t: Tensor, spans: RoundSpans, workspace: Segments, fingerprint: int, *, own: bool = True, all_sms: bool = False
) -> None:
    """Copy every dst_rank's part of ``t`` into its slot, and signal it; the own chunk comes first.

    Without ``own`` this rank's chunk is signalled alone: it is taken from ``t`` itself.

    Without ``all_sms`` this kernel may run on a stream of its own beside the kernel that consumes the round. What
    follows that kernel must then wait for this one.
    """
    assert t.is_contiguous()
    config, num_tiles, parts = _copies(t, spans.pack, [each.pack for each in spans.by_peer])
    if num_tiles == 0:
        signal(workspace, None, fingerprint)
        return
    from fusedcomm.kernels.triton.copy import pack_kernel

    pack_kernel[_grid("push" if all_sms else "pack", workspace, num_tiles)](
        t,
        workspace.segments,
        *_places(spans.pack, parts, spans.chunk_numel, t.device),
        workspace.slot_bytes,
        fingerprint,
        workspace.rank,
        workspace.segment_layout,
        config,
        own,
        num_warps=config.num_warps,
    )


def gather_matmul(
    out: Tensor,
    w: Tensor,
    bias: Tensor | None,
    spans: RoundSpans,
    workspace: Segments,
    fingerprint: int,
    *,
    end_round: bool,
    all_sms: bool = False,
    own: bool = True,
) -> None:
    """Multiply every src_rank's chunk by its part of w, as the chunks arrive, into its rows of ``out``; add the bias.

    out [..., N] is the result of all rounds; w is [K, N] or [..., K, N]. ``end_round``: no kernel of this round
    follows. ``all_sms``: no kernel runs beside it that must send. Without ``own`` this rank's rows are in ``out``.
    """
    assert out.is_contiguous()
    num_m = out.shape[-2]  # rows per batch; unused where w has no batches
    w = _matrices(w)
    _, num_k, num_n = w.shape
    split_k = spans.differs == "columns" if spans.by_peer else spans.columns.size != num_k
    kind = "gather alone" if all_sms else "gather"
    assert own or not split_k
    shape = _gather_shape(spans, num_n, 1 if split_k else workspace.group_size - (not own))
    describable = can_describe_slots(spans, workspace.group_size) and can_describe_w(w)
    aligned = _aligned(*(each.columns.size * w.itemsize for each in spans.each), _row_step(w) * w.itemsize)
    config = _matmul_config(out, shape, workspace.num_programs(kind), describable, aligned)
    use_tma = _has_tma(out) and describable
    in_runs = tiles.in_runs(spans.columns, config.block_k)
    traits = Traits(
        use_tma,
        w.stride(2) != 1,
        tiles.in_runs(spans.rows, config.block_m),
        in_runs,
        all(_in_whole_blocks(each.columns, config.block_k, in_runs) for each in spans.each),
        tf32_allowed(),
        split_k,
        own,
        end_round,
    )
    parts, num_tiles = list[Part](), tiles.num_tiles(config, shape) * shape.count
    if spans.by_peer:
        parts, num_tiles = _gather_parts(spans, shape, workspace, config, traits)
    if num_tiles == 0:
        if end_round:
            wait(workspace, fingerprint)
        return
    if not own:  # after a failure the kernel counts this rank's tiles too
        assert tiles.num_tiles(config, shape) * workspace.group_size <= _MOST_TILES
    from fusedcomm.kernels.triton.gather_matmul import gather_matmul_kernel

    gather_matmul_kernel[_grid(kind, workspace, num_tiles)](
        out,
        describe_slots(workspace, spans, out.dtype, config) if use_tma else None,
        *_arguments(w, bias, num_m, spans, parts, workspace, fingerprint, config, traits),
        num_warps=config.num_warps,
        num_stages=_num_stages(config, out, use_tma),
        maxnreg=_ALL_REGISTERS,
    )


def unpack(
    out: Tensor,
    spans: RoundSpans,
    workspace: Segments,
    fingerprint: int,
    *,
    end_round: bool = True,
    own: bool = True,
    posted: bool = False,
) -> None:
    """Wait for every src_rank's chunk and copy it to its place in ``out``.

    Without ``own`` this rank's is there. With ``posted`` those are that are marked so.
    """
    assert out.is_contiguous()
    config, num_tiles, parts = _copies(out, spans.unpack, [each.unpack for each in spans.by_peer])
    if num_tiles == 0:
        if end_round:
            wait(workspace, fingerprint)
        return
    from fusedcomm.kernels.triton.copy import unpack_kernel

    unpack_kernel[_grid("unpack", workspace, num_tiles)](
        out,
        workspace.segments,
        *_places(spans.unpack, parts, spans.chunk_numel, out.device),
        workspace.slot_bytes,
        fingerprint,
        workspace.rank,
        workspace.segment_layout,
        config,
        Unpacked(end_round, own, posted),
        num_warps=config.num_warps,
    )


def reduce(
    out: Tensor, spans: RoundSpans, bias: Tensor | None, scale: float, workspace: Segments, fingerprint: int
) -> None:
    """Wait for every src_rank's chunk and add them up into ``out``, scaled, with the bias. This ends the round.

    A chunk is one run of out's elements, in rows as long as the bias. ``scale``: 1, or 1 / R for the average.
    """
    span = spans.at(workspace.rank).pack
    assert out.is_contiguous() and span.inner >= span.size
    assert scale in (1.0, 1.0 / workspace.group_size)
    if span.size == 0:
        wait(workspace, fingerprint)
        return
    from fusedcomm.kernels.triton.reduce import reduce_kernel

    block, num_warps = tiles.reduce_block(tiles.architecture(out.device))
    reduce_kernel[_grid("reduce", workspace, -(-span.size // block))](
        out,
        None if bias is None else bias.contiguous(),
        workspace.segments,
        Reduced(span.size, span.start, spans.chunk_numel if spans.by_peer else None),
        1 if bias is None else bias.numel(),
        workspace.slot_bytes,
        fingerprint,
        workspace.rank,
        workspace.segment_layout,
        scale != 1.0,
        block,
        num_warps=num_warps,
        maxnreg=_ALL_REGISTERS,
    )


def _arguments(
    w: Tensor,
    bias: Tensor | None,
    num_m: int,
    spans: RoundSpans,
    parts: Sequence[Part],
    workspace: Segments,
    fingerprint: int,
    config: tiles.TileConfig,
    traits: Traits,
) -> tuple[Any, ...]:
    """What push_matmul_kernel and gather_matmul_kernel take alike, from w on."""
    _, num_k, num_n = w.shape
    own_parts = {"differs": spans.differs, "aligned": are_aligned(parts)} if parts else {}
    return (
        describe_w(w, config) if traits.by_tma else w,
        None if bias is None else bias.contiguous(),
        workspace.segments,
        shared_spans(spans, workspace.rank, upload(parts, w.device) if parts else None),
        Sizes(num_m, num_n, num_k, *w.stride(), spans.chunk_numel, workspace.slot_bytes),
        fingerprint,
        workspace.rank,
        workspace.segment_layout,
        config,
        traits._replace(**own_parts),
    )


def _grid(kind: str, workspace: Segments, num_tiles: int) -> tuple[int]:
    assert num_tiles <= _MOST_TILES, f"a kernel counts at most {_MOST_TILES} tiles, got {num_tiles}"
    return (min(workspace.num_programs(kind), num_tiles),)


def loadable(w: Tensor) -> Tensor:
    """w with K or N contiguous, as the kernels take it: a copy only where neither is."""
    return w if 1 in w.stride()[-2:] else w.contiguous()


def _matrices(w: Tensor) -> Tensor:
    """w as the kernels take it: [num_batches, K, N], K or N contiguous."""
    return loadable(w).unsqueeze(0).flatten(0, -3)


def _copies(t: Tensor, shared: Span, by_peer: Sequence[Span]) -> tuple[CopyConfig, int, list[Part]]:
    """Tile sizes, the most tiles that a chunk has, and the rows of a table if peers have Spans of their own."""
    parts = [own_span(each) for each in by_peer]
    largest = max(by_peer, key=lambda each: each.size, default=shared)
    aligned = are_aligned(parts) if parts else None
    config = tiles.copy_config(tiles.architecture(t.device), largest, t.itemsize, aligned)
    return config, max(tiles.num_copies(config, each) for each in by_peer or [shared]), parts


def _places(shared: Span, parts: Sequence[Part], chunk_numel: int, device: torch.device) -> tuple[Any, ...]:
    """Where pack_kernel and unpack_kernel find the chunks of all peers."""
    if parts:
        return tuple(NO_SPAN), upload(parts, device), chunk_numel
    return tuple(shared), None, None


def _gather_parts(
    spans: RoundSpans, shape: tiles.Shape, workspace: Segments, config: tiles.TileConfig, traits: Traits
) -> tuple[list[Part], int]:
    """The rows of a gather's table, and the tiles of the result that are left to the kernel."""
    order = sources_of(workspace.rank, workspace.group_size)

    def tiles_of(chunk: ChunkSpans) -> int:
        return _num_tiles(chunk, shape.columns, config, traits)

    def blocks_of(chunk: ChunkSpans) -> int:
        return tiles.num_cuts(chunk.columns, config.block_k, traits.columns_in_runs)

    own = spans.at(workspace.rank)
    parts = matmul_parts(spans, order, blocks_of if traits.split_k else tiles_of)
    if traits.by_tma:
        parts = [part._replace(slot_row=i * (spans.chunk_numel // own.columns.size)) for i, part in enumerate(parts)]
    if traits.split_k:
        return parts, tiles_of(own)
    return parts, sum(part.num for part in parts) - (0 if traits.own else parts[workspace.rank].num)


def _in_whole_blocks(columns: Span, block_k: int, in_runs: bool) -> bool:
    """Whether no block of K ends early."""
    return columns.size == 0 or columns.inner % block_k == 0 or (not in_runs and columns.size % block_k == 0)


def _num_tiles(chunk: ChunkSpans, columns: Span, config: tiles.TileConfig, traits: Traits) -> int:
    """Tiles of a peer's chunk, as the kernels count them."""
    num_m = tiles.num_cuts(chunk.rows, config.block_m, traits.rows_in_runs)
    return chunk.batches.size * num_m * tiles.num_cuts(columns, config.block_n, traits.columns_in_runs)


def _matmul_config(
    t: Tensor, shape: tiles.Shape, num_programs: int, describable: bool, aligned: bool = True
) -> tiles.TileConfig:
    """Tile sizes for operands of t's dtype on t's device."""
    arch = tiles.architecture(t.device)
    describable = describable and _has_tma(t)
    return tiles.matmul_config(arch, t.dtype, shape, num_programs, describable, tf32_allowed(), aligned)


def _num_stages(config: tiles.TileConfig, t: Tensor, use_tma: bool) -> int:
    """On Hopper and later Triton before 3.7 leaves out the fence that tensor cores need behind copies by pointer
    (cp.async). With one stage it makes none: data go through registers, whose stores it fences.
    """
    unfenced = _has_tma(t) and not use_tma and _triton_version() < (3, 7)
    return 1 if unfenced else config.num_stages


@functools.cache
def _triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(number) for number in triton.__version__.split(".")[:2])


def _has_tma(t: Tensor) -> bool:
    return tiles.architecture(t.device) >= 90


def _gather_shape(spans: RoundSpans, num_n: int, count: int) -> tiles.Shape:
    """The work of gather_matmul_kernel: one matmul for each source, or a single one that adds up all sources."""
    columns = Span(num_n, 0, max(num_n, 1), 0, 0)
    return tiles.Shape(spans.batches.size, spans.rows, columns, spans.columns.size, count)


def can_describe_x(x: Tensor) -> bool:
    """Whether a tensor descriptor can load x [rows, K]."""
    return _aligned(x.data_ptr(), x.shape[1] * x.itemsize) and max(x.shape) <= _INT32_MAX


def can_describe_w(w: Tensor) -> bool:
    """Whether a tensor descriptor can load w [num_batches, K, N], K or N contiguous.

    Batches of w lie below one another, so a block of K must not reach into the next batch. Rows that overlap, as those
    of an expanded tensor do, have no descriptor.
    """
    num_batches, num_k, num_n = w.shape
    step = _row_step(w)
    length, row = (num_k, num_n) if w.stride(2) == 1 else (num_n, num_k)
    batches_follow = num_batches == 1 or (w.stride(0) == length * step and num_k % tiles.BLOCK_K == 0)
    return (
        batches_follow
        and step >= row
        and step * w.itemsize < _DESCRIBED_BYTES
        and _aligned(w.data_ptr(), step * w.itemsize)
        and max(num_batches * length, num_n, num_k) <= _INT32_MAX
    )


def can_describe_slots(spans: RoundSpans, group_size: int) -> bool:
    """Whether a tensor descriptor can load every source's chunk [batches * rows, columns] in whole blocks of K."""
    num_columns, *others = {each.columns.size for each in spans.each}
    if others or any(each.columns.inner % tiles.BLOCK_K for each in spans.each):
        return False
    num_rows, rest = divmod(spans.chunk_numel, num_columns)
    return rest == 0 and max(group_size * num_rows, num_columns) <= _INT32_MAX


def _row_step(w: Tensor) -> int:
    return w.stride(1) if w.stride(2) == 1 else w.stride(2)


def _aligned(*numbers: int) -> bool:
    return all(number % _TMA_ALIGNMENT == 0 for number in numbers)


def describe_x(x: Tensor, config: tiles.TileConfig) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    # A contiguous x of one row may have any stride there: it may be a part of a wider tensor.
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [config.block_m, config.block_k])


def describe_slots(workspace: Segments, spans: RoundSpans, dtype: torch.dtype, config: tiles.TileConfig) -> Any:
    """Both slots of this rank [num_slots, rows of all chunks, columns]: the kernel takes that of its epoch."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    start, num_columns = workspace.segment_layout.header_bytes, spans.at(workspace.rank).columns.size
    slots = workspace.segment[start : start + workspace.segment_layout.num_slots * workspace.slot_bytes].view(dtype)
    num_rows = workspace.group_size * (spans.chunk_numel // num_columns)
    return TensorDescriptor(
        slots,
        [workspace.segment_layout.num_slots, num_rows, num_columns],
        [workspace.slot_bytes // dtype.itemsize, num_columns, 1],
        [1, config.block_m, config.block_k],
    )


def describe_w(w: Tensor, config: tiles.TileConfig) -> Any:
    """w as the kernels' loads see it: two dims, with the batches below one another."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    num_batches, num_k, num_n = w.shape
    if w.stride(2) == 1:
        rows, columns, step = num_batches * num_k, num_n, w.stride(1)
        block = [config.block_k, config.block_n]
    else:
        rows, columns, step = num_batches * num_n, num_k, w.stride(2)
        block = [config.block_n, config.block_k]
    return TensorDescriptor(w, [rows, columns], [step, 1], block)
