"""The places of a rank's choices from the counts of all ranks: `fusedcomm.plan.routing.pack`, as kernels.

Choices are taken in blocks. An expert's rows of a rank come in the order of its choices: those of a block come behind
those of all blocks before it.
"""

import triton
import triton.language as tl

from fusedcomm.kernels.triton.ptx import await_earlier_kernels


@triton.jit
def _experts(ids_ptr, num_choices, num_experts, BLOCK: tl.constexpr):
    """(choices, the expert of each) of this program's block; -1 where there is none."""
    i = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    experts = tl.load(ids_ptr + i, i < num_choices, other=-1)
    return i, tl.where((experts >= 0) & (experts < num_experts), experts, -1).to(tl.int32)


@triton.jit(do_not_specialize=["num_choices", "num_experts"])
def count_kernel(
    blocks_ptr,  # [blocks, E]
    ids_ptr,  # [T * k]
    num_choices,
    num_experts,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """blocks[program, e] = the choices of e in the program's block."""
    await_earlier_kernels()
    _, chosen = _experts(ids_ptr, num_choices, num_experts, BLOCK)
    for first in range(0, num_experts, EXPERTS):
        experts = first + tl.arange(0, EXPERTS)
        counts = tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), axis=0)
        at = tl.cast(tl.program_id(0), tl.int64) * num_experts + experts
        tl.store(blocks_ptr + at, counts, experts < num_experts)


@triton.jit(do_not_specialize=["num_blocks", "num_experts"])
def scan_kernel(
    own_ptr,  # [E]
    blocks_ptr,  # [blocks, E]
    num_blocks,
    num_experts,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """own[e] = the sum of e's counts over all blocks; blocks[b, e] becomes the sum over those before b."""
    await_earlier_kernels()
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_blocks, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = blocks_ptr + rows.to(tl.int64)[:, None] * num_experts + experts[None, :]
        mask = (rows < num_blocks)[:, None] & (experts < num_experts)[None, :]
        counts = tl.load(at, mask, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, axis=0) - counts, mask)
        total += tl.sum(counts, axis=0)
    tl.store(own_ptr + experts, total.to(tl.int64), experts < num_experts)


@triton.jit
def _fitting(units, room):
    """Units that each expert keeps: the fullest are cut to one level, and the first of them get what is left over."""
    fits = units
    if tl.sum(units, axis=0) > room:
        low = tl.cast(0, tl.int64)
        high = tl.max(units, axis=0)
        while high - low > 1:
            level = (low + high) // 2
            fit = tl.sum(tl.minimum(units, level), axis=0) <= room
            low, high = tl.where(fit, level, low), tl.where(fit, high, level)
        fits = tl.minimum(units, low)
        is_cut = units > low
        fits += (is_cut & (tl.cumsum(is_cut.to(tl.int64), axis=0) <= room - tl.sum(fits, axis=0))).to(tl.int64)
    return fits


@triton.jit(do_not_specialize=["num_choices", "k", "capacity", "rank"])
def plan_kernel(
    packed_ptr,  # a routing tensor, [rows, E], in which the counts of all ranks are
    offsets_ptr,  # [E / R]
    begins_ptr,  # [E]: the first row of this rank, for each expert
    num_choices,
    k,
    capacity,
    rank,
    GROUP_SIZE: tl.constexpr,
    OWN: tl.constexpr,  # experts of a rank
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Fill in a routing tensor but for shifts, places and indices. A program takes the experts of one rank."""
    await_earlier_kernels()
    E: tl.constexpr = GROUP_SIZE * OWN
    owner = tl.program_id(0)
    nth = tl.arange(0, EXPERTS)
    mask = nth < OWN
    experts = packed_ptr + owner * OWN + nth
    counts = experts + ROWS.counts * E
    totals = tl.zeros((EXPERTS,), tl.int64)
    for src_rank in range(GROUP_SIZE):
        totals += tl.load(counts + src_rank * E, mask, other=0)
    units = tl.cdiv(totals, ALIGNMENT)
    kept = tl.minimum(totals, _fitting(units, capacity // ALIGNMENT) * ALIGNMENT)
    ends = tl.cumsum(tl.cdiv(kept, ALIGNMENT) * ALIGNMENT, axis=0)
    first = ends - tl.cdiv(kept, ALIGNMENT) * ALIGNMENT
    before = tl.zeros((EXPERTS,), tl.int64)
    for src_rank in range(GROUP_SIZE):
        count = tl.load(counts + src_rank * E, mask, other=0)
        if src_rank == rank:
            tl.store(begins_ptr + owner * OWN + nth, first + before, mask)
        of_rank = tl.minimum(tl.maximum(kept - before, 0), count)
        tl.store(counts + (GROUP_SIZE + src_rank) * E, of_rank, mask)
        before += count
    tl.store(counts + 2 * GROUP_SIZE * E, first, mask)
    tl.store(counts + (2 * GROUP_SIZE + 1) * E, first + kept, mask)
    tl.store(experts + ROWS.totals * E, totals, mask)
    dropped = tl.max((totals != kept).to(tl.int64), axis=0)
    tl.store(experts + ROWS.overflow * E, tl.where(nth == 0, dropped, 0), mask)
    tl.store(experts + ROWS.sizes * E, tl.zeros((EXPERTS,), tl.int64) + num_choices, mask)
    tl.store(experts + (ROWS.sizes + 1) * E, tl.zeros((EXPERTS,), tl.int64) + k, mask)
    tl.store(experts + (ROWS.sizes + 2) * E, tl.zeros((EXPERTS,), tl.int64) + capacity, mask)
    if owner == rank:
        tl.store(packed_ptr + ROWS.ends * E + nth, ends, mask)
        tl.store(offsets_ptr + nth, ends.to(tl.int32), mask)


@triton.jit
def shift_kernel(
    packed_ptr,  # as plan_kernel has left it
    GROUP_SIZE: tl.constexpr,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Fill in what leads a rank's rows back to it, a program for each rank: shifts, and their sum."""
    await_earlier_kernels()
    E: tl.constexpr = GROUP_SIZE * OWN
    src_rank = tl.program_id(0)
    nth, ranks = tl.arange(0, EXPERTS), tl.arange(0, triton.next_power_of_2(GROUP_SIZE))
    mask = nth < OWN
    index = tl.cast(0, tl.int64)
    for owner in range(GROUP_SIZE):
        first = packed_ptr + (ROWS.counts + 2 * GROUP_SIZE) * E + owner * OWN + nth
        kept = packed_ptr + (ROWS.counts + GROUP_SIZE) * E + owner * OWN + nth
        earlier = (ranks < src_rank)[:, None] & mask[None, :]
        before = tl.sum(tl.load(kept[None, :] + ranks[:, None] * E, earlier, other=0), axis=0)
        own = tl.load(kept + src_rank * E, mask, other=0)
        shift = index + tl.cumsum(own, axis=0) - own - before - tl.load(first, mask, other=0)
        tl.store(first + (2 + src_rank) * E, shift, mask)
        index += tl.sum(own, axis=0)
    tl.store(packed_ptr + ROWS.returned * E + src_rank, index)


@triton.jit(do_not_specialize=["capacity", "rank"])
def return_kernel(
    returns_ptr,  # [capacity]
    packed_ptr,  # a routing tensor
    capacity,
    rank,
    GROUP_SIZE: tl.constexpr,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """returns[row] = the rank whose choice it is << 32 | its index there, or -1 where there is none.

    Where indices exceed the capacity on any rank, it is this rank << 32 | row.
    """
    await_earlier_kernels()
    E: tl.constexpr = GROUP_SIZE * OWN
    rows = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    nth, ranks = tl.arange(0, EXPERTS), tl.arange(0, triton.next_power_of_2(GROUP_SIZE))
    sums = tl.load(packed_ptr + ROWS.returned * E + ranks, ranks < GROUP_SIZE, other=0)
    kept = packed_ptr + (ROWS.counts + GROUP_SIZE) * E + rank * OWN
    first = kept + GROUP_SIZE * E
    begins = tl.load(first + nth, nth < OWN, other=0)
    ends = tl.load(first + E + nth, nth < OWN, other=0)
    owned = (rows[:, None] >= begins[None, :]) & (rows[:, None] < ends[None, :])
    expert = tl.max(tl.where(owned, nth[None, :], -1), axis=1)
    there = expert >= 0
    begin = tl.load(first + expert, there, other=0)
    found = tl.full((BLOCK,), -1, tl.int64)
    for src_rank in range(GROUP_SIZE):
        end = begin + tl.load(kept + src_rank * E + expert, there, other=0)
        index = rows + tl.load(first + (2 + src_rank) * E + expert, there, other=0)
        here = there & (rows >= begin) & (rows < end) & (index >= 0) & (index < capacity)
        found = tl.where(here, (tl.cast(src_rank, tl.int64) << 32) + index, found)
        begin = end
    own = tl.where(there, (tl.cast(rank, tl.int64) << 32) + rows, -1)
    tl.store(returns_ptr + rows, tl.where(tl.max(sums, axis=0) <= capacity, found, own), rows < capacity)


@triton.jit(do_not_specialize=["num_choices", "num_experts", "capacity"])
def place_kernel(
    places_ptr,  # [T * k]
    indices_ptr,  # [T * k]
    ids_ptr,  # [T * k]
    blocks_ptr,  # [blocks, E], by scan_kernel
    begins_ptr,  # [E]
    kept_ptr,  # [E], this rank's, as
    shifts_ptr,
    num_choices,
    num_experts,
    capacity,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """places[i] = rank of the expert of choice i * capacity + its row there, or -1 where it has none; indices[i] = the
    number of the row among those of this rank.
    """
    await_earlier_kernels()
    i, chosen = _experts(ids_ptr, num_choices, num_experts, BLOCK)
    nth = tl.arange(0, BLOCK)
    same = (chosen[:, None] == chosen[None, :]) & (nth[:, None] > nth[None, :])
    mask = chosen >= 0
    before = tl.load(blocks_ptr + tl.cast(tl.program_id(0), tl.int64) * num_experts + chosen, mask, other=0)
    index = before + tl.sum(same.to(tl.int32), axis=1)
    kept = tl.load(kept_ptr + chosen, mask, other=0)
    row = tl.load(begins_ptr + chosen, mask, other=0) + index
    place = (chosen // OWN).to(tl.int64) * capacity + row
    tl.store(places_ptr + i, tl.where(mask & (index < kept), place, -1), i < num_choices)
    tl.store(indices_ptr + i, row + tl.load(shifts_ptr + chosen, mask, other=0), i < num_choices)
