"""The device's table for chunks of different sizes, a row for each peer (kernels/triton/parts.py reads it).

A launch makes its table on the stream that it is launched on, and no other stream ever reads it. So the stream's order
alone says that the copy comes before the kernel, and the allocator's next use of that memory behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedcomm.geometry.spans import ChunkSpans, RoundSpans, Span
from fusedcomm.kernels.triton.bundles import Part, Spans

ALIGNMENT = 16  # elements: what Triton looks for in the numbers of a launch, to load and store vectors
NO_SPAN = Span(0, 0, ALIGNMENT, 0, 0)  # in place of what the table has


def own_span(span: Span) -> Part:
    """A peer's row, whose numbers are as aligned as can be where it has no elements."""
    return Part(span.size, span.start, span.inner, span.outer_stride) if span.size else Part(0, 0, ALIGNMENT, 0)


def matmul_parts(spans: RoundSpans, order: Sequence[int], num: Callable[[ChunkSpans], int]) -> list[Part]:
    """A row for each peer. ``num``: how many tiles, or blocks of K, a loop through the peers in ``order`` finds."""
    found, num_before = dict[int, Part](), 0
    for peer in order:
        chunk = spans.at(peer)
        own = own_span(getattr(chunk, spans.differs))
        found[peer] = own._replace(num_before=num_before, num=num(chunk))
        num_before += found[peer].num
    return [found[peer] for peer in range(len(order))]


def shared_spans(spans: RoundSpans, rank: int, parts: Tensor | None) -> Spans:
    """What a matmul's kernel gets, as plain tuples, which Triton takes in a third of the time of named ones.

    ``parts`` has the Span that differs.
    """
    chunk = spans.at(rank)
    own = {name: tuple(getattr(chunk, name)) for name in ("batches", "rows", "columns")}
    if spans.differs:
        own[spans.differs] = tuple(NO_SPAN)
    return own["batches"], own["rows"], own["columns"], parts


def are_aligned(parts: Sequence[Part]) -> bool:
    return all(number % ALIGNMENT == 0 for part in parts for number in part[:4])


def upload(parts: Sequence[Part], device: torch.device) -> Tensor:
    """The table [R, fields], copied by the current stream; pinned memory lets the host go on."""
    rows = torch.tensor(parts, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return torch.empty(rows.shape, dtype=rows.dtype, device=device).copy_(rows, non_blocking=True)
