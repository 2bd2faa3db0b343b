"""`chunked`: one matmul per peer, the next peer first; a chunk is moved while the next one is computed.

CPU: torch's matmul writes straight into the peer's slot. CUDA: cuBLAS on the current stream, copy engines on another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedcomm.algorithms.ordering import ordered
from fusedcomm.exchange import Exchange, RoundSpans, Span
from fusedcomm.workspace import Workspace

_MIN_PIECE = 128  # interleaved runs at least this long are multiplied in place, shorter ones are gathered first


def push_matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    exchange: Exchange,
    workspace: Workspace,
    op: str,
    fingerprint: int,
) -> Tensor:
    """``exchange((x @ w + bias).view(out_shape), gather_dim, scatter_dim)``."""
    matmul = ChunkMatmul(x, w, bias, exchange)
    out = x.new_empty(exchange.out_shape)
    if x.device.type == "cuda":
        _push_cuda(matmul, out, exchange, workspace, op, fingerprint)
    else:
        _prefer_huge_pages(out)
        _push_cpu(matmul, out, exchange, workspace, op, fingerprint)
    return out


def _push_cpu(
    matmul: ChunkMatmul,
    out: Tensor,
    exchange: Exchange,
    workspace: Workspace,
    op: str,
    fingerprint: int,
) -> None:
    with workspace.guarded(op):
        for round in workspace.rounds(exchange, out.dtype, op, fingerprint):
            unpack = round.spans.unpack
            *peers, rank = round.peers()
            for dst_rank in peers:
                matmul(round.spans, dst_rank, round.part(dst_rank))
                round.signal(dst_rank)
            own = unpack.view(out.view(-1), 0, rank)
            if unpack.outer == 1:
                matmul(round.spans, rank, own[0])
            else:
                matmul(round.spans, rank, round.part(rank))
                own.copy_(round.part(rank).view(own.shape))
            for src_rank in round.sources()[1:]:
                round.wait(src_rank)
                arrived = unpack.view(out.view(-1), 0, src_rank)
                arrived.copy_(round.received(src_rank).view(arrived.shape))


def _push_cuda(
    matmul: ChunkMatmul,
    out: Tensor,
    exchange: Exchange,
    workspace: Workspace,
    op: str,
    fingerprint: int,
) -> None:
    from fusedcomm.algorithms import launch

    rank, main, side = (
        workspace.rank,
        torch.cuda.current_stream(out.device),
        workspace.side_stream(),
    )
    with ordered(workspace), workspace.guarded(op):
        for round in workspace.rounds(exchange, out.dtype, op, fingerprint):
            for dst_rank in round.peers():
                chunk = round.part(rank) if dst_rank == rank else out.new_empty(round.spans.chunk_numel)
                matmul(round.spans, dst_rank, chunk)
                # also the edge that lets no signal of this round overtake my reads of the last one
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    if dst_rank != rank:
                        round.part(dst_rank).copy_(chunk)
                        chunk.record_stream(side)
                    launch.signal(workspace, dst_rank, fingerprint)
            main.wait_stream(side)
            launch.unpack(out, round.spans.unpack, workspace, fingerprint)


def _prefer_huge_pages(out: Tensor) -> None:
    from fusedcomm.kernels.cpu import native

    native.prefer_huge_pages(out.data_ptr(), out.numel() * out.itemsize)


class ChunkMatmul:
    """Computes any chunk of ``x @ w + bias`` into a given place, without a copy of x or w where runs are long."""

    def __init__(self, x: Tensor, w: Tensor, bias: Tensor | None, exchange: Exchange) -> None:
        self.x = x.reshape(exchange.num_batches, exchange.num_rows, exchange.k)
        self.w = w.reshape(exchange.num_batches, exchange.k, w.shape[-1])
        self.bias = bias

    def __call__(self, spans: RoundSpans, dst_rank: int, chunk: Tensor) -> None:
        """``chunk``: flat [batches * rows * columns]."""
        if chunk.numel() == 0:
            return
        batches, rows, columns = spans.batches, spans.rows, spans.columns
        x = rows.view(batches.view(self.x, 0, dst_rank), 2, dst_rank)  # [bo, bi, ro, ri, K]
        w = columns.view(batches.view(self.w, 0, dst_rank), 3, dst_rank)  # [bo, bi, K, co, ci]
        bias = None if self.bias is None else columns.view(self.bias, 0, dst_rank)  # [co, ci]
        out = chunk.view(*_split(batches), *_split(rows), *_split(columns))
        if rows.outer > 1 and rows.inner < _MIN_PIECE:
            x, out = x.flatten(2, 3).unsqueeze(2), out.flatten(2, 3).unsqueeze(2)
        if columns.outer > 1 and columns.inner < _MIN_PIECE:
            w, out = w.flatten(3, 4).unsqueeze(3), out.flatten(4, 5).unsqueeze(4)
            bias = None if bias is None else bias.reshape(1, -1)
        for b in range(out.shape[0]):
            for r in range(out.shape[2]):
                for c in range(out.shape[4]):
                    _matmul(
                        x[b, :, r],
                        w[b, :, :, c],
                        None if bias is None else bias[c],
                        out[b, :, r, :, c],
                    )


def _split(span: Span) -> tuple[int, int]:
    return span.outer, span.inner


def _matmul(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [b, m, n] = x [b, m, K] @ w [b, K, n] + bias [n]; one rounding."""
    if out.shape[0] == 1:
        x, w, out = x[0], w[0], out[0]
        if bias is None:
            torch.mm(x, w, out=out)
        else:
            torch.addmm(bias, x, w, out=out)
    elif bias is None:
        torch.bmm(x, w, out=out)
    else:
        torch.baddbmm(bias, x, w, out=out)
