"""Rows of tokens that go to experts and come back: pushes by places, their copy-out, and sums.

A place is rank * capacity + row, or -1 where a token's choice has no row. The slot of a round is one block of rows,
[capacity, N]. In a dispatch they are those of the owner's experts: a token's row goes to a rank once, to the first of
its rows there. Behind the block is the number of that row for each of them, int32 [capacity], and its score, float32
[capacity]. A PIECE of a dispatch has some of each rank's experts and a round of its own; a row that came in an earlier
piece is not sent again. In a combine they are those of the owner's choices, by index; where a rank has more than fit,
as all ranks know, each rank's rows stay in its own slot instead.
"""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.primitives import (
    end_round,
    in_units,
    must_poison,
    next_push,
    next_round,
    report_all,
    rounded,
    slot_of,
    wait_all,
)

MASK_32 = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _place(places_ptr, i, capacity, GROUP_SIZE: tl.constexpr):
    """(rank, row, whether there is one) of choice i. A routing of another call leads to no other memory."""
    place = tl.load(places_ptr + i)
    there = (place >= 0) & (place < tl.cast(capacity, tl.int64) * GROUP_SIZE)
    rank = tl.where(there, place, 0) // tl.maximum(capacity, 1)
    return rank, place - rank * capacity, there


@triton.jit
def _notes(segment, epoch, capacity, N, slot_bytes, LAYOUT: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers to (the row sent, score) [capacity] of a slot's rows of DTYPE."""
    begin = tl.cdiv(tl.cast(capacity, tl.int64) * N * (DTYPE.primitive_bitwidth // 8), 4)
    sent = slot_of(segment, epoch, slot_bytes, LAYOUT, tl.int32) + begin
    return sent, slot_of(segment, epoch, slot_bytes, LAYOUT, tl.float32) + begin + capacity


@triton.jit
def all_fit(sums_ptr, capacity, LAYOUT: tl.constexpr):
    """Whether a combine's rows fit the slots of the ranks that they return to."""
    ranks = tl.arange(0, triton.next_power_of_2(LAYOUT.group_size))
    return tl.max(tl.load(sums_ptr + ranks, ranks < LAYOUT.group_size, other=0), axis=0) <= capacity


@triton.jit
def first_of_rank(num, rank, LAYOUT: tl.constexpr):
    """The first of ``num`` equal works of a rank: not all ranks send to one at a time."""
    return tl.cast(num, tl.int64) * rank // LAYOUT.group_size


@triton.jit
def _of_piece(first_ptr, capacity, PIECE: tl.constexpr):
    """(first row, row before which they end) of the experts of a piece, from the first rows of their rank's experts."""
    begin, end = 0, capacity
    if PIECE.begin > 0:
        begin = tl.minimum(tl.maximum(tl.load(first_ptr + PIECE.begin), 0), capacity).to(tl.int32)
    if PIECE.end < PIECE.experts:
        end = tl.minimum(tl.load(first_ptr + PIECE.end), capacity).to(tl.int32)
    return begin, end


@triton.jit
def _sent(sent_ptr, tile, tiles_in_row, capacity, RUNS: tl.constexpr):
    """The row of the source for each row of a tile. One that nobody has noted may be any number."""
    rows = tile // tl.maximum(tiles_in_row, 1) * RUNS + tl.arange(0, RUNS)
    return rows if sent_ptr is None else tl.load(sent_ptr + rows, rows < capacity, other=-1)


@triton.jit
def _copy_rows(
    to,
    source,
    sent_ptr,  # [capacity], the row of source for each row
    scores_ptr,  # [capacity], or None
    first_ptr,  # [PIECE.experts], the rows where experts begin, and
    filled_ptr,  # end
    capacity,
    N,
    FILL: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """to[row] = source[sent[row]] * scores[row], rounded once, of [capacity, N] for the experts' rows, FILL for others,
    or with source None for all. Rows of earlier pieces are read from ``to``.
    """
    begin, end = _of_piece(first_ptr, capacity, PIECE)
    tiles_in_row = tl.cdiv(N, TILE.block_inner)
    first_tile = begin // TILE.block_runs * tiles_in_row + tl.program_id(0)
    experts = tl.arange(0, triton.next_power_of_2(PIECE.experts))
    first = tl.load(first_ptr + experts, experts < PIECE.experts, other=0)
    filled = tl.load(filled_ptr + experts, experts < PIECE.experts, other=0)
    num_tiles = tl.cdiv(end, TILE.block_runs) * tiles_in_row
    sent = _sent(sent_ptr, first_tile, tiles_in_row, capacity, TILE.block_runs)
    for tile in range(first_tile, num_tiles, tl.num_programs(0)):
        ahead = _sent(sent_ptr, tile + tl.num_programs(0), tiles_in_row, capacity, TILE.block_runs)
        rows = tile // tiles_in_row * TILE.block_runs + tl.arange(0, TILE.block_runs)
        columns = tile % tiles_in_row * TILE.block_inner + tl.arange(0, TILE.block_inner)
        mask = ((rows >= begin) & (rows < end))[:, None] & (columns < N)[None, :]
        at = rows.to(tl.int64)[:, None] * N + columns[None, :]
        if source is None:
            tl.store(
                to + at, tl.full((TILE.block_runs, TILE.block_inner), FILL, tl.float32).to(to.dtype.element_ty), mask
            )
        else:
            owned = (rows[:, None] >= first[None, :]) & (rows[:, None] < filled[None, :])
            is_sent = (tl.max(owned.to(tl.int32), axis=1) != 0) & (sent >= 0) & (sent < capacity)
            there = mask & is_sent[:, None]
            came = sent.to(tl.int64)[:, None] * N + columns[None, :]
            value = tl.load(source + came, there & (sent >= begin)[:, None], other=0)
            if PIECE.begin > 0:
                is_earlier = (sent < begin)[:, None]
                value = tl.where(is_earlier, tl.load(to + came, there & is_earlier, other=0), value)
            if scores_ptr is not None:
                score = tl.load(scores_ptr + rows, is_sent, other=0)
                value = rounded(value.to(tl.float32) * score[:, None], to.dtype.element_ty)
            tl.store(to + at, value, mask)
        sent = ahead  # asked for a tile before its rows are


@triton.jit(do_not_specialize=["num_tokens", "capacity", "fingerprint", "rank"])
def send_rows_kernel(
    x_ptr,  # [T, N], contiguous
    scores_ptr,  # [T * K], or None
    places_ptr,  # [T * K]
    first_ptr,  # [R * PIECE.experts], the rows where all ranks' experts begin
    segments_ptr,  # [R] addresses of the ranks' segments
    num_tokens,
    capacity,
    N,
    slot_bytes,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Store x[i // K] at the first place of i's token on each rank, a note with scores[i] for each choice i of the
    piece, and signal every rank.

    The kernel waits for nothing: a slot is free by rule 1 of the protocol.
    """
    N = in_units(N, UNIT)
    dtype = x_ptr.dtype.element_ty
    CHOICES: tl.constexpr = triton.next_power_of_2(K)
    choices = tl.arange(0, CHOICES)
    round = next_push(segments_ptr, rank, fingerprint, LAYOUT)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        wide = tl.cast(token, tl.int64)
        places = tl.load(places_ptr + wide * K + choices, choices < K, other=-1)
        for begin in range(0, N, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            row = tl.load(x_ptr + wide * N + columns, columns < N)
            for choice in range(K):
                i = wide * K + choice
                dst_rank, at, there = _place(places_ptr, i, capacity, LAYOUT.group_size)
                piece_begin, piece_end = _of_piece(first_ptr + dst_rank * PIECE.experts, capacity, PIECE)
                if there & (at >= piece_begin) & (at < piece_end):
                    segment, here = tl.load(segments_ptr + dst_rank), tl.cast(dst_rank, tl.int64) * capacity
                    rows = tl.where((places >= here) & (places < here + capacity), places - here, at)
                    first = tl.min(rows, axis=0)
                    if first == at:
                        slot = slot_of(segment, round.epoch, slot_bytes, LAYOUT, dtype)
                        tl.store(slot + at * N + columns, row, columns < N)
                    if begin == 0:
                        sent, scores = _notes(segment, round.epoch, capacity, N, slot_bytes, LAYOUT, dtype)
                        tl.store(sent + at, first.to(tl.int32))
                        if scores_ptr is not None:
                            tl.store(scores + at, tl.load(scores_ptr + i).to(tl.float32))
    report_all(round, LAYOUT)


@triton.jit(do_not_specialize=["capacity", "fingerprint", "rank"])
def take_rows_kernel(
    rows_ptr,  # [capacity, N], contiguous
    first_ptr,
    filled_ptr,
    segments_ptr,  # [R] addresses of the ranks' segments
    capacity,
    N,
    slot_bytes,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    SCORED: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Copy the rows of a piece out of the slot by their notes, with SCORED times their scores, and make others zero.

    The kernel waits, bounded, for the signal of each src_rank's send_rows_kernel, and ends the round. On failure it
    writes NaN.
    """
    N = in_units(N, UNIT)
    dtype = rows_ptr.dtype.element_ty
    round = next_round(segments_ptr, rank, fingerprint)
    failed = wait_all(round, LAYOUT)
    if failed == 0:
        slot = slot_of(round.segment, round.epoch, slot_bytes, LAYOUT, dtype)
        sent, scores = _notes(round.segment, round.epoch, capacity, N, slot_bytes, LAYOUT, dtype)
        scores = scores if SCORED else None
        _copy_rows(rows_ptr, slot, sent, scores, first_ptr, filled_ptr, capacity, N, 0, TILE, PIECE)
    if must_poison(round, failed, LAYOUT):
        nan: tl.constexpr = float("nan")
        _copy_rows(rows_ptr, None, None, None, first_ptr, filled_ptr, capacity, N, nan, TILE, PIECE)
    end_round(round)


@triton.jit(do_not_specialize=["capacity", "fingerprint", "rank"])
def return_rows_kernel(
    rows_ptr,  # [capacity, N], contiguous
    returns_ptr,  # [capacity], by slot_places.return_kernel
    segments_ptr,  # [R] addresses of the ranks' segments
    capacity,
    N,
    slot_bytes,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the experts' rows in the slots of the ranks whose choices they are, and signal every rank.

    The kernel waits for nothing: a slot is free by rule 1 of the protocol.
    """
    N = in_units(N, UNIT)
    round = next_push(segments_ptr, rank, fingerprint, LAYOUT)
    begin_row = first_of_rank(capacity, rank, LAYOUT)
    for i in range(tl.program_id(0), capacity, tl.num_programs(0)):
        row = (tl.cast(i, tl.int64) + begin_row) % capacity
        place = tl.load(returns_ptr + row)
        if place >= 0:
            segment = tl.load(segments_ptr + (place >> 32))
            to = slot_of(segment, round.epoch, slot_bytes, LAYOUT, rows_ptr.dtype.element_ty) + (place & MASK_32) * N
            for begin in range(0, N, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                tl.store(to + columns, tl.load(rows_ptr + row * N + columns, columns < N), columns < N)
    report_all(round, LAYOUT)


@triton.jit(do_not_specialize=["num_tokens", "capacity", "fingerprint", "rank"])
def add_rows_kernel(
    y_ptr,  # [T, N], contiguous
    received_ptr,  # [T * K, N], or None
    scores_ptr,  # [T * K], or None
    places_ptr,  # [T * K], as indices
    indices_ptr,
    sums_ptr,  # [R]
    segments_ptr,  # [R] addresses of the ranks' segments
    num_tokens,
    capacity,
    N,
    slot_bytes,
    fingerprint,
    rank,
    LAYOUT: tl.constexpr,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y[t] = sum of received[i] * scores[i] over t's choices i, in order, in float32, rounded once. received[i] is the
    row of the slot at the index of i, or where rows do not fit, that at its place in the slot of its rank; or zero.

    The kernel waits, bounded, for the signal of each rank's return_rows_kernel or grouped_matmul_kernel, and ends the
    round: peers' slots are read before. On failure it writes NaN.
    """
    N = in_units(N, UNIT)
    dtype = y_ptr.dtype.element_ty
    round = next_round(segments_ptr, rank, fingerprint)
    failed = wait_all(round, LAYOUT)
    fit = all_fit(sums_ptr, capacity, LAYOUT)
    for token in range(tl.program_id(0), tl.where(failed, 0, num_tokens), tl.num_programs(0)):
        wide = tl.cast(token, tl.int64)
        for begin in range(0, N, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for choice in tl.range(0, K, loop_unroll_factor=4):
                i = wide * K + choice
                src_rank, at, there = _place(places_ptr, i, capacity, LAYOUT.group_size)
                index = tl.load(indices_ptr + i)
                there &= (fit == 0) | ((index >= 0) & (index < capacity))
                segment = tl.load(segments_ptr + tl.where(fit, rank, src_rank))
                row = slot_of(segment, round.epoch, slot_bytes, LAYOUT, dtype) + tl.where(fit, index, at) * N
                value = tl.load(row + columns, columns < tl.where(there, N, 0), other=0)
                if received_ptr is not None:
                    tl.store(received_ptr + i * N + columns, value, columns < N)
                addend = value.to(tl.float32)
                if scores_ptr is not None:
                    addend *= tl.load(scores_ptr + i).to(tl.float32)
                total += addend
            tl.store(y_ptr + wide * N + columns, rounded(total, dtype), columns < N)
    if must_poison(round, failed, LAYOUT):
        nan = tl.full((BLOCK,), float("nan"), tl.float32).to(dtype)
        for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
            wide = tl.cast(token, tl.int64)
            for begin in range(0, N, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                tl.store(y_ptr + wide * N + columns, nan, columns < N)
                if received_ptr is not None:
                    for choice in range(K):
                        tl.store(received_ptr + (wide * K + choice) * N + columns, nan, columns < N)
    end_round(round)
