"""`fused` rounds of a mixture of experts. Their sizes are static: no step depends on counts, which kernels read.

A slot holds the rows of one rank: of its experts in a dispatch, of its choices in a combine, written by their sources.
A dispatch in pieces has a round for each: one's rows travel while another's are multiplied.
Where some rank has more choices than a slot has rows, a combine reads its peers' slots. Its reads come before this
rank's signals of the next round, as in `fusedcomm.memory.workspace`; so they come before any rank writes the slot of
that parity again, in its own segment or in another.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.kernels.triton.bundles import Piece, Span
from fusedcomm.plan import launches, tiles
from fusedcomm.plan.builder import Builder, Given
from fusedcomm.plan.descriptors import unit
from fusedcomm.plan.expert_products import send_products, store_products
from fusedcomm.plan.geometry import payloads
from fusedcomm.plan.routing import ROWS, Routing, cut, packed_shape
from fusedcomm.plan.schedule import EndRound, Stream, Table

MAIN = Stream.MAIN
_BLOCK, _EXPERTS, _RETURNED = 128, 64, 64  # that a program takes: choices, experts to count, rows that return


def dispatch(
    s: Builder,
    x: Tensor,
    ids: Tensor,
    *ws: Tensor,
    num_experts: int,
    k: int,
    capacity: int,
    alignment: int,
    num_pieces: int = 1,
) -> list[Tensor]:
    """[rows, offsets, routing] of x [T, H] and ids [T * k], and rows times each of ws [E / R, H, N].

    Where the counts' round fails offsets and routing are zero.
    """
    ids, num_choices, own = s.contiguous(ids), ids.numel(), num_experts // s.group_size
    packed = s.result(packed_shape(num_choices, num_experts, s.group_size), torch.int64)
    offsets = s.result((own,), torch.int32)
    routing = Routing(packed, s.rank, s.group_size, num_choices)
    num_blocks = -(-num_choices // _BLOCK)
    blocks, begins = s.temporary((num_blocks, num_experts), torch.int32), s.temporary((num_experts,), torch.int64)
    counts = s.temporary((num_experts,), torch.int64)
    sizes = num_choices, num_experts
    with s.lane("plan"):
        if num_blocks:
            _plan(s, "count", num_blocks, blocks, ids, *sizes, _BLOCK, _EXPERTS)
        _plan(s, "scan", -(-num_experts // _EXPERTS), counts, blocks, num_blocks, num_experts, _BLOCK // 2, _EXPERTS)
    _tell(s, counts, routing.counts)
    with s.lane("plan"):
        static = s.group_size, own, alignment, ROWS, 1 << (own - 1).bit_length()
        _plan(s, "plan", s.group_size, packed, offsets, begins, num_choices, k, capacity, s.rank, *static)
        _plan(s, "shift", s.group_size, packed, *static[:2], *static[3:])
        if num_blocks:
            of_rank = routing.kept[s.rank], routing.shifts[s.rank]
            tensors = routing.places, routing.indices, ids, blocks, begins, *of_rank
            _plan(s, "place", num_blocks, *tensors, *sizes, capacity, own, _BLOCK)
    x, rows = s.contiguous(x), s.result((capacity, x.shape[1]), x.dtype)
    hs = [s.result((capacity, w.shape[2]), x.dtype) for w in ws]
    ws = tuple(w if 1 in w.stride()[1:] else s.contiguous(w) for w in ws)
    first, ends = routing.first[routing.experts(s.rank)], packed[ROWS.ends, :own]
    pieces = [Piece(own, *each) for each in cut(own, num_pieces)]
    beside = Stream.SENDS if s.device.is_gpu else MAIN
    _send(s, x, None, routing, rows, k, pieces[0])
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        if following is not None:
            s.join(beside, MAIN)
        with s.lane("matmul"):
            store_products(s, hs, rows, ws, first, ends, piece)
        if following is not None:  # launched behind the matmul, which finds its SMs free
            with s.on(beside):
                _send(s, x, None, routing, rows, k, following)
            s.join(MAIN, beside)
    return [rows, offsets, packed, *hs]


def _plan(s: Builder, name: str, num_programs: int, *arguments: Any) -> None:
    """Launch a kernel that waits for nobody."""
    placed = tuple(s.place(each) if isinstance(each, Tensor) else each for each in arguments)
    launches.launch(s, f"slot_places.{name}_kernel", num_programs, placed, num_warps=8)


def _tell(s: Builder, own: Tensor, counts: Tensor) -> None:
    """A round that makes counts [R, E] of every rank's own [E]."""
    exchange = payloads.all_gather((1, own.numel()), 0, s.group_size)
    for spans in exchange.rounds(s.max_chunk_numel(own.dtype)):
        with s.lane("push"):
            launches.pack(s, own, spans)
        with s.lane("copy"):
            launches.unpack(s, counts, spans)
        s.add(EndRound(by_kernel=True))


def send(s: Builder, x: Tensor, scores: Given, packed: Tensor, *, k: int, capacity: int) -> list[Tensor]:
    """[capacity, N]: all ranks' rows of x [T, N], times scores [T * k], for this rank's experts, else zero."""
    routing = Routing(packed, s.rank, s.group_size, len(x) * k)
    rows = s.result((capacity, x.shape[1]), x.dtype)
    own = routing.num_experts // s.group_size
    _send(s, s.contiguous(x), scores, routing, rows, k, Piece(own, 0, own))
    return [rows]


def _send(s: Builder, x: Tensor, scores: Given, routing: Routing, rows: Tensor, k: int, piece: Piece) -> None:
    """A round of the rows of a piece. Those behind the first have a matmul beside them."""
    capacity = len(rows)
    beside = piece.begin > 0
    with s.lane("push"):
        tensors = x, _flat(s, scores), routing.places, routing.first
        _of_tokens(s, "send_rows", "rows beside" if beside else "push", 4, tensors, x, k, capacity, piece)
    with s.lane("copy"):
        kind = "rows beside"
        if not beside:
            kind = launches.copy_out(s, 2 * capacity * x.shape[1] * x.itemsize, beside=False, arrived=False)
        _take(s, kind, rows, routing, scores is not None, piece)
    s.add(EndRound(by_kernel=True))


def combine(
    s: Builder,
    h: Tensor,
    w: Given,
    scores: Given,
    packed: Tensor,
    *,
    num_tokens: int,
    k: int,
    return_received: bool,
) -> list[Tensor]:
    """[T, N]: sums of each token's rows of all ranks' h [capacity, N] times scores [T * k]; and the rows [T, k, N].

    With w [E / R, K, N] the rows are those of h [capacity, K] times the w of their experts.
    """
    capacity, n = h.shape[0], h.shape[1] if w is None else w.shape[2]
    if w is not None and 0 in (capacity, *w.shape[1:]):
        h, w = launches.zeros(s, h.dtype, capacity, n), None
    routing, own = Routing(packed, s.rank, s.group_size, num_tokens * k), packed.shape[1] // s.group_size
    assert w is None or len(w) == own
    y = s.result((num_tokens, n), h.dtype)
    received = s.result((num_tokens, k, n), h.dtype) if return_received else None
    returns = s.temporary((capacity,), torch.int64)
    if capacity:
        with s.lane("plan"):
            static = s.group_size, own, ROWS, _RETURNED, 1 << (own - 1).bit_length()
            _plan(s, "return", -(-capacity // _RETURNED), returns, packed, capacity, s.rank, *static)
    if w is None:
        with s.lane("push"):
            _return(s, s.contiguous(h), returns)
    else:
        with s.lane("matmul"):
            mine = routing.experts(s.rank)
            send_products(s, h, w, routing.first[mine], routing.filled[mine], returns)
    with s.lane("copy"):
        num_bytes = (k + 1 + k * return_received) * y.numel() * h.itemsize
        kind = launches.copy_out(s, num_bytes, beside=False, arrived=False)
        tensors = y, received, _flat(s, scores), routing.places, routing.indices, routing.returned
        in_sm = 2 if n * y.itemsize % 4 == 0 else 1  # loads of 2 bytes take the registers of both
        _of_tokens(s, "add_rows", kind, in_sm, tensors, y, k, capacity)
    s.add(EndRound(by_kernel=True))
    return [y] if received is None else [y, received]


def _flat(s: Builder, scores: Given) -> Given:
    return None if scores is None else s.contiguous(scores)


def _of_tokens(
    s: Builder,
    name: str,
    kind: str,
    in_sm: int,
    tensors: Sequence[Given],
    rows: Tensor,
    k: int,
    capacity: int,
    *others: Piece,
) -> None:
    """Launch programs that each take one of the tokens [T, N] after the other."""
    num_tokens, n = rows.shape
    block, num_warps = tiles.rows_config(s.device.architecture, n, rows.itemsize)
    sizes = num_tokens, capacity, n, s.memory.slot_bytes
    static = k, unit(rows.itemsize, n), block, *others
    arguments = *map(s.optional, tensors), Table(), *sizes, *launches.of_round(s), *static
    _launch(s, name, kind, num_tokens, in_sm, arguments, num_warps)


def _return(s: Builder, rows: Tensor, returns: Tensor) -> None:
    """Launch programs that each take one of the experts' rows [capacity, N] after the other."""
    capacity, n = rows.shape
    block, num_warps = tiles.rows_config(s.device.architecture, n, rows.itemsize)
    sizes = capacity, n, s.memory.slot_bytes
    arguments = s.place(rows), s.place(returns), Table(), *sizes, *launches.of_round(s), unit(rows.itemsize, n), block
    _launch(s, "return_rows", "push", capacity, 4, arguments, num_warps)


def _take(s: Builder, kind: str, rows: Tensor, routing: Routing, scored: bool, piece: Piece) -> None:
    """Launch programs that copy the piece's rows out of the slot into a tensor [capacity, N]."""
    capacity, n = rows.shape
    config = tiles.copy_config(s.device.architecture, Span(capacity * n, 0, max(n, 1), n, 0), rows.itemsize)
    first, filled = (t[routing.experts(s.rank)] for t in (routing.first, routing.filled))
    sizes = capacity, n, s.memory.slot_bytes
    static = scored, unit(rows.itemsize, n), config, piece
    arguments = *map(s.place, (rows, first, filled)), Table(), *sizes, *launches.of_round(s), *static
    num_tiles = -(-capacity // config.block_runs) * -(-n // config.block_inner)
    _launch(s, "take_rows", kind, num_tiles, 1, arguments, config.num_warps)


def _launch(
    s: Builder, name: str, kind: str, num_tiles: int, in_sm: int, arguments: tuple[Any, ...], num_warps: int
) -> None:
    """At least one program signals, or ends the round. Those that wait leave room where ranks share a GPU."""
    alone = kind != "copy-out beside" and not s.device.shares_gpu
    num_programs = launches.programs(s, kind, max(1, num_tiles), in_sm if alone else 1)
    most = min(launches.ALL_REGISTERS, launches.REGISTERS // (in_sm * 32 * num_warps))
    launches.launch(s, f"token_rows.{name}_kernel", num_programs, arguments, num_warps=num_warps, maxnreg=most)
