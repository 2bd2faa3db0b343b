"""The pieces of a `pipelined` call: where what goes to the peers and comes from them lies, and what moves it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from fusedcomm.memory.group import find
from fusedcomm.memory.workspace import Call
from fusedcomm.plan.chunk_matmul import GatheredMatmul, PushedMatmul, own_place
from fusedcomm.plan.copies import copy_between
from fusedcomm.plan.geometry.exchange import ALIGNED, aligned_numel
from fusedcomm.plan.geometry.rank_order import peers_of, sources_of
from fusedcomm.plan.geometry.spans import RoundSpans
from fusedcomm.run.add_in_order import add_in_order
from fusedcomm.run.now import Now
from fusedcomm.run.profiler import lane

_c10d = torch.ops._c10d_functional


class Buffers:
    """What one piece sends and receives, as far as it does: chunks of at most ``step`` elements."""

    def __init__(self, like: Tensor, rank: int, group_size: int, step: int, padded: bool) -> None:
        self.like, self.rank, self.group_size, self.step, self.padded = like, rank, group_size, step, padded

    @cached_property
    def to_peers(self) -> Tensor:
        """A chunk to every rank. Nobody reads the own one, nor what pads the others; NCCL may look there for NaN."""
        numel = self.group_size * self.step
        if self.padded:
            return self.like.new_zeros(numel)
        made = self.like.new_empty(numel)
        made.narrow(0, self.rank * self.step, self.step).zero_()
        return made

    @cached_property
    def to_all(self) -> Tensor:
        """One chunk to all ranks."""
        return self.like.new_zeros(self.step)

    @cached_property
    def received(self) -> Tensor:
        """A chunk from every rank."""
        return self.like.new_empty(self.group_size * self.step)

    @cached_property
    def summed(self) -> Tensor:
        """The own chunk of the sum, where the backend adds."""
        return self.like.new_empty(self.step)

    @cached_property
    def own(self) -> Tensor:
        """The chunk that stays here."""
        return self.like.new_empty(self.step)


class Piece:
    """The same rows of every rank's chunk, on their way."""

    def __init__(self, call: Call, spans: RoundSpans, buffers: Buffers) -> None:
        self.group, self.exchange, self.spans, self.buffers = find(call.group_name), call.exchange, spans, buffers
        self.backend_sums, self.now = call.backend_sums, Now(buffers.like.device)
        self.rank, self.group_size = buffers.rank, call.exchange.group_size
        self.step = aligned_numel(spans.chunk_numel, buffers.like.itemsize)
        self.wait_for: Callable[[], object] | None = None  # the collective that is under way
        self.own_is_there = False  # whether the own chunk has been multiplied into its place in the result

    def push(self, matmul: PushedMatmul, out: Tensor | None = None) -> None:
        """Multiply and send, and multiply the own chunk beside that: into ``out``, if it fits there."""
        *peers, rank = peers_of(self.rank, self.group_size)
        matmul.begin(self.spans, rank)
        for dst_rank in peers:
            with lane("matmul", dst_rank):
                matmul(self.spans.at(dst_rank), dst_rank, self._sent(dst_rank))
        self._exchange()
        place = own_place(self.spans, rank, out)
        self.own_is_there = place is not None
        with lane("matmul", rank):
            matmul(self.spans.at(rank), rank, self._own() if place is None else place)

    def push_sum(self, matmul: PushedMatmul, scale: float) -> None:
        """Likewise, for ``reduce``. A backend that adds takes the own chunk too, and what is averaged is divided
        before, as float16 may hold an average but not the sum.
        """
        if not self.backend_sums:
            self.push(matmul)
            return
        matmul.begin(self.spans, self.rank)
        for dst_rank in peers_of(self.rank, self.group_size):
            with lane("matmul", dst_rank):
                sent = self._sent(dst_rank)
                matmul(self.spans.at(dst_rank), dst_rank, sent)
                if scale != 1:
                    sent /= self.group_size
        if self.step:
            sent, summed = self.buffers.to_peers[: self.group_size * self.step], self.buffers.summed[: self.step]
            self.wait_for = dist.reduce_scatter_tensor(summed, sent, group=self.group, async_op=True).wait

    def gather(self, packed: Tensor) -> None:
        """Send its part of ``packed`` to every peer."""
        with lane("push"):
            if self.exchange.packed[1] is not None:
                for dst_rank in peers_of(self.rank, self.group_size)[:-1]:
                    chunk = self._packed(packed, dst_rank)
                    self._sent(dst_rank).view(chunk.shape).copy_(chunk)
                self._exchange()
                return
            chunk = self._packed(packed, self.rank)
            if chunk.numel() == self.step and chunk.is_contiguous() and chunk.data_ptr() % ALIGNED == 0:
                sent = chunk.view(-1)
            else:
                sent = self.buffers.to_all[: self.step]
                sent[: chunk.numel()].view(chunk.shape).copy_(chunk)
            if self.step:
                received = self.buffers.received[: self.group_size * self.step]
                _c10d.all_gather_into_tensor_out(sent, self.group_size, self.group.group_name, out=received)
                self.wait_for = functools.partial(_c10d.wait_tensor, received)

    def wait(self) -> None:
        """Let what follows take what has come; on a GPU this holds up the stream, and not the host."""
        with lane("wait"):
            if self.wait_for is not None:
                self.wait_for()
            self.wait_for = None

    def place_own(self, out: Tensor, packed: Tensor | None = None) -> None:
        """Copy the own chunk to its place in ``out``: what was multiplied, unless it is there, or what was packed."""
        if packed is not None or not self.own_is_there:
            chunk = self._own() if packed is None else self._packed(packed, self.rank)
            with lane("copy", self.rank):
                copy_between(self.now, self._place(out, self.rank), chunk)

    def unpack(self, out: Tensor) -> None:
        """Copy what has come to its place in ``out``."""
        for src_rank in sources_of(self.rank, self.group_size)[1:]:
            with lane("copy", src_rank):
                copy_between(self.now, self._place(out, src_rank), self._received(src_rank))

    def reduce(self, out: Tensor, bias: Tensor | None, scale: float) -> None:
        """Add what has come, and the own chunk, in rank order: ``out = sum * scale + bias``; or what the backend has
        added.
        """
        if self.backend_sums:
            parts, scale = [self.buffers.summed[: self.spans.at(self.rank).unpack.size]], 1.0
        else:
            parts = [self._own() if src == self.rank else self._received(src) for src in range(self.group_size)]
        with lane("copy"):
            add_in_order(self._packed(out, self.rank).view(-1), parts, bias, scale)

    def multiply_own(self, matmuls: Sequence[GatheredMatmul], x: Tensor) -> None:
        self._multiply(matmuls, self.rank, self._packed(x, self.rank))

    def multiply_received(self, matmuls: Sequence[GatheredMatmul]) -> None:
        for src_rank in sources_of(self.rank, self.group_size)[1:]:
            self._multiply(matmuls, src_rank, self._received(src_rank))

    def multiply_gathered(self, matmuls: Sequence[GatheredMatmul], gathered: Tensor) -> None:
        """Multiply the rows of this piece, which are whole in ``gathered``."""
        for matmul in matmuls:
            with lane("matmul"):
                matmul.round(self.spans.at(self.rank), gathered)

    def _multiply(self, matmuls: Sequence[GatheredMatmul], src_rank: int, chunk: Tensor) -> None:
        for matmul in matmuls:
            with lane("matmul", src_rank):
                matmul.chunk(self.spans.at(src_rank), src_rank, chunk)

    def _exchange(self) -> None:
        if self.step:
            size = self.group_size * self.step
            sent, received = self.buffers.to_peers[:size], self.buffers.received[:size]
            self.wait_for = dist.all_to_all_single(received, sent, group=self.group, async_op=True).wait

    def _packed(self, packed: Tensor, dst_rank: int) -> Tensor:
        """dst_rank's part of what is sent as it is, as runs (outer, inner)."""
        return self.spans.at(dst_rank).pack.view(packed.view(-1), 0, dst_rank)

    def _place(self, out: Tensor, src_rank: int) -> Tensor:
        """Where src_rank's chunk belongs in ``out``, as runs (outer, inner)."""
        return self.spans.at(src_rank).unpack.view(out.view(-1), 0, src_rank)

    def _sent(self, dst_rank: int) -> Tensor:
        return self.buffers.to_peers.narrow(0, dst_rank * self.step, self.spans.at(dst_rank).pack.size)

    def _received(self, src_rank: int) -> Tensor:
        return self.buffers.received.narrow(0, src_rank * self.step, self.spans.at(src_rank).unpack.size)

    def _own(self) -> Tensor:
        return self.buffers.own[: self.spans.at(self.rank).unpack.size]


def run(call: Call, like: Tensor, stages: Sequence[Callable[[Piece], None]]) -> None:
    """Let every piece pass the stages, each stage behind the one before it of the next piece.

    So many pieces are under way as there are stages, and they take turns in the same buffers.
    """
    exchange = call.exchange
    rounds = exchange.pieces(call.num_rounds)
    step = max(aligned_numel(spans.chunk_numel, like.itemsize) for spans in rounds)
    padded = exchange.cut is not None or any(
        aligned_numel(r.chunk_numel, like.itemsize) > r.chunk_numel for r in rounds
    )
    facts = like, find(call.group_name).rank(), exchange.group_size, step, padded
    turns = itertools.cycle([Buffers(*facts) for _ in stages[: len(rounds)]])
    pieces = [Piece(call, spans, buffers) for spans, buffers in zip(rounds, turns, strict=False)]
    for number in range(len(pieces) + len(stages) - 1):
        for behind, stage in enumerate(stages):
            if 0 <= number - behind < len(pieces):
                stage(pieces[number - behind])
