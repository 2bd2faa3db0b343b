"""Steps that launch the Triton kernels: arguments, tile sizes, and the number of programs. Triton is not imported.

A kernel that sends never waits, and one that waits never sends.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedcomm.kernels.triton import bundles
from fusedcomm.kernels.triton.bundles import Packed, Reduced, SegmentLayout, Sizes, Span, Traits, Unpacked
from fusedcomm.plan import tiles
from fusedcomm.plan.builder import Builder, Given, RmsNorm
from fusedcomm.plan.chunk_matmul import Operand
from fusedcomm.plan.descriptors import (
    can_describe_slots,
    can_describe_w,
    can_describe_x,
    column_shift,
    describe_slots,
    describe_w,
    describe_x,
    row_step,
    unit,
)
from fusedcomm.plan.geometry.spans import RoundSpans, bias_of
from fusedcomm.plan.scaled_programs import OfPayload
from fusedcomm.plan.scaling import BLOCK, Scaled
from fusedcomm.plan.schedule import Fingerprint, Launch, Place, Table

# Otherwise ptxas spills, to fit more blocks per multiprocessor than these persistent grids have.
ALL_REGISTERS = 255
_MOST_TILES = 2**31 - 2**12  # a program adds the number of programs to the last one it has
REGISTERS = 1 << 16  # of an SM
_LEAST_ALONE = 24 << 20  # bytes read and written: all SMs then save the 2 us of the kernel that waits for them
_MOST_AT_ONCE = 1 << 20  # bytes of a chunk, which are sent sooner than a signal of its own (predicted)
_POISON_BLOCK = 1024  # elements that one program makes NaN at a time
_IN_TRITON = {torch.float8_e4m3fn: "float8e4nv", torch.float8_e5m2: "float8e5"}  # dtypes that it names otherwise


def push(s: Builder, x: Operand, w: Operand, bias: Tensor | None, spans: RoundSpans) -> None:
    """Compute every dst_rank's chunk of x @ w + bias into its slot, and signal it.

    x [..., K]; w [K, N] or [..., K, N]; both or none of them Scaled.
    """
    if spans.chunk_numel == 0:
        signal(s, None)
        return
    dtype, fast = x.dtype, isinstance(w, Scaled) and w.fast  # of the chunks
    (x, x_scale), (w, w_scale) = _values(x), _values(w)
    num_m = x.shape[-2]  # rows per batch; unused where w has no batches
    if w.shape[-2] == 0:  # the kernel needs K > 0
        x, w = zeros(s, dtype, *x.shape[:-1], 1), zeros(s, dtype, *w.shape[:-2], 1, w.shape[-1])
        x_scale = w_scale = None
    x, w = s.contiguous(s.reshape(x, x.shape[:-1].numel(), x.shape[-1])), matrices(s, w)
    _, num_k, num_n = w.shape
    parts = 1, num_k % tiles.BLOCK_K == 0
    describable = can_describe_x(s, x) and can_describe_w(s, w, *parts)
    shift = column_shift(w, spans.columns)
    shape = tiles.Shape(spans.batches.size, spans.rows, spans.columns, num_k, s.group_size)
    if describable and s.device.has_tma:
        shape = replace(shape, shift=shift)
    numbers = () if w.stride(2) != 1 else spans.columns
    scaled = _scaled(w, x_scale, w_scale, dtype, fast)
    config = matmul_config(s, w, shape, "push", describable, aligned(w, num_k, *numbers), scaled, dtype)
    use_tma = s.device.has_tma and describable and tiles.boxes(config, shape)
    traits = Traits(
        use_tma,
        w.stride(2) != 1,
        tiles.in_runs(spans.rows, config.block_m),
        tiles.in_runs(spans.columns, config.block_n),
        num_k % config.block_k == 0,
        s.device.allow_tf32,
        shift=shape.shift if use_tma else 0,
        one_batch=spans.batches.size == 1,
        n_unit=unit(dtype.itemsize, num_n, *spans.columns),
        scaled=scaled,
        **loaded_units(w, use_tma),
    )
    arguments = (
        describe_x(s, x, config) if use_tma else s.place(x),
        *weights(s, w, bias, config, use_tma, parts),
        vector(s, x_scale),
        vector(s, w_scale),
        *_of_matmul(s, w, num_m, spans, config, traits),
    )
    num_programs = programs(s, "push", tiles.num_tiles(config, shape) * shape.count)
    options = {"num_warps": config.num_warps, "num_stages": num_stages(s, config, use_tma)}
    if config.num_warps < 8:  # more leave no room for a block that ptxas would make
        options["maxnreg"] = ALL_REGISTERS
    launch(s, "push_matmul.push_matmul_kernel", num_programs, arguments, **options)


def pack(s: Builder, t: Tensor, spans: RoundSpans, *, own: bool = True) -> None:
    """Copy every dst_rank's part of ``t`` into its slot, and signal it; the own chunk comes first.

    Without ``own`` this rank's chunk is signalled alone: it is taken from ``t`` itself.
    """
    assert t.is_contiguous()
    if spans.pack.size == 0:
        signal(s, None)
        return
    traits = Packed(own, spans.pack.size * t.itemsize > _MOST_AT_ONCE)
    _copies(s, "copy.pack_kernel", t, spans.pack, "pack", traits)


def gather_matmul(
    s: Builder,
    out: Tensor,
    w: Operand,
    bias: Tensor | None,
    spans: RoundSpans,
    *,
    end_round: bool,
    own: bool = True,
    dtype: torch.dtype | None = None,
) -> None:
    """Multiply every src_rank's chunk by its part of w, as the chunks arrive, into its rows of ``out``; add the bias.

    out [..., N] is the result of all rounds; w is [K, N] or [..., K, N]. ``end_round``: no kernel of this round
    follows. Without ``own`` this rank's rows are in ``out``. ``dtype``: of the chunks, if it is not out's.
    """
    assert out.is_contiguous()
    num_m = out.shape[-2]  # rows per batch; unused where w has no batches
    row_numel, dtype = spans.columns.size, dtype or out.dtype  # of chunks
    x_scale, payload, fast = (w.scale_x, w.payload, w.fast) if isinstance(w, OfPayload) else (None, None, False)
    if payload is not None:
        k, dtype = payload.ks[0], payload.dtype
        spans = replace(spans, columns=Span(k, 0, max(k, 1), 0, k if len(payload.ks) > 1 else 0))
    w, w_scale = _values(w)
    w = matrices(s, w)
    _, num_k, num_n = w.shape
    split_k = spans.columns.size != num_k
    assert own or not split_k
    num_parts = s.group_size if split_k else 1
    one_run = spans.columns.inner >= spans.columns.size
    parts = num_parts, not one_run or spans.columns.size % tiles.BLOCK_K == 0
    shape = _gather_shape(spans, num_n, 1 if split_k else s.group_size - (not own), num_parts)
    describable = can_describe_slots(spans, s.group_size, w.itemsize, row_numel) and can_describe_w(s, w, *parts)
    scaled = _scaled(w, x_scale, w_scale, dtype, fast, split_k)
    config = matmul_config(s, w, shape, "gather", describable, aligned(w, *spans.columns), scaled, out.dtype)
    use_tma = s.device.has_tma and describable
    if use_tma and not one_run:  # a box is of one run
        config = config._replace(block_k=math.gcd(spans.columns.inner, config.block_k))
    in_runs = tiles.in_runs(spans.columns, config.block_k)
    traits = Traits(
        use_tma,
        w.stride(2) != 1,
        tiles.in_runs(spans.rows, config.block_m),
        in_runs,
        _in_whole_blocks(spans.columns, config.block_k, in_runs),
        s.device.allow_tf32,
        split_k,
        own,
        end_round,
        one_batch=spans.batches.size == 1,
        n_unit=unit(out.itemsize, num_n),
        scaled=scaled,
        **loaded_units(w, use_tma, *spans.columns),
    )
    num_tiles = tiles.num_tiles(config, shape)
    if num_tiles * shape.count == 0:
        if end_round:
            wait(s)
        return
    if not own:  # after a failure the kernel counts this rank's tiles too
        assert num_tiles * s.group_size <= _MOST_TILES
    arguments = (
        s.place(out),
        describe_slots(s, spans, dtype, config, row_numel) if use_tma else None,
        *weights(s, w, bias, config, use_tma, parts),
        vector(s, x_scale),
        vector(s, w_scale),
        *_of_matmul(s, w, num_m, spans, config, traits),
    )
    options = {"num_warps": config.num_warps, "num_stages": num_stages(s, config, use_tma), "maxnreg": ALL_REGISTERS}
    num_programs = programs(s, "gather", num_tiles * shape.count)
    launch(s, "gather_matmul.gather_matmul_kernel", num_programs, arguments, **options)


def unpack(
    s: Builder,
    out: Tensor,
    spans: RoundSpans,
    *,
    norm: RmsNorm | None = None,
    end_round: bool = True,
    own: bool = True,
    beside: bool = False,
    arrived: bool = False,
) -> None:
    """Wait for every src_rank's chunk and copy it to its place in ``out``. Without ``own`` this rank's is there.

    ``norm``: of all chunks, each of whole rows, in the same kernel. ``beside``: a matmul needs SMs meanwhile.
    ``arrived``: something in front of it has waited for all ranks.
    """
    assert out.is_contiguous()
    if spans.unpack.size == 0:
        if end_round:
            wait(s)
        return
    kind = copy_out(s, (2 + (norm is not None)) * s.group_size * spans.unpack.size * out.itemsize, beside, arrived)
    if norm is None:
        _copies(s, "copy.unpack_kernel", out, spans.unpack, kind, Unpacked(end_round, own))
        return
    n = out.shape[-1]
    assert end_round and all(each % n == 0 for each in spans.unpack)
    rows = tuple(each // n for each in spans.unpack)
    _norm_arrived(s, "unpack_norm_kernel", kind, out, norm, 1, rows, own)


def reduce(
    s: Builder,
    out: Tensor,
    spans: RoundSpans,
    bias: Tensor | None,
    scale: float,
    *,
    residual: Given = None,
    norm: RmsNorm | None = None,
    beside: bool = False,
    arrived: bool = False,
) -> None:
    """Wait for every src_rank's chunk and add them up into ``out``, scaled, with the bias. This ends the round.

    A chunk is one run of out's elements, rows as long as the bias, or a part of one. ``scale``: 1, or 1 / R for the
    average. ``residual``: one addend more, of out's shape, contiguous. ``norm``: of the sum with a residual, in the
    same kernel. ``beside`` and ``arrived``: as in `unpack`.
    """
    span = spans.at(s.rank).pack
    assert out.is_contiguous() and span.inner >= span.size
    assert residual is None or (residual.is_contiguous() and scale == 1)
    assert scale in (1.0, 1.0 / s.group_size)
    if span.size == 0:
        wait(s)
        return
    bias = bias_of(bias, span)
    run, num_results = Reduced(span.size, span.start, spans.chunk_numel), 1 if norm is None else 3
    kind = copy_out(s, (s.group_size + num_results) * span.size * out.itemsize, beside, arrived)
    if norm is not None:
        n = out.shape[-1]
        assert residual is not None and run.size % n == run.start % n == 0
        others = run, s.place(residual), vector(s, bias)
        _norm_arrived(s, "reduce_norm_kernel", kind, out, norm, s.group_size, *others)
        return
    block, num_warps, in_sm = tiles.reduce_config(s.device.architecture, s.group_size, bias is not None)
    arguments = (
        s.place(out),
        vector(s, bias),
        s.optional(residual),
        Table(),
        run,
        1 if bias is None else bias.numel(),
        s.memory.slot_bytes,
        *of_round(s),
        scale != 1.0,
        block,
    )
    options = {"num_warps": num_warps, "maxnreg": min(ALL_REGISTERS, REGISTERS // (32 * num_warps * in_sm))}
    alone = kind == "copy-out" and not s.device.shares_gpu
    num_programs = programs(s, kind, -(-span.size // block), in_sm if alone else 1)
    launch(s, "reduce.reduce_kernel", num_programs, arguments, **options)


def _norm_arrived(s: Builder, kernel: str, kind: str, out: Tensor, norm: RmsNorm, num_terms: int, *others: Any) -> None:
    """Launch a kernel that waits for ``num_terms`` of each element, and norms the rows."""
    n = out.shape[-1]
    assert norm.normed.is_contiguous()
    block, num_warps = tiles.norm_config(s.device.architecture, n, out.itemsize, num_terms)
    arguments = (
        *map(s.place, (norm.normed, out)),
        vector(s, norm.weight),
        Table(),
        n,
        float(norm.eps),
        s.memory.slot_bytes,
        *of_round(s),
        unit(out.itemsize, n),
        block,
        n <= block,
        *others,
    )
    options = {"num_warps": num_warps, "maxnreg": min(ALL_REGISTERS, REGISTERS // (32 * num_warps))}
    launch(s, f"reduce_norm.{kernel}", programs(s, kind, out.numel() // n), arguments, **options)


def norm(s: Builder, normed: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> None:
    """``normed = x / sqrt(mean(x ** 2) + eps) * weight`` of each row [..., N], contiguous. It waits for nobody."""
    assert x.is_contiguous() and normed.is_contiguous()
    if x.numel() == 0:
        return
    n = x.shape[-1]
    block, num_warps = tiles.norm_config(s.device.architecture, n, x.itemsize, 1)
    num_rows, numbers = x.numel() // n, (unit(x.itemsize, n), block, n <= block)
    arguments = s.place(normed), s.place(x), vector(s, weight), num_rows, n, float(eps), *numbers
    launch(s, "reduce_norm.norm_kernel", programs(s, "copy-out", num_rows, 2), arguments, num_warps=num_warps)


def copy_out(s: Builder, num_bytes: int, beside: bool, arrived: bool) -> str:
    """The programs of a copy-out. It never waits on all SMs: kernels of ranks that it waits for may need some."""
    if beside or (num_bytes < _LEAST_ALONE and not arrived):
        return "copy-out beside"
    if not arrived:
        wait_all(s)
    return "copy-out"


def begin_push(s: Builder) -> None:
    """Call this before a round's first copy to a peer on this stream. Kernels that push do the same themselves."""
    launch(s, "handshake.begin_push_kernel", 1, (Table(), s.rank, s.memory.layout), num_warps=1)


def signal(s: Builder, dst_rank: int | None) -> None:
    """Signal one rank, or all ranks from rank + 1 on, that the chunks before it on the stream are there."""
    first = (s.rank + 1) % s.group_size if dst_rank is None else dst_rank
    assert 0 <= first < s.group_size, f"dst_rank must be in [0, {s.group_size}), got {dst_rank}"
    count = s.group_size if dst_rank is None else 1
    launch(s, "handshake.signal_kernel", 1, (Table(), first, count, *of_round(s)), num_warps=1)


def wait_source(s: Builder, src_rank: int) -> None:
    """Wait for one rank's signal, so that the stream may read its chunk. ``finish`` must follow the reads."""
    assert 0 <= src_rank < s.group_size, f"src_rank must be in [0, {s.group_size}), got {src_rank}"
    launch(s, "handshake.wait_source_kernel", 1, (Table(), src_rank, *of_round(s)), num_warps=1)


def wait(s: Builder) -> None:
    """Wait for all ranks' signals and end a round without reads."""
    _finish(s, None, end_round=True)


def wait_all(s: Builder) -> None:
    """Wait for all ranks' signals on one SM: a kernel that follows on the stream may fill the GPU, as it will not wait.

    A kernel that ends the round must follow.
    """
    _finish(s, None, end_round=False)


def finish(s: Builder, out: Tensor, *, end_round: bool) -> None:
    """Make ``out`` NaN if a wait has failed or the slot was given up. Call this on the stream of a round's reads."""
    assert out.is_contiguous()
    _finish(s, out, end_round)


def _finish(s: Builder, out: Tensor | None, end_round: bool) -> None:
    numel = 0 if out is None else out.numel()
    arguments = s.optional(out), numel, Table(), *of_round(s), _POISON_BLOCK, end_round
    launch(s, "handshake.finish_kernel", 1, arguments, num_warps=1)


def contiguous(s: Builder, x: Operand) -> Operand:
    return replace(x, values=s.contiguous(x.values)) if isinstance(x, Scaled) else s.contiguous(x)


def loadable(s: Builder, w: Operand) -> Operand:
    """w with K or N contiguous, as the kernels take it, K if it is float8: a copy only where it is not."""
    if isinstance(w, Scaled):
        return w if w.values.stride(-2) == 1 else replace(w, values=s.contiguous(w.values.mT).mT)
    return w if 1 in w.stride()[-2:] else s.contiguous(w)


def _values(operand: Operand) -> tuple[Tensor, Given]:
    return (operand.values, operand.scale) if isinstance(operand, Scaled) else (operand, None)


def _scaled(
    w: Tensor, x_scale: Given, w_scale: Given, dtype: torch.dtype, fast: bool, split_k: bool = False
) -> bundles.Scaled | None:
    """w [num_batches, K, N]; w_scale [..., blocks of K, blocks of N], or one element. No x_scale: it is packed."""
    if w_scale is None:
        return None
    packed, shared = x_scale is None, w_scale.numel() == 1
    num_blocks = (1, 1) if shared else w_scale.shape[-2:]
    of_k, of_n = (0 if n == 1 else 1 if n == size else BLOCK for n, size in zip(num_blocks, w.shape[1:], strict=True))
    by_row = x_scale is None or x_scale.numel() > 1
    name = _IN_TRITON.get(dtype) or str(dtype).removeprefix("torch.")
    fast = fast and of_k == 0 and not (packed and split_k)  # otherwise scales change along K
    fast = fast and of_n != BLOCK  # or inside of its wide tiles
    return bundles.Scaled(by_row, packed, len(w) > 1 and not shared, of_k, of_n, name, fast)


def launch(s: Builder, kernel: str, num_programs: int, arguments: tuple[Any, ...], **options: int) -> None:
    early = {"launch_pdl": True} if s.device.launches_early else {}
    s.add(Launch(kernel, num_programs, arguments, tuple({**options, **early}.items())))


def programs(s: Builder, kind: str, num_tiles: int, per_sm: int = 1) -> int:
    assert num_tiles <= _MOST_TILES, f"a kernel counts at most {_MOST_TILES} tiles, got {num_tiles}"
    return min(s.device.num_programs(kind) * per_sm, num_tiles)


def zeros(s: Builder, dtype: torch.dtype, *shape: int) -> Tensor:
    """The product if K is 0; it may be empty."""
    made, none, numel = s.temporary(shape, dtype), s.temporary((0,), dtype), math.prod(shape)
    s.multiply(none.as_strided((1, numel, 0), (0, 0, 1)), none.view(1, 0, 1), None, made.view(1, numel, 1))
    return made


def matrices(s: Builder, w: Tensor) -> Tensor:
    """w as the kernels' [num_batches, K, N], K or N contiguous."""
    w = w if 1 in w.stride()[-2:] else s.contiguous(w)
    return s.reshape(w, w.shape[:-2].numel(), *w.shape[-2:])


def weights(
    s: Builder, w: Tensor, bias: Tensor | None, config: tiles.TileConfig, use_tma: bool, parts: tuple[int, bool]
) -> tuple[Any, Place | None]:
    return describe_w(s, w, config, *parts) if use_tma else s.place(w), vector(s, bias)


def aligned(w: Tensor, *numbers: int) -> bool:
    """Whether loads by pointer can take 8 bytes: rows of w and these numbers of elements are multiples."""
    return all(number * w.itemsize % 8 == 0 for number in (row_step(w), *numbers))


def loaded_units(w: Tensor, use_tma: bool, *columns: int) -> dict[str, int]:
    if use_tma:
        return {}
    strides = (row_step(w), w.stride(0) if len(w) > 1 else 0)
    return {"k_unit": unit(w.itemsize, w.shape[1], *columns), "w_unit": unit(w.itemsize, *strides)}


def vector(s: Builder, bias: Tensor | None) -> Place | None:
    return None if bias is None else s.place(s.contiguous(bias))


def of_round(s: Builder) -> tuple[Fingerprint, int, SegmentLayout]:
    return Fingerprint(), s.rank, s.memory.layout


def _of_matmul(
    s: Builder, w: Tensor, num_m: int, spans: RoundSpans, config: tiles.TileConfig, traits: Traits
) -> tuple[Any, ...]:
    """The arguments of push_matmul_kernel and gather_matmul_kernel behind their tensors."""
    _, num_k, num_n = w.shape
    return (
        Table(),
        (tuple(spans.batches), tuple(spans.rows), tuple(spans.columns)),  # Triton takes three times as long for named
        Sizes(num_m, num_n, num_k, *w.stride(), spans.chunk_numel, s.memory.slot_bytes),
        *of_round(s),
        config,
        traits,
    )


def _copies(s: Builder, kernel: str, t: Tensor, span: Span, kind: str, traits: Packed | Unpacked) -> None:
    """Launch pack_kernel or unpack_kernel. Its programs share the tiles of all chunks, or of one after the other."""
    config = tiles.copy_config(s.device.architecture, span, t.itemsize)
    arguments = s.place(t), Table(), tuple(span), s.memory.slot_bytes, *of_round(s), config, traits
    num_chunks = 1 if isinstance(traits, Packed) and traits.by_chunk else s.group_size  # each program reports each
    num_programs = programs(s, kind, min(num_chunks * tiles.num_copies(config, span), _MOST_TILES))
    launch(s, kernel, num_programs, arguments, num_warps=config.num_warps)


def _in_whole_blocks(columns: Span, block_k: int, in_runs: int) -> bool:
    return columns.size == 0 or columns.inner % block_k == 0 or (not in_runs and columns.size % block_k == 0)


def matmul_config(
    s: Builder,
    w: Tensor,
    shape: tiles.Shape,
    kind: str,
    describable: bool,
    aligned: bool,
    scaled: bundles.Scaled | None,
    dtype: torch.dtype,
) -> tiles.TileConfig:
    device = s.device
    x_lines, w_lines = (tiles.lines(numel * w.itemsize) for numel in (shape.k, row_step(w)))
    config = tiles.matmul_config(
        device.architecture,
        w.dtype,
        replace(shape, x_lines=x_lines, w_lines=w_lines),
        device.num_programs(kind),
        describable and device.has_tma,
        device.allow_tf32,
        aligned,
        scaled is not None and scaled.fast and dtype.itemsize == 2,  # a wide result takes the registers
    )
    assert scaled is None or scaled.block_n != BLOCK or config.block_n <= BLOCK, "a tile has one scale of columns"
    return config


def num_stages(s: Builder, config: tiles.TileConfig, use_tma: bool) -> int:
    """On Hopper and later Triton before 3.7 leaves out the fence that tensor cores need behind copies by pointer
    (cp.async). One stage needs none: data go through registers, and stores from there are fenced.
    """
    unfenced = s.device.has_tma and not use_tma and s.device.triton < (3, 7)
    return 1 if unfenced else config.num_stages


def _gather_shape(spans: RoundSpans, num_n: int, count: int, num_parts: int) -> tiles.Shape:
    """The work of gather_matmul_kernel: one matmul for each source, or a single one that adds up all sources."""
    columns = Span(num_n, 0, max(num_n, 1), 0, 0)
    return tiles.Shape(spans.batches.size, spans.rows, columns, spans.columns.size, count, num_parts=num_parts)
