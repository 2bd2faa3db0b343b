"""Launches of the Triton kernels: arguments and grids. Triton is imported at the first of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from torch import Tensor

from fusedcomm.algorithms import tiles
from fusedcomm.algorithms.descriptors import (
    are_multiples_of_16,
    can_describe_slots,
    can_describe_w,
    can_describe_x,
    column_shift,
    describe_slots,
    describe_w,
    describe_x,
    row_step,
)
from fusedcomm.geometry.exchange import RoundSpans
from fusedcomm.geometry.spans import Span
from fusedcomm.kernels.triton.bundles import Reduced, Sizes, Traits, Unpacked
from fusedcomm.runtime.launches import Launch, of_kind
from fusedcomm.runtime.signals import Segments, signal, wait
from fusedcomm.runtime.topology import tf32_allowed

# Otherwise ptxas spills, to fit a second block per multiprocessor, which persistent grids never have.
_ALL_REGISTERS = 255
_MOST_TILES = 2**31 - 2**12  # a program adds the number of programs to the last one it has


def push(x: Tensor, w: Tensor, bias: Tensor | None, spans: RoundSpans, workspace: Segments, fingerprint: int) -> None:
    """Compute every dst_rank's chunk of x @ w + bias into its slot, and signal it.

    x [..., K]; w [K, N] or [..., K, N].
    """

    def plan() -> Launch | None:
        return _push(x, w, spans, workspace, fingerprint)

    launch = _of_kind("push", plan, (x, w, bias), spans, workspace, fingerprint)
    if launch is None:
        signal(workspace, None, fingerprint)
    else:
        launch(x, w, bias)


def _push(x: Tensor, w: Tensor, spans: RoundSpans, workspace: Segments, fingerprint: int) -> Launch | None:
    """The launch; None if the chunks are empty."""
    if spans.chunk_numel == 0:
        return None
    from fusedcomm.kernels.triton.push_matmul import push_matmul_kernel

    num_m = x.shape[-2]  # rows per batch; unused where w has no batches
    x, w = _operands(x, w)
    num_k = w.shape[1]
    describable = can_describe_x(x) and can_describe_w(w)
    shift = column_shift(w, spans.columns)
    shape = tiles.Shape(spans.batches.size, spans.rows, spans.columns, num_k, workspace.group_size)
    if describable and _has_tma(x):
        shape = replace(shape, shift=shift)
    config = _matmul_config(x, shape, workspace.num_programs("push"), describable, aligned=shift == 0)
    use_tma = _has_tma(x) and describable and tiles.boxes(config, shape)
    traits = Traits(
        use_tma,
        w.stride(2) != 1,
        tiles.in_runs(spans.rows, config.block_m),
        tiles.in_runs(spans.columns, config.block_n),
        num_k % config.block_k == 0,
        tf32_allowed(),
        shift=shape.shift if use_tma else 0,
    )
    constants = _matmul_constants(w, num_m, spans, workspace, fingerprint, config, traits)

    def arguments(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        x, w = _operands(x, w)
        return describe_x(x, config) if use_tma else x, *_weights(w, bias, config, use_tma), *constants

    options = {"num_warps": config.num_warps, "num_stages": _num_stages(config, x, use_tma)}
    grid = _grid("push", workspace, tiles.num_tiles(config, shape) * shape.count)
    return Launch(push_matmul_kernel, grid, arguments, **options)


def pack(
    t: Tensor, spans: RoundSpans, workspace: Segments, fingerprint: int, *, own: bool = True, all_sms: bool = False
) -> None:
    """Copy every dst_rank's part of ``t`` into its slot, and signal it; the own chunk comes first.

    Without ``own`` this rank's chunk is signalled alone: it is taken from ``t`` itself.

    Without ``all_sms`` this kernel may run on a stream of its own beside the kernel that consumes the round. What
    follows that kernel must then wait for this one.
    """
    assert t.is_contiguous()

    def plan() -> Launch | None:
        if spans.pack.size == 0:
            return None
        from fusedcomm.kernels.triton.copy import pack_kernel

        return _copies(pack_kernel, t, spans.pack, "push" if all_sms else "pack", workspace, fingerprint, own)

    launch = _of_kind("pack", plan, (t,), spans, workspace, fingerprint, own, all_sms)
    if launch is None:
        signal(workspace, None, fingerprint)
    else:
        launch(t)


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

    def plan() -> Launch | None:
        return _gather(out, w, spans, workspace, fingerprint, end_round, all_sms, own)

    launch = _of_kind("gather", plan, (out, w, bias), spans, workspace, fingerprint, end_round, all_sms, own)
    if launch is not None:
        launch(out, w, bias)
    elif end_round:
        wait(workspace, fingerprint)


def _gather(
    out: Tensor,
    w: Tensor,
    spans: RoundSpans,
    workspace: Segments,
    fingerprint: int,
    end_round: bool,
    all_sms: bool,
    own: bool,
) -> Launch | None:
    """The launch; None if there is nothing to multiply."""
    num_m = out.shape[-2]  # rows per batch; unused where w has no batches
    w = _matrices(w)
    _, num_k, num_n = w.shape
    split_k = spans.columns.size != num_k
    kind = "gather alone" if all_sms else "gather"
    assert own or not split_k
    shape = _gather_shape(spans, num_n, 1 if split_k else workspace.group_size - (not own))
    describable = can_describe_slots(spans, workspace.group_size) and can_describe_w(w)
    aligned = are_multiples_of_16(spans.columns.size * w.itemsize, row_step(w) * w.itemsize)
    config = _matmul_config(out, shape, workspace.num_programs(kind), describable, aligned)
    use_tma = _has_tma(out) and describable
    in_runs = tiles.in_runs(spans.columns, config.block_k)
    traits = Traits(
        use_tma,
        w.stride(2) != 1,
        tiles.in_runs(spans.rows, config.block_m),
        in_runs,
        _in_whole_blocks(spans.columns, config.block_k, in_runs),
        tf32_allowed(),
        split_k,
        own,
        end_round,
    )
    num_tiles = tiles.num_tiles(config, shape) * shape.count
    if num_tiles == 0:
        return None
    if not own:  # after a failure the kernel counts this rank's tiles too
        assert tiles.num_tiles(config, shape) * workspace.group_size <= _MOST_TILES
    from fusedcomm.kernels.triton.gather_matmul import gather_matmul_kernel

    slots = describe_slots(workspace, spans, out.dtype, config) if use_tma else None
    constants = _matmul_constants(w, num_m, spans, workspace, fingerprint, config, traits)

    def arguments(out: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        return out, slots, *_weights(_matrices(w), bias, config, use_tma), *constants

    options = {"num_warps": config.num_warps, "num_stages": _num_stages(config, out, use_tma)}
    return Launch(gather_matmul_kernel, _grid(kind, workspace, num_tiles), arguments, maxnreg=_ALL_REGISTERS, **options)


def unpack(
    out: Tensor, spans: RoundSpans, workspace: Segments, fingerprint: int, *, end_round: bool = True, own: bool = True
) -> None:
    """Wait for every src_rank's chunk and copy it to its place in ``out``. Without ``own`` this rank's is there."""
    assert out.is_contiguous()

    def plan() -> Launch | None:
        if spans.unpack.size == 0:
            return None
        from fusedcomm.kernels.triton.copy import unpack_kernel

        traits = Unpacked(end_round, own)
        return _copies(unpack_kernel, out, spans.unpack, "unpack", workspace, fingerprint, traits)

    launch = _of_kind("unpack", plan, (out,), spans, workspace, fingerprint, end_round, own)
    if launch is not None:
        launch(out)
    elif end_round:
        wait(workspace, fingerprint)


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

    def plan() -> Launch:
        from fusedcomm.kernels.triton.reduce import reduce_kernel

        block, num_warps = tiles.reduce_block(tiles.architecture(out.device))
        constants = (
            workspace.segments,
            Reduced(span.size, span.start, spans.chunk_numel),
            1 if bias is None else bias.numel(),
            workspace.slot_bytes,
            fingerprint,
            workspace.rank,
            workspace.segment_layout,
            scale != 1.0,
            block,
        )
        grid = _grid("reduce", workspace, -(-span.size // block))
        options = {"num_warps": num_warps, "maxnreg": _ALL_REGISTERS}
        return Launch(reduce_kernel, grid, lambda out, bias: (out, _vector(bias), *constants), **options)

    launch = _of_kind("reduce", plan, (out, bias), spans, workspace, fingerprint, scale)
    assert launch is not None
    launch(out, bias)


def _of_kind(
    name: str,
    plan: Callable[[], Launch | None],
    tensors: tuple[Tensor | None, ...],
    spans: RoundSpans,
    workspace: Segments,
    *facts: Hashable,
) -> Launch | None:
    facts = (*facts, workspace.num_programs(name), tf32_allowed())
    return of_kind(workspace, plan, name, *facts, tensors=tensors, by=spans)


def _operands(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, K] and w as a push takes them, which needs K > 0."""
    if w.shape[-2] == 0:
        x, w = x.new_zeros(*x.shape[:-1], 1), w.new_zeros(*w.shape[:-2], 1, w.shape[-1])
    return x.flatten(0, -2).contiguous(), _matrices(w)


def _weights(w: Tensor, bias: Tensor | None, config: tiles.TileConfig, use_tma: bool) -> tuple[Any, Tensor | None]:
    return describe_w(w, config) if use_tma else w, _vector(bias)


def _vector(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _matmul_constants(
    w: Tensor,
    num_m: int,
    spans: RoundSpans,
    workspace: Segments,
    fingerprint: int,
    config: tiles.TileConfig,
    traits: Traits,
) -> tuple[Any, ...]:
    """The arguments of push_matmul_kernel and gather_matmul_kernel behind their tensors."""
    _, num_k, num_n = w.shape
    return (
        workspace.segments,
        (tuple(spans.batches), tuple(spans.rows), tuple(spans.columns)),  # Triton takes three times as long for named
        Sizes(num_m, num_n, num_k, *w.stride(), spans.chunk_numel, workspace.slot_bytes),
        fingerprint,
        workspace.rank,
        workspace.segment_layout,
        config,
        traits,
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


def _copies(
    kernel: Any, t: Tensor, span: Span, kind: str, workspace: Segments, fingerprint: int, traits: bool | Unpacked
) -> Launch:
    """A launch of pack_kernel or unpack_kernel. Its programs share the tiles of one chunk after the other."""
    config = tiles.copy_config(tiles.architecture(t.device), span, t.itemsize)
    ranks = workspace.rank, workspace.segment_layout
    constants = workspace.segments, tuple(span), workspace.slot_bytes, fingerprint, *ranks, config, traits
    grid = _grid(kind, workspace, tiles.num_copies(config, span))
    return Launch(kernel, grid, lambda t: (t, *constants), num_warps=config.num_warps)


def _in_whole_blocks(columns: Span, block_k: int, in_runs: bool) -> bool:
    """Whether no block of K ends early."""
    return columns.size == 0 or columns.inner % block_k == 0 or (not in_runs and columns.size % block_k == 0)


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
