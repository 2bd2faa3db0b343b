"""`pipelined`: the matmul in pieces, each beside the group's own collective for the piece before or behind it.

It needs no memory of the peers: what moves the pieces is the backend of the process group, NCCL or gloo. So it runs
across hosts, and between devices that do not reach each other. A piece has the same rows of every rank's chunk, and all
ranks cut alike, so that collectives are of equal parts: NCCL has its own all_to_all for these alone. Parts of
different sizes are padded to the largest, and all to a multiple of 16 bytes, which NCCL moves fastest.

A call is a row of stages that each piece passes, one behind the other:

    push     multiply what goes to the peers, begin its all_to_all, multiply the own chunk  |  place what has come
    reduce   the same                                                                       |  add it in rank order
    all_reduce                                 ...  |  add it, begin the all_gather of sums |  place what has come
    gather   begin the collective of x's piece      |  multiply the own chunk, then what has come

While a stage of one piece waits, those of the pieces around it are under way. Sums are added in float32, in rank order,
and rounded once, as every algorithm does: the backend only moves elements. With FUSEDCOMM_BACKEND_SUMS it adds them, by
its reduce_scatter, as `unfused` does: where the network itself adds (SHARP), a rank receives a sum, and not R parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedcomm.memory.workspace import Call
from fusedcomm.plan.chunk_matmul import GatheredMatmul, PushedMatmul
from fusedcomm.run.now import Now
from fusedcomm.run.pieces import Piece, run
from fusedcomm.run.profiler import lane


def push_matmul(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``exchange((x @ w + bias).view(out_shape), gather_dim, scatter_dim)``."""
    out = x.new_empty(call.exchange.out_shape) if out is None else out
    matmul = PushedMatmul(Now(x.device), x, w, bias, call.exchange)

    def multiply(piece: Piece) -> None:
        piece.push(matmul, out)

    def place(piece: Piece) -> None:
        piece.place_own(out)
        piece.wait()
        piece.unpack(out)

    run(call, x, [multiply, place])
    return out


def push_reduce(
    call: Call,
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``reduce_scatter(x @ w + partial_bias) * scale + bias``; ``bias`` is the part of this rank's block."""
    out = x.new_empty(call.exchange.out_shape) if out is None else out
    matmul = PushedMatmul(Now(x.device), x, w, partial_bias, call.exchange)

    def multiply(piece: Piece) -> None:
        piece.push_sum(matmul, scale)

    def add(piece: Piece) -> None:
        piece.wait()
        piece.reduce(out, bias, scale)

    run(call, x, [multiply, add])
    return out


def push_reduce_gather(
    call: Call,
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``all_reduce(x @ w + partial_bias) * scale + bias``: an all_to_all of terms, then an all_gather of sums."""
    out = x.new_empty(call.exchange.out_shape) if out is None else out
    reduced = x.new_empty(call.exchange.block)
    matmul = PushedMatmul(Now(x.device), x, w, partial_bias, call.exchange)

    def multiply(piece: Piece) -> None:
        piece.push_sum(matmul, scale)

    def add(piece: Piece) -> None:
        piece.wait()
        piece.reduce(reduced, bias, scale)
        piece.gather(reduced)

    def place(piece: Piece) -> None:
        piece.place_own(out, reduced)
        piece.wait()
        piece.unpack(out)

    run(call, x, [multiply, add, place])
    return out


def gather_matmul(
    call: Call, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], return_gathered: bool
) -> tuple[list[Tensor], Tensor | None]:
    """``[gathered @ w + bias for w, bias in zip(ws, biases)]``, and gathered (or exchanged) x itself if asked for."""
    exchange, x = call.exchange, x.contiguous()
    outs = [x.new_empty(shape) for shape in exchange.out_shapes]
    matmuls = [GatheredMatmul(Now(x.device), *each, exchange) for each in zip(outs, ws, biases, strict=True)]
    # One matmul takes all sources where K is gathered, and all pieces where rows are so few that it mostly reads w.
    by_piece, by_chunk = exchange.splits_columns, not (exchange.splits_columns or exchange.few_rows)
    gathered = x.new_empty(exchange.shape) if return_gathered or not by_chunk else None

    def begin(piece: Piece) -> None:
        piece.gather(x)

    def multiply(piece: Piece) -> None:
        if by_chunk:
            piece.multiply_own(matmuls, x)
        if gathered is not None:
            piece.place_own(gathered, x)
        piece.wait()
        if gathered is not None:
            piece.unpack(gathered)
            if by_piece:
                piece.multiply_gathered(matmuls, gathered)
        if by_chunk:
            piece.multiply_received(matmuls)

    run(call, x, [begin, multiply])
    if gathered is not None and not by_piece and not by_chunk:
        for matmul in matmuls:
            with lane("matmul"):
                matmul.all(gathered)
    return outs, gathered if return_gathered else None
