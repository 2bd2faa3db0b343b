"""`chunked`: a chunk is moved while the next one is computed.

A push makes one matmul per peer, the next peer's first and the own chunk last. A gather makes one per source, own data
first. Both make one matmul for all chunks where rows are few; a gather also where its sums need float32.

The code is written once, and a transport moves the chunks. On a CPU the matmul writes straight into the peer's slot.
With CUDA, cuBLAS runs on the current stream and the copies on another.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedcomm.algorithms.chunk_matmul import GatheredMatmul, PushedMatmul, adds_up
from fusedcomm.algorithms.transport import Transport, copy_between, transport_of
from fusedcomm.runtime.launch_order import ordered
from fusedcomm.runtime.profiler import lane
from fusedcomm.runtime.workspace import Call, Round


def push_matmul(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``exchange((x @ w + bias).view(out_shape), gather_dim, scatter_dim)``."""
    workspace, transport = call.workspace, transport_of(call.workspace)
    matmul = PushedMatmul(x, w, bias, call.exchange)
    out = transport.result(x, call.exchange.out_shape, out)
    with ordered(workspace), workspace.guarded(call.op):
        for round in workspace.rounds(call, x.dtype):
            _push(matmul, round, transport, out)
            transport.unpack(round, out)
    return out


def push_reduce(
    call: Call, x: Tensor, w: Tensor, bias: Tensor | None, scale: float, out: Tensor | None = None
) -> Tensor:
    """``reduce_scatter(x @ w) * scale + bias``; ``bias`` is the part of this rank's block."""
    workspace, transport = call.workspace, transport_of(call.workspace)
    matmul = PushedMatmul(x, w, None, call.exchange)
    out = transport.result(x, call.exchange.out_shape, out)
    with ordered(workspace), workspace.guarded(call.op):
        for round in workspace.rounds(call, x.dtype):
            _push(matmul, round, transport)
            transport.reduce(round, out, bias, scale)
    return out


def push_reduce_gather(
    call: Call, x: Tensor, w: Tensor, bias: Tensor | None, scale: float, out: Tensor | None = None
) -> Tensor:
    """``all_reduce(x @ w) * scale + bias``: two rounds for each part, as the second sends what the first has added."""
    workspace, transport = call.workspace, transport_of(call.workspace)
    matmul = PushedMatmul(x, w, None, call.exchange)
    out = transport.result(x, call.exchange.out_shape, out)
    reduced = x.new_empty(call.exchange.block)
    with ordered(workspace), workspace.guarded(call.op):
        workspace.begin(call)
        for spans in call.exchange.rounds(workspace.max_chunk_numel(x.dtype.itemsize)):
            with workspace.round(call, spans, x.dtype) as round:
                _push(matmul, round, transport)
                transport.reduce(round, reduced, bias, scale)
            with workspace.round(call, spans, x.dtype) as round:
                transport.pack(round, reduced, own=True)
                transport.unpack(round, out, own=reduced)
    return out


def gather_matmul(
    call: Call, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], return_gathered: bool
) -> tuple[list[Tensor], Tensor | None]:
    """``[gathered @ w + bias for w, bias in zip(ws, biases)]``, and gathered (or exchanged) x itself if asked for."""
    exchange, workspace, transport = call.exchange, call.workspace, transport_of(call.workspace)
    x = x.contiguous()
    outs = [transport.result(x, shape) for shape in exchange.out_shapes]
    matmuls = [GatheredMatmul(*each, exchange) for each in zip(outs, ws, biases, strict=True)]
    adds = exchange.splits_columns and adds_up(exchange, x.dtype)
    # One matmul waits for all chunks if the result cannot hold the sums, or if one per source would read w repeatedly.
    at_once = (exchange.splits_columns and not adds) or exchange.few_rows
    gathered = transport.result(x, exchange.shape) if return_gathered or at_once else None
    with ordered(workspace), workspace.guarded(call.op):
        for round in workspace.rounds(call, x.dtype):
            transport.pack(round, x, own=False)
            for src_rank in round.sources():
                chunk = _chunk_from(src_rank, round, transport, x)
                if gathered is not None:
                    with lane("copy", src_rank):
                        copy_between(round.spans.unpack.view(gathered.view(-1), 0, src_rank), chunk)
                for matmul in [] if at_once else matmuls:
                    with lane("matmul", src_rank):
                        if adds:
                            part = matmul.part(round.spans, src_rank, chunk, gathered)
                            matmul.add(round.spans, src_rank, part, first=src_rank == workspace.rank)
                        else:
                            matmul.chunk(round.spans, src_rank, chunk.reshape(-1))
            made = [] if at_once else outs
            transport.finish(round, made if gathered is None else [*made, gathered])
    if at_once:
        assert gathered is not None
        for matmul in matmuls:
            with lane("matmul"):
                matmul.all(gathered)
    return outs, gathered if return_gathered else None


def _push(matmul: PushedMatmul, round: Round, transport: Transport, out: Tensor | None = None) -> None:
    """Compute and send every dst_rank's chunk, the next rank's first. ``out``: where the own chunk may go directly."""
    for dst_rank in round.peers():
        chunk = transport.place(round, dst_rank, out)
        with lane("matmul", dst_rank):
            matmul(round.spans, dst_rank, chunk)
        with lane("push", dst_rank):
            transport.send(round, dst_rank, chunk)


def _chunk_from(src_rank: int, round: Round, transport: Transport, x: Tensor) -> Tensor:
    """What src_rank sends. This rank's own chunk is taken from where it is."""
    if src_rank == round.workspace.rank:
        return round.spans.pack.view(x.view(-1), 0, src_rank)
    transport.wait(round, src_rank)
    return round.received(src_rank)
