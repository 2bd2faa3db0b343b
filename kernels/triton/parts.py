"""Chunks of different sizes: the Span that is a peer's own comes from a table on the device, a row for each peer."""

import triton
import triton.language as tl

from fusedcomm.geometry.spans import Span
from fusedcomm.kernels.triton.bundles import Part, Spans

_FIELDS = tl.constexpr(len(Part._fields))
_NUM_BEFORE = tl.constexpr(Part._fields.index("num_before"))
_NUM = tl.constexpr(Part._fields.index("num"))
_SLOT_ROW = tl.constexpr(Part._fields.index("slot_row"))


@triton.jit
def _number(parts, peer, FIELD: tl.constexpr, ALIGNED: tl.constexpr):
    number = tl.load(parts + peer * _FIELDS + FIELD)
    return tl.multiple_of(number, 16) if ALIGNED else number


@triton.jit
def span_of(span, parts, peer, ALIGNED: tl.constexpr):
    """The Span of a peer: its own, or without a table the one that all share."""
    if parts is not None:
        size = _number(parts, peer, 0, ALIGNED).to(tl.int32)
        start = _number(parts, peer, 1, ALIGNED)
        inner = _number(parts, peer, 2, ALIGNED).to(tl.int32)
        span = Span(size, start, inner, _number(parts, peer, 3, ALIGNED), 0)
    return span


@triton.jit
def spans_of(spans, peer, TRAITS: tl.constexpr):
    """The Spans of a peer, one of which may be its own."""
    batches, rows, columns, parts = spans
    if TRAITS.differs == "batches":
        batches = span_of(batches, parts, peer, TRAITS.aligned)
    elif TRAITS.differs == "rows":
        rows = span_of(rows, parts, peer, TRAITS.aligned)
    elif TRAITS.differs == "columns":
        columns = span_of(columns, parts, peer, TRAITS.aligned)
    return Spans(Span(*batches), Span(*rows), Span(*columns), parts)


@triton.jit
def num_before(parts, peer):
    """What the loop goes through before it comes to a peer: tiles, or blocks of K."""
    return tl.load(parts + peer * _FIELDS + _NUM_BEFORE).to(tl.int32)


@triton.jit
def num_of(parts, peer):
    """How much of it is a peer's."""
    return tl.load(parts + peer * _FIELDS + _NUM).to(tl.int32)


@triton.jit
def slot_row(parts, peer):
    """The first row of a peer's chunk in the descriptor of the slots."""
    return tl.load(parts + peer * _FIELDS + _SLOT_ROW).to(tl.int32)


@triton.jit
def find(index, parts, LAYOUT: tl.constexpr):
    """Whose a tile is, as a step of the loop through the peers, and which of that peer's. Peers may have none."""
    GROUP_SIZE: tl.constexpr = LAYOUT.group_size
    step = index * 0 - 1
    first = index * 0
    for peer in tl.static_range(GROUP_SIZE):
        begins = num_before(parts, peer)
        step += (begins <= index).to(tl.int32)
        first = max(first, tl.where(begins <= index, begins, 0))
    return step, index - first
