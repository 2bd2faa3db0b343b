"""`chunked`: a chunk is moved while the next one is computed.

A push makes one matmul per peer, the next peer's first and the own chunk last. A gather makes one per source, own data
first. Both make one matmul for all chunks where rows are few. Where the sums of a gather need float32, it makes one for
each round, whose chunks come beside the matmul of the round before.

The code is written once, and a transport moves the chunks. On a CPU the matmul writes straight into the peer's slot.
With CUDA, cuBLAS runs on the current stream, and copies and waits on two others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from fusedcomm.algorithms.chunk_matmul import GatheredMatmul, PushedMatmul, adds_up, takes_all
from fusedcomm.algorithms.transport import Transport, copy_between, transport_of
from fusedcomm.runtime.launch_order import ordered
from fusedcomm.runtime.profiler import lane
from fusedcomm.runtime.workspace import Call, Round


def push_matmul(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``exchange((x @ w + bias).view(out_shape), gather_dim, scatter_dim)``."""
    transport = transport_of(call.workspace)
    matmul = PushedMatmul(x, w, bias, call.exchange)
    out = transport.result(x, call.exchange.out_shape, out)
    with _running(call, transport):
        for round in call.workspace.rounds(call, x.dtype):
            _push(matmul, round, transport, out)
            transport.unpack(round, out)
    return out


def push_reduce(
    call: Call,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``reduce_scatter(x @ w + partial_bias) * scale + bias``; ``bias`` is the part of this rank's block."""
    transport = transport_of(call.workspace)
    matmul = PushedMatmul(x, w, partial_bias, call.exchange)
    out = transport.result(x, call.exchange.out_shape, out, posted=False)  # sums are made of slots
    with _running(call, transport):
        for round in call.workspace.rounds(call, x.dtype):
            _push(matmul, round, transport)
            transport.reduce(round, out, bias, scale)
    return out


def push_reduce_gather(
    call: Call,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``all_reduce(x @ w + partial_bias) * scale + bias``: two rounds for each part, as the second sends what the first
    has added.
    """
    workspace, transport = call.workspace, transport_of(call.workspace)
    matmul = PushedMatmul(x, w, partial_bias, call.exchange)
    out = transport.result(x, call.exchange.out_shape, out)
    reduced = transport.own_block(call.exchange, out)
    with _running(call, transport):
        workspace.begin(call)
        for spans in call.exchange.rounds(workspace.max_chunk_numel(x.dtype.itemsize)):
            with workspace.round(call, spans, x.dtype) as round:
                _push(matmul, round, transport)
                transport.reduce(round, reduced, bias, scale)
            with workspace.round(call, spans, x.dtype) as round:
                transport.begin(round, out)
                transport.pack(round, reduced, out)
                transport.unpack(round, out, own=reduced)
    return out


def gather_matmul(
    call: Call, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], return_gathered: bool
) -> tuple[list[Tensor], Tensor | None]:
    """``[gathered @ w + bias for w, bias in zip(ws, biases)]``, and gathered (or exchanged) x itself if asked for."""
    exchange, workspace, transport = call.exchange, call.workspace, transport_of(call.workspace)
    x = x.contiguous()
    outs = [transport.result(x, shape, posted=False) for shape in exchange.out_shapes]  # what comes is x
    matmuls = [GatheredMatmul(*each, exchange) for each in zip(outs, ws, biases, strict=True)]
    adds = exchange.splits_columns and adds_up(exchange, x.dtype)
    # A matmul waits for all sources if the result cannot hold the sums, or if one per source would read w repeatedly.
    by_round, at_end = takes_all(exchange, x.dtype), exchange.few_rows
    gathered = transport.result(x, exchange.shape) if return_gathered or by_round or at_end else None
    max_numel = transport.max_chunk_numel(exchange, x.dtype) if by_round else 0
    with _running(call, transport):
        for round in workspace.rounds(call, x.dtype, max_numel):
            transport.begin(round, gathered)
            transport.pack(round, x, gathered)
            if gathered is not None and (by_round or at_end):
                transport.unpack(round, gathered, own=x)
                if by_round:
                    transport.arrived()
                    _multiply(matmuls, round, gathered)
                continue
            for src_rank in round.sources():
                for chunk in _chunk_from(src_rank, round, transport, x, gathered):
                    for matmul in matmuls:
                        with lane("matmul", src_rank):
                            if adds:
                                spans = round.spans.at(src_rank)
                                part = matmul.part(spans, src_rank, chunk, gathered)
                                matmul.add(spans, src_rank, part, first=src_rank == workspace.rank)
                            else:
                                matmul.chunk(round.spans.at(src_rank), src_rank, chunk)
            transport.finish(round, outs if gathered is None else [*outs, gathered])
    if at_end:
        assert gathered is not None
        for matmul in matmuls:
            with lane("matmul"):
                matmul.all(gathered)
    return outs, gathered if return_gathered else None


@contextmanager
def _running(call: Call, transport: Transport) -> Iterator[None]:
    """Keep the launches of a call in order, and guarded, from the fork of its streams to their join."""
    with ordered(call.workspace), call.workspace.guarded(call.op):
        transport.fork()
        try:
            yield
        finally:
            transport.join()


def _push(matmul: PushedMatmul, round: Round, transport: Transport, out: Tensor | None = None) -> None:
    """Compute and send every dst_rank's chunk, the next rank's first. ``out``: what the chunks are unpacked to."""
    transport.begin(round, out)
    matmul.begin(round.spans, round.workspace.rank)
    for dst_rank, chunk in transport.chunks(round, out):
        with lane("matmul", dst_rank):
            matmul(round.spans.at(dst_rank), dst_rank, chunk)


def _multiply(matmuls: Sequence[GatheredMatmul], round: Round, gathered: Tensor) -> None:
    for matmul in matmuls:
        with lane("matmul"):
            matmul.round(round.spans.at(round.workspace.rank), gathered)


def _chunk_from(
    src_rank: int, round: Round, transport: Transport, x: Tensor, gathered: Tensor | None
) -> Iterator[Tensor]:
    """What src_rank sends, once it is in ``gathered`` too. This rank's own chunk is taken from where it is."""
    if src_rank == round.workspace.rank:
        arrivals = iter([(round.spans.at(src_rank).pack.view(x.view(-1), 0, src_rank), False)])
    else:
        transport.wait(round, src_rank)
        arrivals = transport.arrivals(round, src_rank, gathered)
    for chunk, is_in_place in arrivals:
        if gathered is not None and not is_in_place:
            with lane("copy", src_rank):
                copy_between(round.spans.at(src_rank).unpack.view(gathered.view(-1), 0, src_rank), chunk)
        yield chunk
