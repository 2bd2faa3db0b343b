"""`chunked`: a chunk is moved while the next one is computed.

A push makes one matmul per peer, the next peer's first and the own chunk last. A gather makes one per source, own data
first. Both make one matmul for all chunks where rows are few. Where the sums of a gather need float32, it makes one per
round, beside the sends of the next.

On a CPU a matmul writes into the peer's slot. On a GPU it writes staging memory, and copy engines send it: see `Moves`.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from fusedcomm.plan.builder import Builder
from fusedcomm.plan.chunk_matmul import GatheredMatmul, Operand, PushedMatmul
from fusedcomm.plan.copies import copy_between
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.geometry.rank_order import sources_of
from fusedcomm.plan.geometry.spans import RoundSpans
from fusedcomm.plan.moves import Moves
from fusedcomm.plan.scaled_programs import gathered_matmul
from fusedcomm.plan.terms import Terms


def push_matmul(
    s: Builder, exchange: Exchange, x: Operand, w: Operand, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """``exchange((x @ w + bias).view(out_shape), gather_dim, scatter_dim)``."""
    matmul = PushedMatmul(s, x, w, bias, exchange)
    rounds = s.rounds(exchange, x.dtype)
    moves = Moves(s, x.dtype, len(rounds))
    out = s.result(exchange.out_shape, x.dtype) if out is None else out
    for spans in rounds:
        moves.push(spans, matmul, out)
        moves.unpack(spans, out, beside=spans is not rounds[-1])
    moves.end()
    return out


def push_reduce(s: Builder, exchange: Exchange, terms: Terms) -> Tensor:
    """``reduce_scatter(x @ w + partial_bias) * scale + bias + residual``."""
    matmul, rounds, moves, out = _begin(s, exchange, terms)
    for spans in rounds:
        moves.push(spans, matmul)
        beside = spans is not rounds[-1]
        moves.reduce(spans, out, terms.bias, terms.scale, residual=terms.residual, norm=terms.norm, beside=beside)
    moves.end()
    return out


def push_reduce_gather(s: Builder, exchange: Exchange, terms: Terms) -> Tensor:
    """``all_reduce(x @ w + partial_bias) * scale + bias + residual``: two rounds a part, the second for the sums.

    The owner of a block adds its part of the residual, which all ranks share. The norm is a GPU's.
    """
    matmul, rounds, moves, out = _begin(s, exchange, terms)
    reduced = _own_block(s, exchange, out)
    residual = None if terms.residual is None else own_part(s, exchange, terms.residual)
    for spans in rounds:
        beside = spans is not rounds[-1]
        moves.push(spans, matmul)
        moves.reduce(spans, reduced, terms.bias, terms.scale, residual=residual, beside=beside)
        moves.begin()
        moves.pack(spans, reduced)
        beside |= terms.norm is not None  # rows are normed beside the sends of others
        moves.unpack(spans, out, own=reduced, norm=terms.norm, beside=beside)
    moves.end()
    return out


def _begin(s: Builder, exchange: Exchange, terms: Terms) -> tuple[PushedMatmul, list[RoundSpans], Moves, Tensor]:
    dtype, out = terms.x.dtype, terms.out
    matmul = PushedMatmul(s, terms.x, terms.w, terms.partial_bias, exchange)
    rounds = s.rounds(exchange, dtype)
    moves = Moves(s, dtype, len(rounds))
    return matmul, rounds, moves, s.result(exchange.out_shape, dtype) if out is None else out


def gather_matmul(
    s: Builder,
    exchange: Exchange,
    x: Tensor,
    ws: Sequence[Operand],
    biases: Sequence[Tensor | None],
    return_gathered: bool,
) -> list[Tensor]:
    """``[gathered @ w + bias for w, bias in zip(ws, biases)]``, and behind them gathered x if asked for."""
    x = s.contiguous(x)
    outs = results(s, exchange, ws)
    matmuls = [gathered_matmul(s, *each, exchange) for each in zip(outs, ws, biases, strict=True)]
    # A matmul waits for all sources if the result cannot hold the sums, or if one per source would read w repeatedly.
    by_round, at_end = exchange.takes_all(x.itemsize), exchange.few_rows or exchange.is_plain
    rounds = s.rounds(exchange, x.dtype)
    moves = Moves(s, x.dtype, len(rounds))
    gathered = s.result(exchange.shape, x.dtype) if return_gathered or by_round or at_end else None
    for spans in rounds:
        moves.begin()
        moves.pack(spans, x)
        if gathered is not None and (by_round or at_end):
            moves.unpack(spans, gathered, own=x, beside=by_round and spans is not rounds[0])
            if by_round:
                _multiply_round(s, moves, matmuls, spans, gathered)
        else:
            for src_rank in sources_of(s.rank, s.group_size):
                _multiply_from(src_rank, spans, moves, matmuls, x, gathered)
            moves.finish(outs if gathered is None else [*outs, gathered])
    moves.end()
    if at_end and gathered is not None:
        for matmul in matmuls:
            with s.lane("matmul"):
                matmul.all(gathered)
    return [*outs, gathered] if return_gathered and gathered is not None else outs


def _multiply_round(
    s: Builder, moves: Moves, matmuls: Sequence[GatheredMatmul], spans: RoundSpans, gathered: Tensor
) -> None:
    moves.arrived()
    for matmul in matmuls:
        with s.lane("matmul"):
            matmul.round(spans.at(s.rank), gathered)


def _multiply_from(
    src_rank: int,
    spans: RoundSpans,
    moves: Moves,
    matmuls: Sequence[GatheredMatmul],
    x: Tensor,
    gathered: Tensor | None,
) -> None:
    """Multiply src_rank's chunk once it is in ``gathered`` too. This rank's own is taken from x."""
    s, at = moves.s, spans.at(src_rank)
    if src_rank == s.rank:
        chunk = at.pack.view(x.view(-1), 0, src_rank)
    else:
        moves.wait(src_rank)
        chunk = moves.chunk_from(spans, src_rank)
    if gathered is not None:
        with s.lane("copy", src_rank):
            copy_between(s, at.unpack.view(gathered.view(-1), 0, src_rank), chunk)
    for matmul in matmuls:
        with s.lane("matmul", src_rank):
            matmul.multiply(spans, src_rank, chunk, gathered, first=src_rank == s.rank)


def results(s: Builder, exchange: Exchange, ws: Sequence[Operand]) -> list[Tensor]:
    return [s.result(shape, w.dtype) for shape, w in zip(exchange.out_shapes, ws, strict=not exchange.is_plain)]


def _own_block(s: Builder, exchange: Exchange, out: Tensor) -> Tensor:
    """Memory for this rank's block of ``out``, which the others get too: on a CPU in ``out``, if it is a run."""
    shape, dim = exchange.unpacked
    if s.device.is_gpu or dim is None or math.prod(shape[:dim]) != 1:
        return s.temporary(exchange.block, out.dtype)
    numel = math.prod(exchange.block)
    return out.view(-1).narrow(0, s.rank * numel, numel).view(exchange.block)


def own_part(s: Builder, exchange: Exchange, t: Tensor) -> Tensor:
    """This rank's block of a tensor that lies as the result, contiguous."""
    shape, dim = exchange.unpacked
    assert dim is not None
    return s.contiguous(s.reshape(t, *shape).chunk(s.group_size, dim)[s.rank])
