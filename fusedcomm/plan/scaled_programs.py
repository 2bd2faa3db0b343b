"""The programs of scaled matmuls: those of plain ones, on float8 values with scales. Gathers pack x with its scales."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedcomm.plan.builder import Builder, Given, Program
from fusedcomm.plan.chunk_matmul import GatheredMatmul, Operand, by_column, by_row
from fusedcomm.plan.geometry.exchange import MIN_RUN, Exchange
from fusedcomm.plan.geometry.spans import ChunkSpans
from fusedcomm.plan.scaling import Payload, Scaled


@dataclass(frozen=True)
class OfPayload(Scaled):
    """A w that multiplies gathered payloads, or x gathered alone, whose scales then are ``scale_x``."""

    payload: Payload | None
    scale_x: Tensor | None = None


def push(
    program: Program,
    s: Any,
    exchange: Exchange,
    x: Tensor,
    w: Tensor,
    scales: Sequence[Tensor],
    *others: Given,
    out_dtype: torch.dtype,
    fast: bool,
    **facts: Hashable,
) -> Any:
    """``program`` on ``x * scale_x`` and ``w * scale_w``, in float32; what is sent is of out_dtype.

    ``s``: the Builder, or the rank's memory where the program is one of `unfused`.
    """
    operands = (Scaled(t, scale, out_dtype, fast=fast) for t, scale in zip((x, w), scales, strict=True))
    return program(s, exchange, *operands, *others, **facts)


def gather(
    program: Program,
    s: Builder,
    exchange: Exchange,
    x: Tensor,
    ws: Sequence[Tensor],
    scales: Sequence[Tensor],
    biases: Sequence[Given],
    *,
    return_gathered: bool,
    out_dtype: torch.dtype,
    fast: bool,
    payload: Payload | None,
    sent: tuple[int, ...],
) -> list[Tensor]:
    """``program`` on the packed rows of x; behind the results these, gathered, if asked for. ``sent``: K of the pieces
    that x is cut into. Without a payload x travels alone.
    """
    rows = x
    if payload is not None:
        rows = s.temporary(exchange.packed[0], torch.uint8)
        flat = s.reshape(x, *rows.shape[:-1], sum(sent))
        with s.lane("copy"):
            if return_gathered:  # padding too has one value
                s.update(rows, "fill_", 0)
            for to, source in payload.packed(rows, flat, scales[0], sent):
                s.copy(to, source)
    weights = of_payload(ws, scales, out_dtype, payload, fast)
    made: list[Tensor] = program(s, exchange, rows, weights, biases, return_gathered)
    return made


def of_payload(
    ws: Sequence[Tensor], scales: Sequence[Tensor], out_dtype: torch.dtype, payload: Payload | None, fast: bool
) -> list[OfPayload]:
    scale_x, *scale_ws = scales
    own = scale_x if payload is None else None  # otherwise rows have theirs
    return [OfPayload(w, scale, out_dtype, payload, own, fast=fast) for w, scale in zip(ws, scale_ws, strict=True)]


def gathered_matmul(s: Builder, out: Tensor, w: Operand, bias: Given, exchange: Exchange) -> GatheredMatmul:
    if isinstance(w, OfPayload):
        return GatheredPayload(s, out, w, bias, exchange)
    assert isinstance(w, Tensor)
    return GatheredMatmul(s, out, w, bias, exchange)


class GatheredPayload(GatheredMatmul):
    """Multiplies arrived rows of values and scales."""

    def __init__(self, s: Builder, out: Tensor, w: OfPayload, bias: Tensor | None, exchange: Exchange) -> None:
        self.s, self.payload, self.fast = s, w.payload, w.fast
        self.out = out.view(exchange.num_batches, exchange.num_rows, w.shape[-1])
        self.w = s.reshape(w.values, exchange.num_batches, *w.shape[-2:])
        self.row_numel = w.shape[-2] if w.payload is None else w.payload.row_bytes
        self.scale_x = None if w.scale_x is None else by_row(s, w.scale_x, exchange)
        self.scale_w = by_column(s, w, exchange)
        self.bias = None if bias is None else bias.unsqueeze(0)
        self.adds = False

    def chunk(self, spans: ChunkSpans, src_rank: int, chunk: Tensor) -> None:
        batches, rows = spans.batches, spans.rows
        shape = batches.outer, batches.inner, rows.outer, rows.inner
        if batches.size * rows.size == 0:
            return
        out = rows.view(batches.view(self.out, 0, src_rank), 2, src_rank)  # [bo, bi, ro, ri, N]
        dense = out
        if rows.outer > 1 and rows.inner < MIN_RUN:
            shape = *shape[:2], 1, rows.size
            dense = self.s.temporary((*shape, out.shape[-1]), out.dtype)
        arrived = self.s.reshape(chunk, *shape, chunk.numel() // (batches.size * rows.size))
        w, scale_w = (batches.view(t, 0, src_rank) for t in (self.w, self.scale_w))
        if self.scale_x is not None:
            scale = rows.view(batches.view(self.scale_x, 0, src_rank), 2, src_rank)
            scale = self.s.reshape(scale, *shape, scale.shape[-1])
        for b in range(shape[0]):
            for r in range(shape[2]):
                scale_x = None if self.scale_x is None else scale[b, :, r]
                self._product(arrived[b, :, r], scale_x, w[b], scale_w[b], dense[b, :, r])
        if dense is not out:
            self.s.copy(out, dense.view(out.shape))

    def round(self, spans: ChunkSpans, gathered: Tensor) -> None:
        rows = self._of_round(gathered.view(*self.out.shape[:2], self.row_numel), spans)
        w, scale_w = (self._batches(t, spans) for t in (self.w, self.scale_w))
        scale_x = None if self.scale_x is None else self._of_round(self.scale_x, spans)
        self._product(rows, scale_x, w, scale_w, self._of_round(self.out, spans))

    def all(self, gathered: Tensor) -> None:
        rows = gathered.view(*self.out.shape[:2], self.row_numel)
        self._product(rows, self.scale_x, self.w, self.scale_w, self.out)

    def _product(self, rows: Tensor, scale_x: Tensor | None, w: Tensor, scale_w: Tensor, out: Tensor) -> None:
        """out [b, m, N] = rows [b, m, bytes] @ w [b, K, N] + bias: one piece of K after the other, in float32.

        ``scale_x``: of rows that are x alone.
        """
        s, bias = self.s, None if self.bias is None else self.bias[0]
        if self.payload is None:
            assert scale_x is not None
            s.multiply(rows, w, bias, out, scales=[scale_x, scale_w], fast=self.fast)
            return
        block = self.payload.block
        several = len(self.payload.ks) > 1
        with s.scratch():
            total = s.temporary(out.shape, torch.float32) if several and out.dtype != torch.float32 else out
            for before, values, scales in self.payload.pieces(rows):
                k = values.shape[-1]
                of_k = scale_w.narrow(1, before // block, scales.shape[-1]) if block else scale_w
                part, added = w.narrow(1, before, k), bias if before == 0 else None
                s.multiply(values, part, added, total, adds=before > 0, scales=[scales, of_k], fast=self.fast)
            if total is not out:
                s.copy(out, total)
