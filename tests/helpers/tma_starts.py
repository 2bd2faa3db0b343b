"""Starts of TMA loads: one in the contiguous dim that is no multiple of 16 bytes is an illegal instruction, which
ends the CUDA context. The driver does not see it, as tensor maps say nothing of coordinates.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fusedcomm.kernels.triton.bundles import Span
from fusedcomm.plan.schedule import Described
from fusedcomm.plan.tiles import num_cuts

ALIGNMENT = 16  # bytes


def start_violations(kernel: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    """The rule broken by the loads that a launch of a matmul can reach."""
    if kernel not in ("push_matmul_kernel", "gather_matmul_kernel") or not arguments["TRAITS"].by_tma:
        return
    itemsize = _itemsize(arguments["w"])
    starts = _push_starts(arguments) if kernel == "push_matmul_kernel" else _gather_starts(arguments)
    for name, start in starts:
        if start * itemsize % ALIGNMENT:
            yield f"tensor map start of {name}: it must be a multiple of 16 bytes, got {start} * {itemsize}"
            return


def _itemsize(descriptor: Any) -> int:
    """The address of Triton's descriptor, or of a planned one."""
    return descriptor.place.dtype.itemsize if isinstance(descriptor, Described) else descriptor.base.itemsize


def _has_parts(descriptor: Any) -> bool:
    """Whether the sources' parts of K have a dim of their own."""
    return len(descriptor.shape) == 3


def _push_starts(arguments: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    tile, traits, num_k = arguments["TILE"], arguments["TRAITS"], arguments["sizes"].K
    for k in range(0, num_k, tile.block_k):
        yield "x", k
    if not traits.w_transposed:
        for peer in range(arguments["LAYOUT"].group_size):
            for start in _cut_starts(Span(*arguments["spans"][2]), peer, tile.block_n, traits.shift):
                yield "w", start


def _gather_starts(arguments: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    tile, traits, columns = arguments["TILE"], arguments["TRAITS"], Span(*arguments["spans"][2])
    for peer in range(arguments["LAYOUT"].group_size):
        for k in range(0, columns.size, tile.block_k):
            yield "slots", k
            if traits.w_transposed and (not traits.split_k or _has_parts(arguments["w"])):
                yield "w", k
        if traits.w_transposed and traits.split_k and not _has_parts(arguments["w"]):
            for start in _cut_starts(columns, peer, tile.block_k, 0):
                yield "w", start
    if not traits.w_transposed:
        yield "w", tile.block_n  # columns of w are not split


def _cut_starts(span: Span, peer: int, block: int, shift: int) -> Iterator[int]:
    """The index at which each tile of a Span begins, as kernels/triton/matmul.py:column_range has it."""
    if span.size == 0:
        return
    in_run = num_cuts(Span(span.inner, 0, span.inner, 0, 0), block, True, shift)
    for run in range(-(-span.size // span.inner)):
        begin = span.first(peer) + run * span.outer_stride
        for tile in range(in_run):
            yield begin + tile * block - begin % (shift + 1)
