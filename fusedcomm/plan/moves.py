"""The chunks of `chunked` on their way: sends, signals, waits and copies out.

A CPU has one stream. A matmul writes a chunk into the peer's slot; the own chunk comes last.

A GPU has three streams, which meet by events only, so that a round's copies run beside the matmuls of the next:

    MAIN    the matmuls; and the waits before matmuls that read a slot themselves
    SENDS   copies to the peers by the copy engines, each with its signal behind it
    READS   kernels that wait for peers, read the own slot, and end the round; in a call of one round MAIN has them

Failures of waits are found by kernels there, and poison the results with NaN. A round's sends begin when READS has
ended the round before. So this rank has every peer's signal of that round before it writes to a peer, and all its reads
of that round come before its signals of this one: two slots are enough. The own signal is the last one, and the end of
a round waits for it: so none ends before all are sent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomm.plan import launches
from fusedcomm.plan.builder import Builder, Given, RmsNorm
from fusedcomm.plan.chunk_matmul import PushedMatmul, own_place
from fusedcomm.plan.copies import copy_between, copy_runs
from fusedcomm.plan.geometry.rank_order import peers_of, sources_of
from fusedcomm.plan.geometry.spans import RoundSpans, bias_of
from fusedcomm.plan.schedule import EndRound, Signal, Stream, Wait

MAIN, SENDS, READS = Stream


class Moves:
    """The moves of one call."""

    def __init__(self, s: Builder, dtype: torch.dtype, num_rounds: int) -> None:
        self.s, self.dtype, self.rank = s, dtype, s.rank
        self.peers, self.sources = peers_of(s.rank, s.group_size), sources_of(s.rank, s.group_size)
        self.staging: dict[int, Tensor] = {}  # by dst_rank: written by a matmul and read by a copy, in every round
        self.own: Tensor | None = None  # the chunk of this round that stays here, if it is read where it lies in x
        self.copied: dict[int, int] = {}  # by dst_rank: the event after which it may be written again
        self.ended: list[int] = []  # the ends of the last rounds of both slots: then MAIN may write there again
        if s.device.is_gpu:
            self.reads = READS if num_rounds > 1 else MAIN
            s.join(self.reads, MAIN)  # and SENDS comes after READS in each round

    def end(self) -> None:
        """Later work waits for the whole call."""
        if self.s.device.is_gpu:
            self.s.join(MAIN, SENDS)
            self.s.join(MAIN, self.reads)

    def begin(self) -> None:
        """Begin a round, before its first chunk is sent."""
        s = self.s
        if s.device.is_gpu:
            with s.on(self.reads):  # where SMs have just become free, and before the first matmul: none holds it up
                launches.begin_push(s)
            s.join(SENDS, self.reads)
            if len(self.ended) == s.memory.layout.num_slots:
                s.after(MAIN, self.ended[0])

    def push(self, spans: RoundSpans, matmul: PushedMatmul, out: Tensor | None = None) -> None:
        """Compute and send every dst_rank's chunk, the next rank's first."""
        s = self.s
        self.begin()
        matmul.begin(spans, self.rank)
        if s.device.is_gpu:
            self._push_staged(spans, matmul, out)
            return
        packed = matmul.packed(spans.at(self.rank), self.rank)
        self.own = packed[0] if packed is not None and len(packed) == 1 else None
        for dst_rank in self.peers[:-1]:
            self._multiply(matmul, spans, dst_rank, self._chunk(spans, dst_rank))
            self._signal(dst_rank)
        if self.own is None:
            own = own_place(spans, self.rank, out)
            self._multiply(matmul, spans, self.rank, self._chunk(spans, self.rank) if own is None else own)

    def _push_staged(self, spans: RoundSpans, matmul: PushedMatmul, out: Tensor | None) -> None:
        s = self.s
        for dst_rank in self.peers:
            part, packed = self._chunk(spans, dst_rank), matmul.packed(spans.at(dst_rank), dst_rank)
            if dst_rank == self.rank:
                own = own_place(spans, self.rank, out)
                if spans.by_peer and self.ended:  # _unpack_parts of the round before may write all of out
                    s.after(MAIN, self.ended[-1])
                self._multiply(matmul, spans, dst_rank, part if own is None else own)
                if self.reads == READS:  # else MAIN reads it, behind the matmul
                    s.join(SENDS, MAIN)
            elif packed is not None:
                with s.on(SENDS), s.lane("push", dst_rank):
                    copy_runs(s, part, packed)
            else:
                if dst_rank in self.copied:
                    s.after(MAIN, self.copied[dst_rank])
                else:  # the first round's chunks are the largest
                    self.staging[dst_rank] = s.temporary(part.shape, self.dtype)
                chunk = self.staging[dst_rank][: part.numel()]
                self._multiply(matmul, spans, dst_rank, chunk)
                s.join(SENDS, MAIN)
                with s.on(SENDS), s.lane("push", dst_rank):
                    s.copy(part, chunk)
                self.copied[dst_rank] = s.event(SENDS)
            self._signal(dst_rank)

    def _multiply(self, matmul: PushedMatmul, spans: RoundSpans, dst_rank: int, to: Tensor) -> None:
        with self.s.lane("matmul", dst_rank):
            matmul(spans.at(dst_rank), dst_rank, to)

    def pack(self, spans: RoundSpans, packed: Tensor, *, own: bool = False) -> None:
        """Send every peer its chunk of ``packed``. This rank's own chunk stays where it is, without ``own``."""
        s = self.s
        for dst_rank in self.peers if own else self.peers[:-1]:
            chunk, part = spans.at(dst_rank).pack.view(packed.view(-1), 0, dst_rank), self._chunk(spans, dst_rank)
            with s.lane("push", dst_rank):
                if s.device.is_gpu:
                    with s.on(SENDS):
                        copy_runs(s, part, chunk)
                else:
                    s.copy(part.view(chunk.shape), chunk)
            self._signal(dst_rank)
        if s.device.is_gpu and not own:
            self._signal(self.rank)

    def _signal(self, dst_rank: int) -> None:
        s = self.s
        with s.lane("push", dst_rank), s.on(SENDS if s.device.is_gpu else MAIN):
            if s.device.is_gpu and not s.device.writes_by_stream:
                launches.signal(s, dst_rank)
            else:
                s.add(Signal(dst_rank))

    def chunk_from(self, spans: RoundSpans, src_rank: int) -> Tensor:
        """src_rank's chunk in this rank's slot, flat."""
        return self.s.chunk(self.rank, src_rank, spans, self.dtype)

    def wait(self, src_rank: int) -> None:
        """Wait for src_rank's chunk; it may be read only after this."""
        with self.s.lane("wait", src_rank):
            if self.s.device.is_gpu:
                launches.wait_source(self.s, src_rank)
            else:
                self.s.add(Wait(src_rank))

    def unpack(
        self, spans: RoundSpans, out: Tensor, own: Given = None, norm: RmsNorm | None = None, *, beside: bool
    ) -> None:
        """Wait for all chunks, copy them to their places, and end the round. ``own``: the packed tensor, if any.

        ``norm``: of this round's rows of ``out``, on a GPU. ``beside``: a GPU multiplies another round meanwhile.
        """
        s, rank = self.s, self.rank
        packed = None if own is None else spans.at(rank).pack.view(own.view(-1), 0, rank)
        if s.device.is_gpu:
            self._unpack_by_kernel(spans, out, packed, norm, beside)
            return
        place = _in_result(spans, rank, out)
        with s.lane("copy", rank):
            if packed is not None:
                if not s.is_at(packed, place):
                    copy_between(s, place, packed)
            elif own_place(spans, rank, out) is None:
                copy_between(s, place, self._chunk(spans, rank))
        for src_rank in self.sources[1:]:
            self.wait(src_rank)
            with s.lane("copy", src_rank):
                copy_between(s, _in_result(spans, src_rank, out), self.chunk_from(spans, src_rank))
        s.add(EndRound())

    def _unpack_by_kernel(
        self, spans: RoundSpans, out: Tensor, packed: Tensor | None, norm: RmsNorm | None, beside: bool
    ) -> None:
        s, rank = self.s, self.rank
        if packed is None:
            s.join(self.reads, MAIN)
        with s.on(self.reads), s.lane("copy"):
            if packed is not None:
                if spans.by_peer:
                    launches.wait_all(s)
                copy_between(s, _in_result(spans, rank, out), packed)
            is_there = packed is not None or own_place(spans, rank, out) is not None
            if spans.by_peer:
                self._unpack_parts(spans, out, self.sources[is_there:], waits=packed is None)
            else:
                launches.unpack(s, out, spans, norm=norm, own=not is_there, beside=beside)
        self._end_round()

    def _unpack_parts(self, spans: RoundSpans, out: Tensor, sources: Sequence[int], waits: bool) -> None:
        """The work of unpack_kernel, which takes chunks of one size alone."""
        s = self.s
        for src_rank in sources:
            if waits and src_rank != self.rank:
                self.wait(src_rank)
            copy_between(s, _in_result(spans, src_rank, out), self.chunk_from(spans, src_rank))
        s.join(self.reads, MAIN)  # a failure makes all of out NaN, also where MAIN reads
        launches.finish(s, out, end_round=True)

    def reduce(
        self,
        spans: RoundSpans,
        out: Tensor,
        bias: Tensor | None,
        scale: float,
        *,
        residual: Given = None,
        norm: RmsNorm | None = None,
        beside: bool,
    ) -> None:
        """Wait for all chunks, add them in rank order in float32, round once, and end the round.

        ``residual``: one addend more, as ``out`` lies. ``norm``: of this round's rows of ``out``. ``beside``: a GPU
        multiplies another round meanwhile.
        """
        s = self.s
        if s.device.is_gpu:
            s.join(self.reads, MAIN)
            with s.on(self.reads), s.lane("copy"):
                launches.reduce(s, out, spans, bias, scale, residual=residual, norm=norm, beside=beside)
            self._end_round()
            return
        for src_rank in self.sources[1:]:
            self.wait(src_rank)
        parts = [self.chunk_from(spans, src_rank) for src_rank in range(s.group_size)]
        if self.own is not None:
            parts[self.rank] = self.own
        own = spans.at(self.rank).pack
        total, *more = (own.view(t.view(-1), 0, self.rank).view(-1) for t in (out, residual) if t is not None)
        with s.lane("copy"):
            s.reduce(total, [*parts, *more], bias_of(bias, own), scale)
            if norm is not None and own.size:
                normed, n = own.view(norm.normed.view(-1), 0, self.rank), out.shape[-1]
                s.norm(normed.view(-1, n), total.view(-1, n), norm.weight, norm.eps)
        s.add(EndRound())

    def arrived(self) -> None:
        """Later matmuls read the unpacked tensor."""
        if self.s.device.is_gpu:
            self.s.join(MAIN, self.reads)

    def finish(self, outs: Sequence[Tensor]) -> None:
        """End a round after its chunks have been read; ``outs``: the results computed from them."""
        s = self.s
        if not s.device.is_gpu:
            s.add(EndRound())
            return
        s.join(self.reads, MAIN)
        with s.on(self.reads):
            for i, out in enumerate(outs):
                launches.finish(s, out, end_round=i == len(outs) - 1)
        self._end_round()
        s.join(MAIN, self.reads)  # the waits of the next round count from the end of this one

    def _end_round(self) -> None:
        s = self.s
        self.ended = [*self.ended, s.event(self.reads)][-s.memory.layout.num_slots :]
        s.add(EndRound(by_kernel=True))

    def _chunk(self, spans: RoundSpans, dst_rank: int) -> Tensor:
        """This rank's chunk in dst_rank's slot."""
        return self.s.chunk(dst_rank, self.rank, spans, self.dtype)


def _in_result(spans: RoundSpans, src_rank: int, out: Tensor) -> Tensor:
    """The place of src_rank's chunk, as runs (outer, inner)."""
    return spans.at(src_rank).unpack.view(out.view(-1), 0, src_rank)
