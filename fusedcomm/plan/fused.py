"""`fused`: persistent Triton kernels. One kernel stores each finished tile into the peer's slot, one waits per source
in its loop, and one adds the arrived chunks.

A kernel that sends never waits, and one that waits never sends. So a gather is a matmul and copies to the peers: by
copy engines beside it, or by a kernel on all SMs in front of it. An eighth of the SMs would take longer to store to the
peers than the matmul, and cost it a wave of tiles. If this rank's rows are complete without the others, cuBLAS
multiplies its own chunk where it lies in x, before the chunks of peers are needed; few rows it multiplies all at once,
before the sends of a push or behind the arrivals of a gather.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fusedcomm.kernels.triton.bundles import Span
from fusedcomm.plan import chunked, launches
from fusedcomm.plan.builder import Builder, Device, Given
from fusedcomm.plan.chunk_matmul import GatheredMatmul, Operand, PushedMatmul
from fusedcomm.plan.copies import copy_between, copy_runs
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.geometry.rank_order import peers_of
from fusedcomm.plan.geometry.spans import ChunkSpans, RoundSpans
from fusedcomm.plan.scaled_programs import OfPayload, gathered_matmul
from fusedcomm.plan.scaling import BLOCK, Scaled
from fusedcomm.plan.schedule import EndRound, Signal, Stream
from fusedcomm.plan.terms import Terms

MAIN, SENDS = Stream.MAIN, Stream.SENDS


def push_matmul(s: Builder, exchange: Exchange, x: Operand, w: Operand, bias: Given, out: Given = None) -> Tensor:
    """``exchange((x @ w + bias).view(out_shape), gather_dim, scatter_dim)``."""
    terms = _sent(s, exchange, Terms(x, w, None, bias, out, 1.0))
    out = s.result(exchange.out_shape, x.dtype) if out is None else out
    for spans in _rounds(s, exchange, x):
        _push(s, terms, spans)
        with s.lane("copy"):
            launches.unpack(s, out, spans)
        s.add(EndRound(by_kernel=True))
    return out


def push_reduce(s: Builder, exchange: Exchange, terms: Terms) -> Tensor:
    """`chunked.push_reduce`, by kernels."""
    if terms.w is None and copy_engines_send(exchange, s.device, terms.x.dtype.itemsize):
        return chunked.push_reduce(s, exchange, terms)
    terms = _sent(s, exchange, terms)
    out = s.result(exchange.out_shape, terms.x.dtype) if terms.out is None else terms.out
    for spans in _rounds(s, exchange, terms.x):
        _push_sum(s, terms, spans, out)
    return out


def push_reduce_gather(s: Builder, exchange: Exchange, terms: Terms) -> Tensor:
    """`chunked.push_reduce_gather`, by kernels."""
    by_copy = terms.w is None and copy_engines_send(exchange, s.device, terms.x.dtype.itemsize)
    if by_copy or _cuts_blocks(s, exchange, terms.w):
        return chunked.push_reduce_gather(s, exchange, terms)
    terms = _sent(s, exchange, terms)
    out = s.result(exchange.out_shape, terms.x.dtype) if terms.out is None else terms.out
    reduced = s.temporary(exchange.block, terms.x.dtype)
    residual = None if terms.residual is None else chunked.own_part(s, exchange, terms.residual)
    for spans in _rounds(s, exchange, terms.x):
        _push_sum(s, terms._replace(residual=residual, norm=None), spans, reduced)
        with s.lane("push"):
            launches.pack(s, reduced, spans)
        with s.lane("copy"):
            launches.unpack(s, out, spans, norm=terms.norm)
        s.add(EndRound(by_kernel=True))
    return out


def _sent(s: Builder, exchange: Exchange, terms: Terms) -> Terms:
    """x and w as kernels take them, or the product of few rows and no w."""
    x, w = terms.x, terms.w
    if w is not None and _by_cublas(exchange, w):
        product = PushedMatmul(s, x, w, terms.partial_bias, exchange).y
        assert product is not None
        x, w = product, None
    return terms._replace(x=launches.contiguous(s, x), w=None if w is None else launches.loadable(s, w))


def _by_cublas(exchange: Exchange, w: Operand) -> bool:
    """`Exchange.by_cublas`, of what torch multiplies: scaled values have one scale for all of K, and sizes of 16s."""
    if not isinstance(w, Scaled):
        return exchange.by_cublas
    k, n = w.shape[-2:]
    has_one = w.scale.numel() == 1 or w.scale.shape[-2:] == (1, n)
    return exchange.by_cublas and not exchange.gathers and has_one and k % 16 == n % 16 == 0


def _push(s: Builder, terms: Terms, spans: RoundSpans) -> None:
    if terms.w is None:
        assert isinstance(terms.x, Tensor)
        with s.lane("push"):
            launches.pack(s, terms.x, replace(spans, pack=Span(*(spans.columns.size * each for each in spans.rows))))
    else:
        with s.lane("matmul"):
            launches.push(s, terms.x, terms.w, terms.partial_bias, spans)


def _push_sum(s: Builder, terms: Terms, spans: RoundSpans, out: Tensor) -> None:
    _push(s, terms, spans)
    with s.lane("copy"):
        launches.reduce(s, out, spans, terms.bias, terms.scale, residual=terms.residual, norm=terms.norm)
    s.add(EndRound(by_kernel=True))


def gather_matmul(
    s: Builder, exchange: Exchange, x: Tensor, ws: Sequence[Operand], biases: Sequence[Given], return_gathered: bool
) -> list[Tensor]:
    """``[gathered @ w + bias for w, bias in zip(ws, biases)]``, and gathered (or exchanged) x behind it if asked for.

    Where K is gathered, the own chunk goes through this rank's slot: the kernel adds it to the others in registers, and
    its loop loads by one descriptor. The product of another matmul would be rounded once more.
    """
    if any(_cuts_blocks(s, exchange, w) for w in ws):
        return chunked.gather_matmul(s, exchange, x, ws, biases, return_gathered)
    x, ws = s.contiguous(x), [launches.loadable(s, w) for w in ws]
    outs = chunked.results(s, exchange, ws)
    at_end = exchange.by_cublas and all(_by_cublas(exchange, w) for w in ws)
    gathered = s.result(exchange.shape, x.dtype) if return_gathered or at_end else None
    by_copy = copy_engines_send(exchange, s.device, x.itemsize)
    own = exchange.splits_columns  # whether the kernel takes the own chunk too, from the slot
    matmuls = [] if own else [gathered_matmul(s, *each, exchange) for each in zip(outs, ws, biases, strict=True)]
    for spans in _rounds(s, exchange, x):
        begun = _send(s, x, spans, own, by_copy)
        if not own:
            _multiply_own(s, () if at_end else matmuls, x, spans, gathered)
        if begun is not None:
            s.after(MAIN, begun)
        for i, (out, w, bias) in enumerate(() if at_end else zip(outs, ws, biases, strict=True)):
            last = gathered is None and i == len(outs) - 1
            with s.lane("matmul"):
                launches.gather_matmul(s, out, w, bias, spans, end_round=last, own=own, dtype=x.dtype)
        if gathered is not None:
            with s.lane("copy"):
                arrived = not at_end and any(out.numel() for out in outs)
                launches.unpack(s, gathered, spans, own=own, arrived=arrived)
        if by_copy:  # x may be freed
            s.join(MAIN, SENDS)
        s.add(EndRound(by_kernel=True))
    if at_end and gathered is not None:
        for matmul in matmuls:
            with s.lane("matmul"):
                matmul.all(gathered)
    return [*outs, gathered] if return_gathered and gathered is not None else outs


def _cuts_blocks(s: Builder, exchange: Exchange, w: Operand | None) -> bool:
    """Whether a block that shares a scale of w comes from two sources, or, where an all_reduce cuts columns, is of two
    owners. Raises RuntimeError for a capture, which cannot hold `chunked`.
    """
    if not isinstance(w, Scaled) or w.scale.numel() == 1 or (isinstance(w, OfPayload) and w.payload is not None):
        return False
    in_blocks = w.scale.shape[-2] > 1 if exchange.gathers else w.scale.shape[-1] < w.shape[-1]
    if not in_blocks or not exchange.splits_columns or exchange.column_run % BLOCK == 0:
        return False
    if s.device.for_capture:
        raise RuntimeError(
            f"a rank's columns must be a multiple of the {BLOCK} that share a scale in a CUDA graph, "
            f"got {exchange.column_run}; `unfused` takes them"
        )
    return True


def _multiply_own(
    s: Builder, matmuls: Sequence[GatheredMatmul], x: Tensor, spans: ChunkSpans, gathered: Tensor | None
) -> None:
    """This rank's rows of each result, and of ``gathered``, straight from x: no peer has to send first."""
    chunk = spans.pack.view(x.view(-1), 0, s.rank)
    for matmul in matmuls:
        with s.lane("matmul", s.rank):
            matmul.chunk(spans, s.rank, chunk)
    if gathered is not None:
        with s.lane("copy", s.rank):
            copy_between(s, spans.unpack.view(gathered.view(-1), 0, s.rank), chunk)


def _rounds(s: Builder, exchange: Exchange, x: Operand) -> list[RoundSpans]:
    assert exchange.cut is None, "kernels take chunks of one size"
    return s.rounds(exchange, x.dtype)


def copy_engines_send(exchange: Exchange, device: Device, itemsize: int) -> bool:
    """Whether copy engines send the chunks of a tensor as they are, beside the matmul of a gather.

    A graph would fix the slots, and the epoch of a workspace that graphs use is known on the device alone. Copies of
    short runs need SMs, which the matmul may hold while it waits for them; so do copies within a GPU, as between ranks
    that share it, and signals that are kernels.
    """
    if exchange.sent_run * itemsize < device.least_copied:
        return False
    return device.is_gpu and not device.shares_gpu and not device.for_capture and device.writes_by_stream


def _send(s: Builder, x: Tensor, spans: RoundSpans, own: bool, by_copy: bool) -> int | None:
    """Send every rank its chunk of x: by copy engines beside later matmuls, except the own chunk.

    Returns the event before their first copy to a peer. A kernel that waits on all SMs must come after it: if the
    copies stood in their hardware queue behind another stream's kernel, that would find no room.
    """
    if not by_copy:
        with s.lane("push"):
            launches.pack(s, x, spans, own=own)
        return None
    with s.lane("push"):
        launches.begin_push(s)
        if own:
            _copy(s, x, spans, s.rank)
        s.join(SENDS, MAIN)
        with s.on(SENDS):
            s.add(Signal(s.rank))  # an operation of the queue, so that the event comes after those in front of it
            begun = s.event(SENDS)
            for dst_rank in peers_of(s.rank, s.group_size)[:-1]:
                _copy(s, x, spans, dst_rank)
                s.add(Signal(dst_rank))
    return begun


def _copy(s: Builder, x: Tensor, spans: RoundSpans, dst_rank: int) -> None:
    copy_runs(s, s.chunk(dst_rank, s.rank, spans, x.dtype), spans.pack.view(x.view(-1), 0, dst_rank))
