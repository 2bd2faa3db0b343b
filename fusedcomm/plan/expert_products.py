"""Launches of the matmuls of experts' rows: stored where the rows are, or sent to the ranks whose choices they are.

The host knows no expert's rows: kernels read where they begin and end.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusedcomm.kernels.triton.bundles import Piece, Sizes, Span, TileConfig, Traits
from fusedcomm.plan import launches, tiles
from fusedcomm.plan.builder import Builder
from fusedcomm.plan.descriptors import can_describe_w, can_describe_x, describe_x, unit
from fusedcomm.plan.schedule import Table

_ZEROS = 16  # rows that a program makes zero at a time


class _Products(NamedTuple):
    """h [capacity, K] times w [experts, K, N], as kernels take them."""

    operands: tuple[Any, Any]
    sizes: Sizes
    config: TileConfig
    traits: Traits
    num_tiles: int
    options: dict[str, int]


def send_products(s: Builder, h: Tensor, w: Tensor, first: Tensor, filled: Tensor, returns: Tensor) -> None:
    """Send each of the experts' products to the rank whose choice its row is; signal every rank."""
    aligned = math.gcd(16 // h.itemsize, w.shape[2])
    # Narrow stores to rows anywhere take registers that the widest tiles do not leave.
    made = _products(s, s.contiguous(h), w, "push", aligned * h.itemsize == 16)
    rows, static = map(s.place, (first, filled, returns)), (made.config, made.traits, aligned, len(w))
    arguments = *made.operands, *rows, Table(), made.sizes, *launches.of_round(s), *static
    _launch(s, "grouped_matmul_kernel", "push", made, arguments)


def store_products(
    s: Builder, outs: Sequence[Tensor], h: Tensor, ws: Sequence[Tensor], first: Tensor, ends: Tensor, piece: Piece
) -> None:
    """``out[rows of e] = h[rows of e] @ w[e]`` of a piece, all contiguous; behind the last expert's rows zero.

    Other pieces than the last leave SMs to the rows of the next.
    """
    kind = "push" if piece.end == piece.experts else "matmul beside"
    for out, w in zip(outs, ws, strict=True):
        made = _products(s, h, w[piece.begin : piece.end], kind, True)
        rows, static = map(s.place, (first, ends)), (made.config, made.traits, piece, _ZEROS)
        _launch(
            s,
            "experts_matmul_kernel",
            kind,
            made,
            (s.place(out), s.place(h), *made.operands, *rows, made.sizes, *static),
        )


def _products(s: Builder, h: Tensor, w: Tensor, kind: str, by_tma: bool) -> _Products:
    w = launches.matrices(s, w)
    capacity, (num, num_k, num_n) = len(h), w.shape
    parts = 1, num_k % tiles.BLOCK_K == 0
    describable = by_tma and can_describe_x(s, h) and can_describe_w(s, w, *parts)
    shape = tiles.Shape(num, _run(-(-capacity // num)), _run(num_n), num_k, 1)  # as if they were equal
    row_major = () if w.stride(2) != 1 else (num_n,)
    is_aligned = launches.aligned(w, num_k, *row_major)
    config = launches.matmul_config(s, w, shape, kind, describable, is_aligned, None, h.dtype)
    use_tma = s.device.has_tma and describable
    traits = Traits(
        use_tma,
        w.stride(2) != 1,
        rows_in_runs=2,
        columns_in_runs=2,
        even_k=num_k % config.block_k == 0,
        allow_tf32=s.device.allow_tf32,
        n_unit=unit(h.itemsize, num_n),
        **launches.loaded_units(w, use_tma),
    )
    operands = (
        describe_x(s, h, config) if use_tma else s.place(h),
        launches.weights(s, w, None, config, use_tma, parts)[0],
    )
    sizes = Sizes(capacity, num_n, num_k, *w.stride(), 0, s.memory.slot_bytes)
    options = {"num_warps": config.num_warps, "num_stages": launches.num_stages(s, config, use_tma)}
    if config.num_warps < 8:
        options["maxnreg"] = launches.ALL_REGISTERS
    num_tiles = (-(-capacity // config.block_m) + num) * -(-num_n // config.block_n)
    return _Products(operands, sizes, config, traits, num_tiles, options)


def _launch(s: Builder, kernel: str, kind: str, made: _Products, arguments: tuple[Any, ...]) -> None:
    num_programs = launches.programs(s, kind, made.num_tiles)
    launches.launch(s, f"grouped_matmul.{kernel}", num_programs, arguments, **made.options)


def _run(size: int) -> Span:
    return Span(size, 0, max(size, 1), 0, 0)
