"""How `chunked` moves chunks on a device: where a matmul writes, what sends, waits, and ends a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fusedcomm.algorithms import kernel_launch
from fusedcomm.algorithms.chunk_matmul import fills_runs
from fusedcomm.runtime import signals
from fusedcomm.runtime.profiler import lane
from fusedcomm.runtime.workspace import Round, Workspace


class Transport(Protocol):
    def result(self, like: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """A tensor for a result: ``out``, if it is given."""

    def place(self, round: Round, dst_rank: int, out: Tensor | None) -> Tensor:
        """Where the matmul may write dst_rank's chunk: a flat tensor, or the runs of ``out`` that it is unpacked to."""

    def send(self, round: Round, dst_rank: int, chunk: Tensor) -> None:
        """Move what was written to ``place``, and signal it."""

    def pack(self, round: Round, packed: Tensor, own: bool) -> None:
        """Send every chunk of ``packed``. This rank's own slot gets its chunk only if ``own``."""

    def wait(self, round: Round, src_rank: int) -> None:
        """Wait for src_rank's chunk; it may be read only after this."""

    def unpack(self, round: Round, out: Tensor, own: Tensor | None = None) -> None:
        """Wait for all chunks, copy them to their places, and end the round. ``own``: what was packed, if anything."""

    def reduce(self, round: Round, out: Tensor, bias: Tensor | None, scale: float) -> None:
        """Wait for all chunks, add them in rank order in float32, round once, and end the round."""

    def finish(self, round: Round, outs: Sequence[Tensor]) -> None:
        """End a round whose chunks have been read; ``outs`` hold what was made of them."""


class CpuTransport:
    """Peers' slots are ordinary memory here. Waits are on the host, and raise when they fail."""

    def result(self, like: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        from fusedcomm.kernels.cpu import native

        out = like.new_empty(shape) if out is None else out
        native.prefer_huge_pages(out.data_ptr(), out.numel() * out.itemsize)
        return out

    def place(self, round: Round, dst_rank: int, out: Tensor | None) -> Tensor:
        if out is None or dst_rank != round.workspace.rank or not self._in_place(round):
            return round.part(dst_rank)
        own = round.spans.unpack.view(out.view(-1), 0, dst_rank)
        return own[0] if own.shape[0] == 1 else own

    def send(self, round: Round, dst_rank: int, chunk: Tensor) -> None:
        if dst_rank != round.workspace.rank:
            round.signal(dst_rank)

    def pack(self, round: Round, packed: Tensor, own: bool) -> None:
        for dst_rank in round.peers()[:-1]:
            with lane("push", dst_rank):
                chunk = round.spans.pack.view(packed.view(-1), 0, dst_rank)
                round.part(dst_rank).view(chunk.shape).copy_(chunk)
                round.signal(dst_rank)

    def wait(self, round: Round, src_rank: int) -> None:
        with lane("wait", src_rank):
            round.wait(src_rank)

    def unpack(self, round: Round, out: Tensor, own: Tensor | None = None) -> None:
        spans, rank = round.spans, round.workspace.rank
        with lane("copy", rank):
            if own is not None:
                copy_between(spans.unpack.view(out.view(-1), 0, rank), spans.pack.view(own.view(-1), 0, rank))
            elif not self._in_place(round):
                copy_between(spans.unpack.view(out.view(-1), 0, rank), round.received(rank))
        for src_rank in round.sources()[1:]:
            self.wait(round, src_rank)
            with lane("copy", src_rank):
                copy_between(spans.unpack.view(out.view(-1), 0, src_rank), round.received(src_rank))

    def reduce(self, round: Round, out: Tensor, bias: Tensor | None, scale: float) -> None:
        for src_rank in round.sources()[1:]:
            self.wait(round, src_rank)
        parts = [round.received(src_rank) for src_rank in range(round.workspace.group_size)]
        with lane("copy"):
            add_in_order(round.spans.pack.view(out.view(-1), 0, 0).view(-1), parts, bias, scale)

    def finish(self, round: Round, outs: Sequence[Tensor]) -> None:
        pass

    def _in_place(self, round: Round) -> bool:
        """Whether the own chunk of a push goes straight to the result."""
        return round.spans.unpack.outer == 1 or fills_runs(round.spans)


class CudaTransport:
    """Copies on a side stream move chunks. Waits are kernels, whose failures poison the results with NaN.

    Each send first waits for the main stream. That edge also keeps every signal of this round behind this rank's reads
    of the last round.

    What the side stream reads is held until the main stream has joined it, in every round. Then the next round takes
    the same memory, however far the host is ahead. ``record_stream`` would keep it until the GPU has come there.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.main = torch.cuda.current_stream(workspace.device)
        self.side = workspace.side_stream()
        self.held: list[Tensor] = []

    def result(self, like: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        return like.new_empty(shape) if out is None else out

    def place(self, round: Round, dst_rank: int, out: Tensor | None) -> Tensor:
        own = round.part(dst_rank)
        return own if dst_rank == round.workspace.rank else torch.empty_like(own)

    def send(self, round: Round, dst_rank: int, chunk: Tensor) -> None:
        self.side.wait_stream(self.main)
        with torch.cuda.stream(self.side):
            if dst_rank == round.peers()[0]:
                signals.begin_push(round.workspace)
            if dst_rank != round.workspace.rank:
                round.part(dst_rank).copy_(chunk)
                self.held.append(chunk)
            self._signal(round, dst_rank)

    def pack(self, round: Round, packed: Tensor, own: bool) -> None:
        self.side.wait_stream(self.main)
        with torch.cuda.stream(self.side), lane("push"):
            signals.begin_push(round.workspace)
            for dst_rank in round.peers():
                if own or dst_rank != round.workspace.rank:
                    chunk = round.spans.pack.view(packed.view(-1), 0, dst_rank)
                    round.part(dst_rank).view(chunk.shape).copy_(chunk)
                self._signal(round, dst_rank)
        self.held.append(packed)

    def wait(self, round: Round, src_rank: int) -> None:
        with lane("wait", src_rank):
            signals.wait_source(src_rank, round.workspace, round.fingerprint)

    def unpack(self, round: Round, out: Tensor, own: Tensor | None = None) -> None:
        self._join()
        with lane("copy"):
            kernel_launch.unpack(out, round.spans.unpack, round.workspace, round.fingerprint)

    def reduce(self, round: Round, out: Tensor, bias: Tensor | None, scale: float) -> None:
        self._join()
        with lane("copy"):
            kernel_launch.reduce(out, round.spans.pack, bias, scale, round.workspace, round.fingerprint)

    def finish(self, round: Round, outs: Sequence[Tensor]) -> None:
        self._join()
        for i, out in enumerate(outs):
            signals.finish(out, round.workspace, round.fingerprint, end_round=i == len(outs) - 1)

    def _join(self) -> None:
        self.main.wait_stream(self.side)
        self.held.clear()

    def _signal(self, round: Round, dst_rank: int) -> None:
        signals.signal(round.workspace, dst_rank, round.fingerprint)


def transport_of(workspace: Workspace) -> Transport:
    return CudaTransport(workspace) if workspace.device.type == "cuda" else CpuTransport()


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
    if len(parts) == 2 and bias is None and scale == 1:  # rounded once as well, because torch adds in float32
        torch.add(parts[0], parts[1], out=out)
        return
    row = 1 if bias is None else max(bias.numel(), 1)
    step = max(_BLOCK // row, 1) * row
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
