"""How `chunked` moves chunks on a device: where a matmul writes, what sends, waits, and ends a round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fusedcomm.algorithms import kernel_launch
from fusedcomm.algorithms.chunk_matmul import fits, landing, own_place
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.runtime import signals, stream_writes, tape
from fusedcomm.runtime.profiler import lane
from fusedcomm.runtime.segment import NUM_SLOTS
from fusedcomm.runtime.workspace import Round, Workspace


class Transport(Protocol):
    def fork(self) -> None:
        """Begin a call, when its inputs are made and its results have their memory."""

    def join(self) -> None:
        """End a call, whole or left half way: what follows comes after all that it has begun."""

    def result(self, like: Tensor, shape: Sequence[int], out: Tensor | None = None, *, posted: bool = True) -> Tensor:
        """A tensor for a result: ``out``, if it is given. ``posted``: what peers send belongs there as it comes."""

    def own_block(self, exchange: Exchange, out: Tensor) -> Tensor:
        """Memory for this rank's block of ``out``, which the others get too: contiguous, in ``out`` if it can be."""

    def max_chunk_numel(self, exchange: Exchange, dtype: torch.dtype) -> int:
        """The largest chunk of a gather whose matmul needs all sources: small enough to hide one behind another."""

    def begin(self, round: Round, out: Tensor | None = None) -> None:
        """Begin a round, before its first chunk is sent. ``out``: what its chunks will be unpacked to."""

    def chunks(self, round: Round, out: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """Every dst_rank, and where the matmul writes its chunk, which is then moved on, and signalled.

        A place is a flat tensor, or the runs of ``out`` that the chunk is unpacked to.
        """

    def pack(self, round: Round, packed: Tensor, out: Tensor | None) -> None:
        """Send its chunk of ``packed`` to every peer. This rank's own chunk stays where it is."""

    def arrivals(self, round: Round, src_rank: int, out: Tensor | None) -> Iterator[tuple[Tensor, bool]]:
        """The chunk that has come from src_rank, and whether that is in its place in ``out``, and not in a slot."""

    def wait(self, round: Round, src_rank: int) -> None:
        """Wait for src_rank's chunk; it may be read only after this."""

    def unpack(self, round: Round, out: Tensor, own: Tensor | None = None) -> None:
        """Wait for all chunks, copy them to their places, and end the round. ``own``: what was packed, if anything."""

    def arrived(self) -> None:
        """Let the matmuls that follow take what has been unpacked."""

    def reduce(self, round: Round, out: Tensor, bias: Tensor | None, scale: float) -> None:
        """Wait for all chunks, add them in rank order in float32, round once, and end the round."""

    def finish(self, round: Round, outs: Sequence[Tensor]) -> None:
        """End a round whose chunks have been read; ``outs`` hold what was made of them."""


class CpuTransport:
    """Peers' slots are ordinary memory here. Waits are on the host, and raise when they fail."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.made: list[Tensor] = []  # results that are this call's alone: peers may write them
        self.posts = False  # whether the one that they get in this round is where they can

    def fork(self) -> None:
        pass

    def join(self) -> None:
        pass

    def begin(self, round: Round, out: Tensor | None = None) -> None:
        if (shared := self._shared(out)) is not None:
            self.posts = round.post(shared)

    def arrived(self) -> None:
        pass

    def result(self, like: Tensor, shape: Sequence[int], out: Tensor | None = None, *, posted: bool = True) -> Tensor:
        if out is not None:
            return out
        with tape.paused():
            out = self._empty(shape, like.dtype, posted)
        tape.is_result(out, posted)
        if posted:
            self.made.append(out)
        return out

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, posted: bool) -> Tensor:
        from fusedcomm.kernels.cpu import native

        if posted and self.workspace.results is not None:
            return self.workspace.results.empty(shape, dtype)
        out = torch.empty(shape, dtype=dtype, device="cpu")
        native.prefer_huge_pages(out.data_ptr(), out.nbytes)
        return out

    def own_block(self, exchange: Exchange, out: Tensor) -> Tensor:
        shape, dim = exchange.unpacked
        if dim is None or math.prod(shape[:dim]) != 1:
            return out.new_empty(exchange.block)
        numel = math.prod(exchange.block)
        return out.view(-1).narrow(0, self.workspace.rank * numel, numel).view(exchange.block)

    def max_chunk_numel(self, exchange: Exchange, dtype: torch.dtype) -> int:
        return self.workspace.max_chunk_numel(dtype.itemsize)

    def chunks(self, round: Round, out: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        rank = round.workspace.rank
        with tape.chunks():
            for dst_rank in self._order(round, out):
                with tape.chunk(dst_rank):
                    if dst_rank == rank:
                        own = own_place(round.spans, rank, out)
                        yield rank, round.part(rank) if own is None else own
                        continue
                    fitting = out if out is not None and fits(round.spans, rank, dst_rank) else None
                    for result in self._places(round, dst_rank, fitting):
                        if result is None:
                            yield dst_rank, round.part(dst_rank)
                        else:
                            yield dst_rank, landing(round.spans, rank, dst_rank, result)
                    with lane("push", dst_rank):
                        round.signal(dst_rank)

    def _order(self, round: Round, out: Tensor | None) -> list[int]:
        """The peers first. Where one is late with its post, the own chunk: then there is another look for it.

        Peers will post if this rank has: they have made and freed the same results.
        """
        *peers, own = round.peers()
        is_late = self.posts and self._shared(out) is not None and not round.all_have_posted()
        return [own, *peers] if is_late else [*peers, own]

    def _places(self, round: Round, dst_rank: int, out: Tensor | None) -> Iterator[Tensor | None]:
        """What dst_rank takes in place of ``out``, flat, if this rank may write it, or None for the slot."""
        shared = self._shared(out)
        numel = None if shared is None else round.spans.unpacked_numel(dst_rank, shared.numel())
        num_bytes = None if numel is None else numel * round.dtype.itemsize
        place = None if num_bytes is None else round.posted(dst_rank, num_bytes)
        for in_place in tape.either("placed", dst_rank, place is not None, num_bytes):
            if not in_place:
                yield None
            elif place is not None:
                tape.is_placed(dst_rank, place)
                yield place
                round.mark_in_place(dst_rank)
            else:
                assert numel is not None
                yield tape.stand_in(dst_rank, numel, round.dtype)

    def _shared(self, out: Tensor | None) -> Tensor | None:
        """``out``, if peers may write it, wherever it is in this call. What the caller gave may be anyone's."""
        has_heap = self.workspace.results is not None
        return out if has_heap and any(out is each for each in self.made) else None

    def pack(self, round: Round, packed: Tensor, out: Tensor | None) -> None:
        with tape.chunks():
            for dst_rank in round.peers()[:-1]:
                with tape.chunk(dst_rank), lane("push", dst_rank):
                    chunk = round.spans.at(dst_rank).pack.view(packed.view(-1), 0, dst_rank)
                    for place in self._places(round, dst_rank, out):
                        if place is None:
                            round.part(dst_rank).view(chunk.shape).copy_(chunk)
                        else:
                            landing = round.spans.landing(round.workspace.rank, dst_rank)
                            copy_between(landing.view(place.view(-1), 0, dst_rank), chunk)
                    round.signal(dst_rank)

    def arrivals(self, round: Round, src_rank: int, out: Tensor | None) -> Iterator[tuple[Tensor, bool]]:
        shared = self._shared(out)
        num_bytes = None if shared is None else shared.nbytes
        for in_place in tape.either("arrived", src_rank, round.is_in_place(src_rank), num_bytes):
            if in_place:
                assert out is not None
                yield _in_result(round, src_rank, out), True
            else:
                yield round.received(src_rank), False

    def wait(self, round: Round, src_rank: int) -> None:
        with lane("wait", src_rank):
            round.wait(src_rank)

    def unpack(self, round: Round, out: Tensor, own: Tensor | None = None) -> None:
        rank = round.workspace.rank
        with lane("copy", rank):
            place = _in_result(round, rank, out)
            if own is not None:
                packed = round.spans.at(rank).pack.view(own.view(-1), 0, rank)
                if packed.data_ptr() != place.data_ptr():
                    copy_between(place, packed)
            elif own_place(round.spans, rank, out) is None:
                copy_between(place, round.received(rank))
        for src_rank in round.sources()[1:]:
            self.wait(round, src_rank)
            for chunk, is_in_place in self.arrivals(round, src_rank, out):
                if not is_in_place:
                    with lane("copy", src_rank):
                        copy_between(_in_result(round, src_rank, out), chunk)

    def reduce(self, round: Round, out: Tensor, bias: Tensor | None, scale: float) -> None:
        rank = round.workspace.rank
        for src_rank in round.sources()[1:]:
            self.wait(round, src_rank)
        parts = [round.received(src_rank) for src_rank in range(round.workspace.group_size)]
        with lane("copy"):
            add_in_order(round.spans.at(rank).pack.view(out.view(-1), 0, rank).view(-1), parts, bias, scale)

    def finish(self, round: Round, outs: Sequence[Tensor]) -> None:
        pass


class CudaTransport:
    """Three streams, which meet by events only, so that a round's copies run beside the matmuls of the next one:

        main    the matmuls, on the caller's stream; and the waits before those that read a slot themselves
        sends   copies to the peers by the copy engines, each with its signal behind it
        reads   kernels that wait for peers, read the own slot, and end the round

    Failures of waits are found by kernels, and poison the results with NaN.

    A round's sends begin when ``reads`` has ended the round before. So this rank has every peer's signal of that round
    before it writes to a peer, and all its reads of that round come before its signals of this one: two slots are
    enough. The own signal is the last one, and what ends a round waits for it: so none ends before all are sent.
    Signals are writes of the stream itself. A kernel would wait until a matmul that fills the GPU leaves it.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.main = torch.cuda.current_stream(workspace.device)
        self.sends, self.reads = workspace.side_stream(), workspace.reading_stream()
        self.staging: dict[int, Tensor] = {}  # by dst_rank: what a matmul has made and a copy sends, in every round
        self.copied: dict[int, torch.cuda.Event] = {}  # by dst_rank: when it may be written again
        self.ended: list[torch.cuda.Event] = []  # the last rounds of both slots: then main may write there again

    def fork(self) -> None:
        self.sends.wait_stream(self.main)
        self.reads.wait_stream(self.main)

    def join(self) -> None:
        try:
            self._main_waits()
        except BaseException:  # Ctrl-C may have come before either wait, and a second one does no harm
            self._main_waits()
            raise

    def _main_waits(self) -> None:
        self.main.wait_stream(self.sends)
        self.main.wait_stream(self.reads)

    def result(self, like: Tensor, shape: Sequence[int], out: Tensor | None = None, *, posted: bool = True) -> Tensor:
        return like.new_empty(shape) if out is None else out

    def own_block(self, exchange: Exchange, out: Tensor) -> Tensor:
        return out.new_empty(exchange.block)

    def max_chunk_numel(self, exchange: Exchange, dtype: torch.dtype) -> int:
        return exchange.piece_numel(dtype.itemsize, self.workspace.max_chunk_numel(dtype.itemsize))

    def begin(self, round: Round, out: Tensor | None = None) -> None:
        # The kernel stands where SMs have just become free, and before the first matmul: none holds it up.
        with torch.cuda.stream(self.reads):
            signals.begin_push(round.workspace)
        self.sends.wait_stream(self.reads)
        if len(self.ended) == NUM_SLOTS:
            self.main.wait_event(self.ended[0])

    def chunks(self, round: Round, out: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        for dst_rank in round.peers():
            chunk = self.place(round, dst_rank, out)
            yield dst_rank, chunk
            with lane("push", dst_rank):
                self.send(round, dst_rank, chunk)

    def place(self, round: Round, dst_rank: int, out: Tensor | None) -> Tensor:
        if dst_rank == round.workspace.rank:
            own = own_place(round.spans, dst_rank, out)
            if round.spans.by_peer and self.ended:  # _unpack_parts of the round before may write all of out
                self.main.wait_event(self.ended[-1])
            return round.part(dst_rank) if own is None else own
        if dst_rank in self.copied:
            self.main.wait_event(self.copied[dst_rank])
        else:
            self.staging[dst_rank] = torch.empty_like(round.part(dst_rank))
        return self.staging[dst_rank][: round.part(dst_rank).numel()]  # the first round's chunks are the largest

    def send(self, round: Round, dst_rank: int, chunk: Tensor) -> None:
        self.sends.wait_stream(self.main)
        if dst_rank != round.workspace.rank:
            with torch.cuda.stream(self.sends):
                round.part(dst_rank).copy_(chunk)
            self.copied[dst_rank] = self.sends.record_event()
        self._signal(round, dst_rank)

    def pack(self, round: Round, packed: Tensor, out: Tensor | None) -> None:
        with torch.cuda.stream(self.sends), lane("push"):
            for dst_rank in round.peers()[:-1]:
                copy_runs(round.part(dst_rank), round.spans.at(dst_rank).pack.view(packed.view(-1), 0, dst_rank))
                self._signal(round, dst_rank)
        self._signal(round, round.workspace.rank)

    def arrivals(self, round: Round, src_rank: int, out: Tensor | None) -> Iterator[tuple[Tensor, bool]]:
        yield round.received(src_rank), False

    def wait(self, round: Round, src_rank: int) -> None:
        with lane("wait", src_rank):
            signals.wait_source(src_rank, round.workspace, round.fingerprint)

    def unpack(self, round: Round, out: Tensor, own: Tensor | None = None) -> None:
        rank = round.workspace.rank
        if own is None:
            self.reads.wait_stream(self.main)
        there = own is not None or own_place(round.spans, rank, out) is not None
        with torch.cuda.stream(self.reads), lane("copy"):
            if own is not None:
                for src_rank in round.sources()[1:]:  # on one SM, and not on half of those that a matmul needs
                    self.wait(round, src_rank)
                copy_between(_in_result(round, rank, out), round.spans.at(rank).pack.view(own.view(-1), 0, rank))
            if round.spans.by_peer:
                self._unpack_parts(round, out, round.sources()[there:], waits=own is None)
            else:
                kernel_launch.unpack(out, round.spans, round.workspace, round.fingerprint, own=not there)
        self._end()

    def _unpack_parts(self, round: Round, out: Tensor, sources: Sequence[int], waits: bool) -> None:
        """The work of unpack_kernel, which takes chunks of one size alone."""
        for src_rank in sources:
            if waits and src_rank != round.workspace.rank:
                self.wait(round, src_rank)
            copy_between(_in_result(round, src_rank, out), round.received(src_rank))
        self.reads.wait_stream(self.main)  # a failure makes all of out NaN, also what main reads
        signals.finish(out, round.workspace, round.fingerprint, end_round=True)

    def reduce(self, round: Round, out: Tensor, bias: Tensor | None, scale: float) -> None:
        self.reads.wait_stream(self.main)
        with torch.cuda.stream(self.reads), lane("copy"):
            kernel_launch.reduce(out, round.spans, bias, scale, round.workspace, round.fingerprint)
        self._end()

    def arrived(self) -> None:
        self.main.wait_stream(self.reads)

    def finish(self, round: Round, outs: Sequence[Tensor]) -> None:
        self.reads.wait_stream(self.main)
        with torch.cuda.stream(self.reads):
            for i, out in enumerate(outs):
                signals.finish(out, round.workspace, round.fingerprint, end_round=i == len(outs) - 1)
        self._end()
        self.main.wait_stream(self.reads)  # the waits of the next round count from the end of this one

    def _end(self) -> None:
        self.ended = [*self.ended, self.reads.record_event()][-NUM_SLOTS:]

    def _signal(self, round: Round, dst_rank: int) -> None:
        workspace = round.workspace
        if stream_writes.available(workspace.device):
            stream_writes.write(self.sends, *workspace.flag(dst_rank, round.epoch, round.fingerprint))
            return
        with torch.cuda.stream(self.sends):
            signals.signal(workspace, dst_rank, round.fingerprint)


def _in_result(round: Round, src_rank: int, out: Tensor) -> Tensor:
    """Where src_rank's chunk belongs in the result, as runs (outer, inner)."""
    return round.spans.at(src_rank).unpack.view(out.view(-1), 0, src_rank)


def transport_of(workspace: Workspace) -> Transport:
    return CudaTransport(workspace) if workspace.device.type == "cuda" else CpuTransport(workspace)


_LONG_RUN = 1 << 20  # bytes of a run that is worth a copy of its own; a matter of microseconds on the link


def copy_runs(to: Tensor, source: Tensor) -> None:
    """``to.view(source.shape).copy_(source)`` for runs (outer, inner), which copy engines take only one by one."""
    to = to.view(source.shape)
    if source.shape[1] * source.itemsize < _LONG_RUN:
        to.copy_(source)
        return
    for run, chunk in zip(source, to, strict=True):
        chunk.copy_(run)


def copy_between(to: Tensor, source: Tensor) -> None:
    """``to.flatten()[i] = source.flatten()[i]`` in one pass, for two Span views, (outer, inner) each, or flat ones."""
    if source.is_contiguous() or to.shape == source.shape:
        to.copy_(source.reshape(to.shape))
    elif to.shape[0] % source.shape[0] == 0:
        shape = (source.shape[0], to.shape[0] // source.shape[0], to.shape[1])
        to.view(shape).copy_(source.view(shape))
    elif source.shape[0] % to.shape[0] == 0:
        shape = (to.shape[0], source.shape[0] // to.shape[0], source.shape[1])
        to.view(shape).copy_(source.view(shape))
    else:
        to.copy_(source.reshape(to.shape))


_BLOCK = 1 << 16  # elements of the sum that a core's caches hold


def add_in_order(out: Tensor, parts: Sequence[Tensor], bias: Tensor | None, scale: float) -> None:
    """``out = sum(parts) * scale + bias``, flat: added in float32, in the order given, and rounded once.

    bias [N] repeats. ``scale`` is 1, or 1 / R for the average.
    """
    if len(parts) == 1 and bias is None and scale == 1:
        out.copy_(parts[0])
        return
    if len(parts) == 2 and bias is None and scale == 1:  # rounded once as well, because torch adds in float32
        torch.add(parts[0], parts[1], out=out)
        return
    row = 1 if bias is None else max(bias.numel(), 1)
    step = max(_BLOCK // row, 1) * row if out.device.type == "cpu" else max(out.numel(), 1)
    for start in range(0, out.numel(), step):
        end = min(start + step, out.numel())
        total = parts[0][start:end].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part[start:end]
        if scale != 1:
            total /= len(parts)
        if bias is not None:
            total = (total.view(-1, row) + bias).view(-1)
        out[start:end] = total
