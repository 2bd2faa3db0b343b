"""Matmuls on the parts of tensors that Spans describe. An operand is copied only if runs are short or rows few."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedcomm.kernels.triton.bundles import Span
from fusedcomm.plan.builder import Builder
from fusedcomm.plan.geometry import exchange as geometry
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.geometry.spans import ChunkSpans, RoundSpans
from fusedcomm.plan.scaling import BLOCK, Scaled

Operand = Tensor | Scaled


class PushedMatmul:
    """Computes any chunk of ``x @ w + bias`` into a given place. Without w, x is the product.

    K is x's own, not the exchange's: chunks do not depend on it.
    """

    def __init__(self, s: Builder, x: Operand, w: Operand | None, bias: Tensor | None, exchange: Exchange) -> None:
        self.s, self.dtype = s, x.dtype
        self.scales: Sequence[Tensor] = ()  # [batches, rows, blocks of K], [batches, blocks of K, columns]
        self.fast = isinstance(w, Scaled) and w.fast
        if isinstance(x, Scaled) and isinstance(w, Scaled):
            self.scales = by_row(s, x.scale, exchange), by_column(s, w, exchange)
            x, w = x.values, w.values
        assert isinstance(x, Tensor) and not isinstance(w, Scaled)
        self.x = s.reshape(x, -1) if w is None else s.reshape(x, exchange.num_batches, exchange.num_rows, x.shape[-1])
        self.sends_x = w is None
        self.bias = bias
        self.y: Tensor | None = None  # all of the product
        self.columns: dict[tuple[int, int], list[Any]] = {}  # by first and number: see `_columns`
        self.products: dict[int, Tensor] = {}  # by dst_rank: the chunk, flat, where several ranks get it
        self.makers: set[int] = set()  # dst_ranks: products are computed with their chunks
        self.shared: list[list[int]] = []  # the ranks that get one chunk, in rank order
        if w is None:
            return
        self.w = s.reshape(w, exchange.num_batches, x.shape[-1], w.shape[-1])
        scattered = None if exchange.cut is None else exchange.cut.scattered
        overlaps = scattered is not None and scattered.overlaps
        if exchange.multiplies_once or overlaps:  # one per chunk would multiply shared columns again
            self.y = s.temporary((exchange.num_batches, exchange.num_rows, w.shape[-1]), self.dtype)
            with s.lane("matmul"):
                s.multiply(self.x, self.w, bias, self.y, scales=self.scales, fast=self.fast)
        elif scattered is not None:
            self.shared = [ranks for ranks in scattered.receivers.values() if len(ranks) > 1]

    def begin(self, spans: RoundSpans, rank: int) -> None:
        """Begin a round of ``rank``: a product of several receivers is computed with the chunk of the first.

        Chunks of the first round are the largest.
        """
        for receivers in self.shared if not self.products else ():
            at = spans.at(receivers[0])
            product = self.s.temporary((at.batches.size * at.rows.size * at.columns.size,), self.dtype)
            self.products |= dict.fromkeys(receivers, product)
            self.makers.add(next((dst for dst in receivers if dst > rank), receivers[0]))

    def packed(self, spans: ChunkSpans, dst_rank: int) -> Tensor | None:
        """dst_rank's chunk where it lies in x, as runs (outer, inner); None where x is multiplied."""
        return spans.rows.view(self.x, 0, dst_rank) if self.sends_x else None

    def __call__(self, spans: ChunkSpans, dst_rank: int, chunk: Tensor) -> None:
        """``chunk`` is flat [batches * rows * columns], or [runs, rows in a run * columns] if `fills_runs` allows."""
        batches, rows, columns = spans.batches, spans.rows, spans.columns
        if chunk.ndim == 2 and batches.size == 1:
            rows_in_run = rows.size // chunk.shape[0]
            rows = Span(rows.size, rows.start, rows_in_run, rows_in_run, rows.peer_stride)
        if (packed := self.packed(spans, dst_rank)) is not None:
            self.s.copy(chunk.view(packed.shape), packed)
        elif self.y is not None:
            y = columns.view(rows.view(batches.view(self.y, 0, dst_rank), 2, dst_rank), 4, dst_rank)
            self.s.copy(chunk.view(y.shape), y)
        elif dst_rank in self.products:
            product = self.products[dst_rank][: chunk.numel()]
            if dst_rank in self.makers:
                self._multiply(spans, dst_rank, spans.rows, product)
            self.s.copy(chunk, product.view(chunk.shape))
        else:
            self._multiply(spans, dst_rank, rows, chunk)

    def _multiply(self, spans: ChunkSpans, dst_rank: int, rows: Span, chunk: Tensor) -> None:
        batches, key = spans.batches, (spans.columns.first(dst_rank), spans.columns.size)
        if batches.size == len(self.w) and key not in self.columns:  # for all rounds
            self.columns[key] = self._columns(spans, dst_rank)
        of_x = self.x, *self.scales[:1]
        x, *of_rows = (rows.view(batches.view(t, 0, dst_rank), 2, dst_rank) for t in of_x)  # [bo, bi, ro, ri, K]
        with self.s.scratch():
            bias, w, *scales = self.columns.get(key) or self._columns(spans, dst_rank)
            out = chunk.view(*_split(batches), *_split(rows), *w.shape[-2:])
            _matmul(self.s, x, w, bias, out, [*of_rows, *scales], self.fast)

    def _columns(self, spans: ChunkSpans, dst_rank: int) -> list[Any]:
        """dst_rank's columns [co, ci] of the bias, of w [bo, bi, K, co, ci] and its scale; short runs are packed."""
        columns = spans.columns
        short = columns.outer > 1 and columns.inner < geometry.MIN_RUN
        made = []
        for t in (self.bias, self.w, *self.scales[1:]):
            part = None if t is None else columns.view(t, t.ndim - 1, dst_rank)
            if part is not None and t is not self.bias:
                part = spans.batches.view(part, 0, dst_rank)
            if part is not None and short:
                part = self.s.reshape(part, *part.shape[:-2], 1, columns.size)
            made.append(part)
        return made


class GatheredMatmul:
    """Multiplies arrived chunks by w, into their places in the result."""

    def __init__(self, s: Builder, out: Tensor, w: Tensor, bias: Tensor | None, exchange: Exchange) -> None:
        self.s = s
        self.out = out.view(exchange.num_batches, exchange.num_rows, w.shape[-1])
        self.w = s.reshape(w, exchange.num_batches, exchange.k, w.shape[-1])
        self.bias = None if bias is None else bias.unsqueeze(0)  # [1, N]
        self.adds = exchange.splits_columns and exchange.adds_up(out.itemsize)

    def multiply(
        self, spans: RoundSpans, src_rank: int, chunk: Tensor, gathered: Tensor | None, *, first: bool
    ) -> None:
        """Add src_rank's part of K to the sums where K is gathered, or compute its rows."""
        at = spans.at(src_rank)
        if self.adds:
            self.add(at, src_rank, self.part(at, src_rank, chunk, gathered), first)
        else:
            self.chunk(at, src_rank, chunk)

    def chunk(self, spans: ChunkSpans, src_rank: int, chunk: Tensor) -> None:
        """Compute the rows that come from src_rank alone. ``chunk`` [batches * rows * K] is flat, or a Span's runs."""
        batches, rows = spans.batches, spans.rows
        _matmul(
            self.s,
            self.s.reshape(chunk, *_split(batches), *_split(rows), self.w.shape[1]),  # [bo, bi, ro, ri, K]
            batches.view(self.w, 0, src_rank).unsqueeze(3),  # [bo, bi, K, 1, N]
            self.bias,
            rows.view(batches.view(self.out, 0, src_rank), 2, src_rank).unsqueeze(4),  # [bo, bi, ro, ri, 1, N]
        )

    def part(self, spans: ChunkSpans, src_rank: int, chunk: Tensor, gathered: Tensor | None) -> Tensor:
        """src_rank's columns as [b, m, ko, ki]: from ``gathered`` if the chunk is copied there, or from ``chunk``."""
        columns = spans.columns
        if gathered is None:
            return self.s.reshape(chunk, spans.batches.size, spans.rows.size, *_split(columns))
        return columns.view(self._of_round(gathered.view(*self.out.shape[:2], self.w.shape[1]), spans), 2, src_rank)

    def add(self, spans: ChunkSpans, src_rank: int, x: Tensor, first: bool) -> None:
        """``out = bias`` if ``first``, then ``out += x @ w`` for src_rank's ``part`` of K; out must hold the sums."""
        w = spans.columns.view(self._batches(self.w, spans), 1, src_rank)  # [b, ko, ki, N]
        out = self._of_round(self.out, spans)
        if first and spans.columns.size == 0:  # the bias alone
            x, w = (
                x.as_strided((*x.shape[:2], 1, 0), (0, 0, 0, 1)),
                w.as_strided((w.shape[0], 1, 0, w.shape[-1]), (0, 0, 1, 0)),
            )
        for part in range(w.shape[1]):
            bias = None if self.bias is None or part > 0 or not first else self.bias[0]
            self.s.multiply(x[:, :, part], w[:, part], bias, out, adds=not first or part > 0)

    def round(self, spans: ChunkSpans, gathered: Tensor) -> None:
        """Compute the rows of a round from ``gathered``, which has all its chunks."""
        x = self._of_round(gathered.view(*self.out.shape[:2], self.w.shape[1]), spans)
        out = self._of_round(self.out, spans)
        self.s.multiply(x, self._batches(self.w, spans), None if self.bias is None else self.bias[0], out)

    def all(self, gathered: Tensor) -> None:
        """Compute all rows at once."""
        x = gathered.view(*self.out.shape[:2], self.w.shape[1])
        self.s.multiply(x, self.w, None if self.bias is None else self.bias[0], self.out)

    @staticmethod
    def _batches(t: Tensor, spans: ChunkSpans) -> Tensor:
        """Batches of a round; where K is gathered, no rank has batches to itself."""
        return _narrow(t, 0, spans.batches)

    @classmethod
    def _of_round(cls, t: Tensor, spans: ChunkSpans) -> Tensor:
        return _narrow(cls._batches(t, spans), 1, spans.rows)


def by_row(s: Builder, scale: Tensor, exchange: Exchange) -> Tensor:
    """A scale for each row and block of K: [batches, rows, blocks]."""
    shape = exchange.num_batches, exchange.num_rows
    if scale.numel() == 1:
        return scale.view(1, 1, 1).expand(*shape, 1)
    return s.reshape(scale, *shape, scale.shape[-1])


def by_column(s: Builder, w: Scaled, exchange: Exchange) -> Tensor:
    """A scale for each block of K and column: [batches, blocks, N]."""
    num_batches, n, scale = exchange.num_batches, w.shape[-1], w.scale
    if scale.numel() == 1:
        return scale.view(1, 1, 1).expand(num_batches, 1, n)
    if scale.shape[-1] != n:
        blocks = scale.unsqueeze(-1).expand(*scale.shape, BLOCK)
        scale = s.contiguous(blocks).flatten(-2).narrow(-1, 0, n)
    return s.reshape(scale, num_batches, scale.shape[-2], n)


def fills_runs(spans: ChunkSpans) -> bool:
    """Whether the matmul can write a chunk where it is unpacked to: long runs of consecutive rows."""
    run, row = spans.unpack.inner, spans.columns.size
    if spans.unpack.size == 0 or spans.rows.outer != 1 or run % row != 0 or run < geometry.MIN_RUN * row:
        return False
    return spans.batches.size == 1 or run == spans.rows.size * row  # a run is a batch


def own_place(spans: RoundSpans, rank: int, out: Tensor | None) -> Tensor | None:
    """The place of the own chunk in the result, flat or as runs; None if the matmul cannot write there."""
    at = spans.at(rank)
    if out is None or not (at.unpack.outer == 1 or fills_runs(at)):
        return None
    place = at.unpack.view(out.view(-1), 0, rank)
    return place[0] if len(place) == 1 else place


def _narrow(t: Tensor, dim: int, span: Span) -> Tensor:
    """An empty Span, as of a rank without rows, may begin anywhere."""
    return t.narrow(dim, span.start if span.size else 0, span.size)


def _split(span: Span) -> tuple[int, int]:
    return span.outer, span.inner


def _matmul(
    s: Builder,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scales: Sequence[Tensor] = (),
    fast: bool = False,
) -> None:
    """out [bo, bi, ro, ri, co, ci] = x [bo, bi, ro, ri, K] @ w [bo, bi, K, co, ci] + bias [co, ci]. Scales have the
    dims of x and w.
    """
    if out.numel() == 0:
        return
    shape = list(out.shape)
    if shape[2] > 1 and shape[3] < geometry.MIN_RUN:
        shape[2:4] = [1, shape[2] * shape[3]]
        x = s.reshape(x, *x.shape[:2], *shape[2:4], x.shape[4])
        if scales:
            scale_x, scale_w = scales
            scales = s.reshape(scale_x, *scale_x.shape[:2], *shape[2:4], scale_x.shape[4]), scale_w
    try:
        dense = out.view(shape)
    except RuntimeError:
        dense = s.temporary(shape, out.dtype)
    for b in range(shape[0]):
        for r in range(shape[2]):
            for c in range(shape[4]):
                added = None if bias is None else bias[c]
                of_part = (scales[0][b, :, r], scales[1][b, :, :, c]) if scales else ()
                s.multiply(x[b, :, r], w[b, :, :, c], added, dense[b, :, r, :, c], scales=of_part, fast=fast)
    if not s.is_at(dense, out):
        s.copy(out, dense.view(out.shape))
