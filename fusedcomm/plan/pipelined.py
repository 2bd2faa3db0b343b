"""`pipelined`: the matmul in pieces, each beside the group's own collective for the piece before or behind it.

It needs no memory of the peers: the backend of the process group, NCCL or gloo, moves the pieces. So it runs across
hosts, and between devices that do not reach each other. A piece has the same rows of every rank's chunk, and all ranks
cut alike, so that collectives are of equal parts: NCCL has its own all_to_all for these alone. Parts of different sizes
are padded to the largest, and all to a multiple of 16 bytes, which NCCL moves fastest.

A call is a row of stages that each piece passes, one behind the other:

    push     multiply the peers' chunks, begin their all_to_all, multiply the own chunk  |  place received chunks
    reduce   the same                                                                    |  add them in rank order
    all_reduce                             ...  |  add them, begin the all_gather of sums  |  place received sums
    gather   begin the collective of x's piece  |  multiply the own chunk, then received chunks

While a stage of one piece waits, stages of the pieces around it are under way. Sums are added in float32, in rank
order, and rounded once, as every algorithm does: the backend only moves elements. With FUSEDCOMM_BACKEND_SUMS it adds
them, by its reduce_scatter, as `unfused` does: where the network itself adds (SHARP), a rank receives a sum, and not R
parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fusedcomm.plan.builder import Builder, Given
from fusedcomm.plan.chunk_matmul import GatheredMatmul, Operand, PushedMatmul, own_place
from fusedcomm.plan.chunked import own_part, results
from fusedcomm.plan.copies import copy_between
from fusedcomm.plan.geometry.exchange import ALIGNED, Exchange, aligned_numel
from fusedcomm.plan.geometry.rank_order import peers_of, sources_of
from fusedcomm.plan.geometry.spans import RoundSpans
from fusedcomm.plan.scaled_programs import gathered_matmul
from fusedcomm.plan.terms import Terms


def push_matmul(s: Builder, exchange: Exchange, x: Operand, w: Operand, bias: Given, out: Given = None) -> Tensor:
    """``exchange((x @ w + bias).view(out_shape), gather_dim, scatter_dim)``."""
    made = s.result(exchange.out_shape, x.dtype) if out is None else out
    matmul = PushedMatmul(s, x, w, bias, exchange)

    def stages(piece: Piece) -> Iterator[None]:
        piece.push(matmul, made)
        yield
        piece.place_own(made)
        piece.wait()
        piece.unpack(made)

    _interleave(s, exchange, x.dtype, 2, stages)
    return made


def push_reduce(s: Builder, exchange: Exchange, terms: Terms) -> Tensor:
    """``reduce_scatter(x @ w + partial_bias) * scale + bias + residual``, and the norm of its rows."""
    made = s.result(exchange.out_shape, terms.x.dtype) if terms.out is None else terms.out
    matmul = PushedMatmul(s, terms.x, terms.w, terms.partial_bias, exchange)

    def stages(piece: Piece) -> Iterator[None]:
        piece.push_sum(matmul, terms.scale)
        yield
        piece.wait()
        piece.reduce(made, terms.bias, terms.scale, terms.residual)

    _interleave(s, exchange, terms.x.dtype, 2, stages)
    if terms.norm is not None:
        s.norm(terms.norm.normed, made, terms.norm.weight, terms.norm.eps)
    return made


def push_reduce_gather(s: Builder, exchange: Exchange, terms: Terms) -> Tensor:
    """``all_reduce(x @ w + partial_bias) * scale + bias + residual``: an all_to_all of terms, an all_gather of sums."""
    assert terms.norm is None
    residual = None if terms.residual is None else own_part(s, exchange, terms.residual)
    made = s.result(exchange.out_shape, terms.x.dtype) if terms.out is None else terms.out
    reduced = s.temporary(exchange.block, terms.x.dtype)
    matmul = PushedMatmul(s, terms.x, terms.w, terms.partial_bias, exchange)

    def stages(piece: Piece) -> Iterator[None]:
        piece.push_sum(matmul, terms.scale)
        yield
        piece.wait()
        piece.reduce(reduced, terms.bias, terms.scale, residual)
        piece.gather(reduced)
        yield
        piece.place_own(made, reduced)
        piece.wait()
        piece.unpack(made)

    _interleave(s, exchange, terms.x.dtype, 3, stages)
    return made


def gather_matmul(
    s: Builder, exchange: Exchange, x: Tensor, ws: Sequence[Operand], biases: Sequence[Given], return_gathered: bool
) -> list[Tensor]:
    """``[gathered @ w + bias for w, bias in zip(ws, biases)]``, and behind them gathered x if asked for."""
    x = s.contiguous(x)
    outs = results(s, exchange, ws)
    matmuls = [gathered_matmul(s, *each, exchange) for each in zip(outs, ws, biases, strict=True)]
    # One matmul takes all sources where K is gathered, and all pieces where rows are so few that it mostly reads w.
    by_piece, by_chunk = exchange.splits_columns, not (exchange.splits_columns or exchange.few_rows)
    gathered = s.result(exchange.shape, x.dtype) if return_gathered or not by_chunk else None

    def stages(piece: Piece) -> Iterator[None]:
        piece.gather(x)
        yield
        if by_chunk:
            piece.multiply(matmuls, s.rank, piece.packed(x, s.rank))
        if gathered is not None:
            piece.place_own(gathered, x)
        piece.wait()
        if gathered is not None:
            piece.unpack(gathered)
            if by_piece:
                piece.multiply_gathered(matmuls, gathered)
        if by_chunk:
            for src_rank, chunk in piece.received():
                piece.multiply(matmuls, src_rank, chunk)

    _interleave(s, exchange, x.dtype, 2, stages)
    if gathered is not None and not by_piece and not by_chunk:
        for matmul in matmuls:
            with s.lane("matmul"):
                matmul.all(gathered)
    return [*outs, gathered] if return_gathered and gathered is not None else outs


def _interleave(
    s: Builder, exchange: Exchange, dtype: torch.dtype, num_stages: int, stages: Callable[[Piece], Iterator[None]]
) -> None:
    """Let every piece pass the stages; stage k of a piece comes behind stage k - 1 of the next piece.

    As many pieces as stages are under way, and take turns in the same buffers.
    """
    rounds = exchange.pieces(s.num_pieces)
    numels = [aligned_numel(spans.chunk_numel, dtype.itemsize) for spans in rounds]
    padded = exchange.cut is not None or any(n > spans.chunk_numel for n, spans in zip(numels, rounds, strict=True))
    turns = [Buffers(s, dtype, max(numels), padded) for _ in range(num_stages)]
    waiting = [Piece(s, exchange, spans, turns[i % num_stages]) for i, spans in enumerate(rounds)]
    under_way: list[Iterator[None]] = []
    while waiting or under_way:
        if waiting:
            under_way.insert(0, stages(waiting.pop(0)))
        under_way = [each for each in under_way if next(each, "ended") is None]


class Buffers:
    """Send and receive buffers of one piece, made on first use: chunks of at most ``step`` elements."""

    def __init__(self, s: Builder, dtype: torch.dtype, step: int, padded: bool) -> None:
        self.s, self.dtype, self.step, self.padded = s, dtype, step, padded

    def _made(self, num_chunks: int) -> Tensor:
        return self.s.temporary((num_chunks * self.step,), self.dtype)

    @cached_property
    def to_peers(self) -> Tensor:
        """A chunk to every rank. Nobody reads the own one, nor the padding of others; NCCL may look there for NaN."""
        made = self._made(self.s.group_size)
        self.s.update(made if self.padded else made.narrow(0, self.s.rank * self.step, self.step), "fill_", 0)
        return made

    @cached_property
    def to_all(self) -> Tensor:
        """One chunk to all ranks."""
        made = self._made(1)
        self.s.update(made, "fill_", 0)
        return made

    @cached_property
    def received(self) -> Tensor:
        """A chunk from every rank."""
        return self._made(self.s.group_size)

    @cached_property
    def own(self) -> Tensor:
        """The chunk that stays here; where the backend adds, the sum of all."""
        return self._made(1)


class Piece:
    """The same rows of every rank's chunk, on their way."""

    def __init__(self, s: Builder, exchange: Exchange, spans: RoundSpans, buffers: Buffers) -> None:
        self.s, self.exchange, self.spans, self.buffers = s, exchange, spans, buffers
        *self.peers, self.rank = peers_of(s.rank, s.group_size)
        self.step = aligned_numel(spans.chunk_numel, buffers.dtype.itemsize)
        self.begun: int | None = None  # the collective that is under way
        self.own_is_there = False  # whether the own chunk has been multiplied into its place in the result

    def push(self, matmul: PushedMatmul, out: Tensor | None = None) -> None:
        """Multiply and send, and multiply the own chunk beside that: into ``out``, if it fits there."""
        sent, received, place = self.buffers.to_peers, self.buffers.received, own_place(self.spans, self.rank, out)
        self.own_is_there = place is not None
        own = self._own() if place is None else place
        matmul.begin(self.spans, self.rank)
        for dst_rank in self.peers:
            self._multiply(matmul, dst_rank, self._of(sent, dst_rank))
        self._begin("all_to_all", received, sent)
        self._multiply(matmul, self.rank, own)

    def push_sum(self, matmul: PushedMatmul, scale: float) -> None:
        """Likewise, for ``reduce``. A backend that adds takes the own chunk too, and averages are divided before, as
        float16 may hold an average but not the sum.
        """
        if not self.s.backend_sums:
            self.push(matmul)
            return
        sent = self.buffers.to_peers
        matmul.begin(self.spans, self.rank)
        for dst_rank in (*self.peers, self.rank):
            chunk = self._of(sent, dst_rank)
            self._multiply(matmul, dst_rank, chunk)
            if scale != 1:
                self.s.update(chunk, "div_", self.s.group_size)
        self._begin("reduce_scatter", self.buffers.own, sent)

    def gather(self, packed: Tensor) -> None:
        """Send its part of ``packed`` to every peer."""
        received = self.buffers.received
        with self.s.lane("push"):
            if self.exchange.packed[1] is not None:
                sent = self.buffers.to_peers
                for dst_rank in self.peers:
                    chunk = self.packed(packed, dst_rank)
                    self.s.copy(self._of(sent, dst_rank).view(chunk.shape), chunk)
                self._begin("all_to_all", received, sent)
                return
            chunk = self.packed(packed, self.rank)
            if chunk.numel() == self.step and chunk.is_contiguous() and self.s.address_mod_16(chunk) % ALIGNED == 0:
                sent = chunk.view(-1)
            else:
                sent = self.buffers.to_all
                self.s.copy(sent[: chunk.numel()].view(chunk.shape), chunk)
            self._begin("all_gather", received, sent)

    def wait(self) -> None:
        """Let later steps read the received buffers; on a GPU this holds up the stream, and not the host."""
        if self.begun is not None:
            with self.s.lane("wait"):
                self.s.end(self.begun)

    def place_own(self, out: Tensor, packed: Tensor | None = None) -> None:
        """Copy the own chunk to its place in ``out``: the product, unless it is there, or the packed one."""
        if packed is not None or not self.own_is_there:
            self._place(out, self.rank, self._own() if packed is None else self.packed(packed, self.rank))

    def unpack(self, out: Tensor) -> None:
        """Copy received chunks to their places in ``out``."""
        for src_rank, chunk in self.received():
            self._place(out, src_rank, chunk)

    def reduce(self, out: Tensor, bias: Tensor | None, scale: float, residual: Tensor | None = None) -> None:
        """Add all chunks in rank order, or take the backend's sum: ``out = sum * scale + bias + residual``."""
        parts = [self._own()]
        if not self.s.backend_sums:
            by_rank = {self.rank: self._own(), **dict(self.received())}
            parts = [by_rank[src_rank] for src_rank in range(self.s.group_size)]
        if residual is not None:
            assert scale == 1
            parts.append(self.packed(residual, self.rank).view(-1))
        with self.s.lane("copy"):
            self.s.reduce(self.packed(out, self.rank).view(-1), parts, bias, 1.0 if self.s.backend_sums else scale)

    def received(self) -> Iterator[tuple[int, Tensor]]:
        """The peers and their chunks."""
        for src_rank in sources_of(self.rank, self.s.group_size)[1:]:
            start, numel = src_rank * self.step, self.spans.at(src_rank).unpack.size
            yield src_rank, self.buffers.received.narrow(0, start, numel)

    def multiply(self, matmuls: Sequence[GatheredMatmul], src_rank: int, chunk: Tensor) -> None:
        """Compute the rows that come from src_rank alone."""
        for matmul in matmuls:
            with self.s.scratch(), self.s.lane("matmul", src_rank):
                matmul.chunk(self.spans.at(src_rank), src_rank, chunk)

    def multiply_gathered(self, matmuls: Sequence[GatheredMatmul], gathered: Tensor) -> None:
        """Multiply the rows of this piece, which are whole in ``gathered``."""
        for matmul in matmuls:
            with self.s.lane("matmul"):
                matmul.round(self.spans.at(self.rank), gathered)

    def _multiply(self, matmul: PushedMatmul, dst_rank: int, chunk: Tensor) -> None:
        with self.s.lane("matmul", dst_rank):
            matmul(self.spans.at(dst_rank), dst_rank, chunk)

    def _place(self, out: Tensor, src_rank: int, chunk: Tensor) -> None:
        with self.s.lane("copy", src_rank):
            copy_between(self.s, self.spans.at(src_rank).unpack.view(out.view(-1), 0, src_rank), chunk)

    def _begin(self, kind: str, to: Tensor, source: Tensor) -> None:
        """Begin the collective of this piece, on the first elements of the buffers."""
        everyone = self.s.group_size * self.step
        if self.step:
            to = to[: self.step if kind == "reduce_scatter" else everyone]
            self.begun = self.s.begin(kind, to, source[: self.step if kind == "all_gather" else everyone])

    def packed(self, packed: Tensor, dst_rank: int) -> Tensor:
        """dst_rank's part of a tensor sent as it is, as runs (outer, inner)."""
        return self.spans.at(dst_rank).pack.view(packed.view(-1), 0, dst_rank)

    def _of(self, sent: Tensor, dst_rank: int) -> Tensor:
        return sent.narrow(0, dst_rank * self.step, self.spans.at(dst_rank).pack.size)

    def _own(self) -> Tensor:
        return self.buffers.own[: self.spans.at(self.rank).unpack.size]
