"""Tile sizes of the Triton kernels: a table per architecture, and the rule that picks a row."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fusedcomm.kernels.triton.bundles import CopyConfig, Span, TileConfig

INTERPRETER = 0  # an "architecture": Triton's interpreter on the CPU
BLOCK_K = 128  # block_k is this, or a divisor of it, in all tiles that descriptors load
_MAX_POINTER_N = 128
_MAX_POINTER_K = 64
_ELEMENTS_OF_WARP = 2048  # most of a tile loaded or stored through registers
_MAX_ELEMENT_N = 64
_LINE, _HALF_LINE = 128, 64  # bytes; elements of two bytes
# An H200's multiprocessor: 900 ns for the 768 lines of a step of 128 x 256 where rows of x and w straddle lines, 606
# for the 512 of 128 x 128.
_NS_OF_LINE = 1.18
_MAX_RUN_WASTE = 1.25  # bound on computed / needed elements of tiles that stop at the end of a run


@dataclass(frozen=True)
class Shape:
    """One of ``count`` equal matmuls that a kernel does: num_batches of rows [.., k] @ [k, columns].

    ``shift``: how far before a run of columns its first tile may begin. ``num_parts``: of K, k each. ``x_lines`` and
    ``w_lines``: lines of the L2 cache for each 128 bytes of a row.
    """

    num_batches: int
    rows: Span
    columns: Span
    k: int
    count: int
    shift: int = 0
    num_parts: int = 1
    x_lines: int = 1
    w_lines: int = 1


class Rated(NamedTuple):
    """A tile, and nanoseconds of a multiprocessor for a step of block_k, and for the rest of a tile."""

    config: TileConfig
    step: int
    rest: int


# The largest tile comes first. tests/kernels/test_compile_only.py checks registers and shared memory of every row. Only
# ratios within a table count. sm_90 was measured on an H200, the others follow from the peak of the tensor cores.
_HALF: dict[int, tuple[Rated, ...]] = {
    80: (  # fits the 99 KiB of sm_86, sm_89 and sm_120 too
        Rated(TileConfig(128, 128, 64, 8, 8, 4, halves=True), 730, 2000),
        Rated(TileConfig(64, 128, 64, 8, 4, 3), 430, 1500),
        Rated(TileConfig(64, 64, 64, 8, 4, 3), 260, 1200),
    ),
    90: (
        Rated(TileConfig(128, 256, 64, 8, 8, 4, halves=True), 643, 2450),
        Rated(TileConfig(128, 128, 64, 8, 4, 4, halves=True), 352, 1110),
        Rated(TileConfig(64, 128, 128, 8, 4, 4, halves=True), 428, 1140),
        Rated(TileConfig(64, 64, 128, 8, 4, 4), 321, 700),
    ),
    100: (
        Rated(TileConfig(128, 256, 64, 8, 8, 4, halves=True), 643, 2450),
        Rated(TileConfig(128, 128, 64, 8, 8, 4, halves=True), 364, 1450),
        Rated(TileConfig(64, 128, 64, 8, 4, 4), 272, 570),
        Rated(TileConfig(64, 64, 64, 8, 4, 4), 255, 300),
    ),
}
# sm_90 adds up twice, in fewer bits and in float32, and multiplies no step while it adds: 128 x 128 were measured.
_FLOAT8: dict[int, tuple[Rated, ...]] = {
    90: (
        Rated(TileConfig(128, 128, 128, 8, 8, 4, halves=True), 536, 1450),
        Rated(TileConfig(64, 128, 128, 8, 4, 4), 400, 570),
        Rated(TileConfig(64, 64, 128, 8, 4, 4), 375, 300),
    ),
    100: (
        Rated(TileConfig(128, 128, 128, 8, 8, 3, halves=True), 364, 1450),
        Rated(TileConfig(64, 128, 128, 8, 4, 4), 272, 570),
        Rated(TileConfig(64, 64, 128, 8, 4, 4), 255, 300),
    ),
}
_FAST_FLOAT8 = {  # sums have the tensor cores' bits, and results two bytes
    90: (
        Rated(TileConfig(128, 256, 128, 8, 8, 4, halves=True), 586, 2450),
        Rated(TileConfig(128, 128, 128, 8, 8, 4, halves=True), 333, 1450),
        Rated(TileConfig(64, 128, 128, 8, 4, 4), 272, 570),
        Rated(TileConfig(64, 64, 128, 8, 4, 4), 255, 300),
    ),
    100: _FLOAT8[100],
}
_TF32 = (
    Rated(TileConfig(128, 128, 32, 8, 8, 3, halves=True), 400, 2400),
    Rated(TileConfig(64, 64, 32, 8, 4, 3), 150, 1400),
)
_FP32 = (  # no tensor cores
    Rated(TileConfig(64, 64, 16, 8, 8, 3), 600, 2000),
    Rated(TileConfig(32, 32, 16, 8, 4, 3), 200, 1000),
)


def in_runs(span: Span, block: int) -> int:
    """Whether tiles stop at the end of each run, so that a tile's indices are consecutive, as Traits have it."""
    if span.inner >= span.size:
        return 2
    return int(-(-span.inner // block) * block <= _MAX_RUN_WASTE * span.inner)


def num_tiles(config: TileConfig, shape: Shape) -> int:
    """Tiles of one matmul."""
    num_m = num_cuts(shape.rows, config.block_m, in_runs(shape.rows, config.block_m))
    stops = in_runs(shape.columns, config.block_n)
    return shape.num_batches * num_m * num_cuts(shape.columns, config.block_n, stops, shape.shift)


def num_cuts(span: Span, block: int, stops: int, shift: int = 0) -> int:
    """Tiles of a Span, which may stop at the end of each run: as kernels/triton/matmul.py:num_tiles counts them."""
    return -(-span.size // span.inner) * -(-(span.inner + shift) // block) if stops else -(-span.size // block)


def matmul_config(
    arch: int,
    dtype: torch.dtype,
    shape: Shape,
    num_programs: int,
    describable: bool,
    allow_tf32: bool,
    aligned: bool = True,
    fast: bool = False,
) -> TileConfig:
    """The tile that takes the programs the least time; the larger one of equals.

    ``describable``: tensor descriptors can load w, and x if the kernel has one for it. ``aligned``: loads by pointer
    take 8 bytes or more. They need registers that the widest tiles do not leave, as do the masked stores of shifted
    tiles, and loads of fewer bytes need even more. ``fast``: float8 sums have the tensor cores' bits, and results two
    bytes.
    """
    if arch == INTERPRETER:
        m, n = _fitting(shape.rows.size, 64), _fitting(shape.columns.size, 64)
        return TileConfig(m, n, _fitting(shape.k, 64), 2, 4, 1)
    single = _TF32 if allow_tf32 else _FP32
    float8 = _FAST_FLOAT8 if fast else _FLOAT8
    table = single if dtype == torch.float32 else (float8 if dtype.itemsize == 1 else _HALF)[arch]

    def fits(config: TileConfig) -> bool:
        by_pointer = not (describable and boxes(config, shape))
        most_n = _MAX_ELEMENT_N if by_pointer and not aligned else _MAX_POINTER_N
        return config.block_n <= most_n or not (by_pointer or shape.shift)

    found = min((each for each in table if fits(each.config)), key=lambda each: cost(each, shape, num_programs)).config
    by_pointer = not (describable and boxes(found, shape))
    if by_pointer or shape.shift:
        most = _ELEMENTS_OF_WARP if aligned or not by_pointer else _ELEMENTS_OF_WARP // 4
        found = found._replace(num_warps=max(found.num_warps, found.block_m * found.block_n // most))
    most_k = _MAX_POINTER_K if aligned or dtype.itemsize > 1 else _MAX_POINTER_K // 2
    return found._replace(block_k=min(found.block_k, most_k)) if by_pointer else found


def cost(rated: Rated, shape: Shape, num_programs: int) -> int:
    """Nanoseconds that the programs take: as long as the one with most tiles."""
    config, step = rated.config, rated.step
    if max(shape.x_lines, shape.w_lines) > 1:
        num_lines = config.block_k * (config.block_m * shape.x_lines + config.block_n * shape.w_lines) // _HALF_LINE
        step = max(step, int(num_lines * _NS_OF_LINE))
    waves = -(-num_tiles(config, shape) * shape.count // num_programs)
    return waves * (shape.num_parts * -(-shape.k // config.block_k) * step + rated.rest)


def lines(row_bytes: int) -> int:
    """Lines of the L2 cache that 128 bytes of a row lie in."""
    return 1 if row_bytes % _LINE == 0 else 2


def boxes(config: TileConfig, shape: Shape) -> bool:
    """Whether every tile is one box of x and one of w, as tensor descriptors load them."""
    return in_runs(shape.rows, config.block_m) > 0 and in_runs(shape.columns, config.block_n) > 0


def copy_config(arch: int, span: Span, itemsize: int) -> CopyConfig:
    """Sizes for 32 KiB at a time, which is 4 loads of 16 bytes in flight per thread; 2 KiB where runs are unaligned.

    With one program an SM, an H200 copies 0.91 to 0.95 as fast as by cudaMemcpy; 0.89 to 0.90 by 8 warps with 8 loads.
    """
    aligned = span.inner % 16 == 0
    numel = 1024 if arch == INTERPRETER else (32768 if aligned else 2048) // itemsize
    block_inner = min(numel, _fitting(span.inner, numel))
    return CopyConfig(numel // block_inner, block_inner, 16 if aligned else 8)


def num_copies(config: CopyConfig, span: Span) -> int:
    """Tiles of a chunk that is copied."""
    return -(-(span.size // span.inner) // config.block_runs) * -(-span.inner // config.block_inner)


def reduce_config(arch: int, group_size: int, has_bias: bool) -> tuple[int, int, int]:
    """Elements that a CUDA block adds up at a time, its warps, and how many blocks an SM runs.

    With two blocks an SM an H200 adds up chunks of 2, 4, 8 ranks 0.95, 0.90, 0.87 as fast as it copies as many bytes,
    but for the waits. The loads of more than 8 ranks, or of 8 and a bias, take the registers of both.
    """
    if arch == INTERPRETER:
        return 1024, 4, 1
    return (8192 if group_size <= 2 else 4096), 16, (2 if group_size <= (4 if has_bias else 8) else 1)


def rows_config(arch: int, n: int, itemsize: int) -> tuple[int, int]:
    """Elements of a row [n] that a CUDA block moves at a time, in two loads of 16 bytes a thread, and its warps."""
    if arch == INTERPRETER:
        return 64, 4
    block = _fitting(n, (8 << 10) // itemsize)
    return block, max(1, block * itemsize // 1024)


def norm_config(arch: int, n: int, itemsize: int, group_size: int) -> tuple[int, int]:
    """Elements of a row [n] that a CUDA block norms at a time, and its warps. A row that it holds is read once.

    There may be fewer rows than SMs: so as many warps as take loads of 16 bytes. Larger blocks would spill.
    """
    if arch == INTERPRETER:
        return 64, 4
    most = (16 << 10) // itemsize
    if n > most or group_size > 8:
        most //= 2 if group_size <= 8 else 4
    block = _fitting(n, most)
    return block, max(1, min(16, block // 256))


def _fitting(size: int, most: int) -> int:
    return min(most, max(16, 1 << (size - 1).bit_length()))


def refuses_scaled(architecture: int) -> str | None:
    """Why GPUs with tiles of this architecture cannot run float8 kernels; None if they can."""
    return "float8 kernels need wgmma or tcgen05: sm_90 or sm_100" if 0 < architecture < 90 else None
