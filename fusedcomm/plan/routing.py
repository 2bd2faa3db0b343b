"""Mixture of experts: the row of each token slot on the rank of its expert, from the counts of all ranks.

Experts lie in equal blocks over R ranks. A slot is one of a token's k choices; slots are numbered token * k + choice.
An expert's rows lie one behind the other, by rank and slot. Nothing here asks the device for a number, or brings it
one from the host's memory, but `Routing.host_counts`: the host's copies need it. Kernels take
its parts where they are; their `Schedule` has sizes alone, which do not change with the counts.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.kernels.triton.bundles import RoutingRows

ROWS = RoutingRows(*range(4), returned=6, counts=7)

LEAST_CUT = 32 << 20  # bytes of rows that take longer than a round more, tens of us (predicted)
_MOST_COLUMNS = 1 << 14  # the matmul of more loses more by its SMs than there is to hide (predicted)


class Run(NamedTuple):
    """Rows of one source for one expert."""

    row: int  # the first, on the expert's rank
    start: int  # of the source's slots, in the order of their places
    num: int


class Piece(NamedTuple):
    """Some of each rank's experts, and the rows to and from each rank for them."""

    experts: slice
    sent: list[int]
    received: list[int]


class Routing:
    """Views of a routing tensor, int64 [9 + 3R + 2 * ceil(num_slots / E), E].

    Attributes:
        overflow: bool [], whether any rank's rows are dropped.
        ends: int32 [E / R], `ends_of`.
        counts: [R, E], rows that each rank has for each expert.
        kept: [R, E], those that have a place.
        returned: [R], the sum of each rank's.
        first: [E], the row where each expert begins on its rank.
        filled: [E], where its rows end; behind them is room to align.
        shifts: [R, E], from a rank's row of an expert to its index, its number among the rank's rows in that order.
        places: [num_slots], expert's rank * capacity + row, or -1.
        indices: [num_slots], the index of each row that has a place.
        order: [num_slots], the slots in the order of their places.
    """

    def __init__(self, packed: Tensor, rank: int, group_size: int, num_slots: int) -> None:
        self.rank, self.group_size, self.num_experts = rank, group_size, packed.shape[1]
        self.packed = packed
        self.counts, self.kept = packed[ROWS.counts : ROWS.counts + 2 * group_size].view(2, group_size, -1)
        self.first, self.filled = packed[ROWS.counts + 2 * group_size :][:2]
        self.returned = packed[ROWS.returned, :group_size]
        self.shifts = packed[ROWS.counts + 2 * group_size + 2 :][:group_size]
        self.places, self.indices = packed[ROWS.counts + 3 * group_size + 2 :].view(2, -1)[:, :num_slots]

    @cached_property
    def order(self) -> Tensor:
        return self.places.argsort()

    @property
    def overflow(self) -> Tensor:
        return overflow(self.packed)

    @property
    def ends(self) -> Tensor:
        return ends_of(self.packed, self.group_size)

    def experts(self, rank: int) -> slice:
        return slice(rank * self.num_experts // self.group_size, (rank + 1) * self.num_experts // self.group_size)

    @cached_property
    def host_counts(self) -> list[list[int]]:
        """`kept`, and `first` as the last row. On a GPU the host waits for them."""
        found: list[list[int]] = torch.cat([self.kept, self.first[None]]).tolist()
        return found

    def runs(self, src: int, dst: int) -> list[Run]:
        """The rows of rank src that experts of rank dst have, by expert."""
        *kept, first = self.host_counts
        own, found = self.experts(dst), []
        start = sum(kept[src][: own.start])
        for expert in range(own.start, own.stop):
            if num := kept[src][expert]:
                found.append(Run(first[expert] + sum(each[expert] for each in kept[:src]), start, num))
            start += num
        return found

    def pieces(self, num: int) -> list[Piece]:
        """All, as at most ``num`` pieces; whether or not there is a matmul: peers may have one."""
        *kept, _ = self.host_counts
        own, here, found = self.num_experts // self.group_size, kept[self.rank], []
        first = self.rank * own
        for begin, end in cut(own, min(own, num)):
            sent = [sum(here[e + begin : e + end]) for e in range(0, self.num_experts, own)]
            received = [sum(each[first + begin : first + end]) for each in kept]
            found.append(Piece(slice(begin, end), sent, received))
        return found

    def slots_of(self, pieces: list[Piece]) -> list[Tensor]:
        """This rank's slots of each of all pieces, by rank and expert."""
        sizes = [num for of_rank in zip(*(piece.sent for piece in pieces), strict=True) for num in of_rank]
        parts = self.order[len(self.order) - sum(sizes) :].split(sizes)
        return [torch.cat(parts[i :: len(pieces)]) for i in range(len(pieces))]

    def rows_of(self, pieces: list[Piece]) -> Iterator[Tensor]:
        """This rank's rows of each piece, by source and expert."""
        own = self.experts(self.rank)
        kept = self.kept[:, own]
        ends = self.first[own] + kept.cumsum(0)
        for piece in pieces:
            nums, total = kept[:, piece.experts].flatten(), sum(piece.received)
            shifts = ends[:, piece.experts].flatten() - nums.cumsum(0)  # from the number of a row to the row
            rows = shifts.repeat_interleave(nums, output_size=total)
            yield rows.add_(torch.arange(total, device=rows.device))

    def first_row(self, nth: int) -> int:
        """The row where this rank's nth expert begins, on the host."""
        return self.host_counts[-1][self.experts(self.rank).start + nth]

    def slots(self, run: Run | None = None) -> Tensor:
        """This rank's slots of a run, or those without a place."""
        missing = self.order.numel() - sum(self.host_counts[self.rank])
        return self.order[:missing] if run is None else self.order[missing + run.start :][: run.num]

    def gaps(self, capacity: int) -> list[tuple[int, int]]:
        """The (begin, end) of rows of this rank that no slot has."""
        *kept, first = self.host_counts
        own = self.experts(self.rank)
        begins = [first[e] + sum(each[e] for each in kept) for e in range(own.start, own.stop)]
        return list(zip(begins, [*first[own.start + 1 : own.stop], capacity], strict=True))


def bytes_of_rows(capacity: int, n: int, itemsize: int) -> int:
    """Rows [capacity, N], and the row sent and the score of each, by 4 bytes."""
    return -(-capacity * n * itemsize // 4) * 4 + 8 * capacity


def num_pieces(experts: int, row_bytes: int, columns: int) -> int:
    """Of a rank's experts: 2 where half of the rows travel while others become [capacity, columns]."""
    return 2 if experts > 1 and row_bytes >= LEAST_CUT and columns <= _MOST_COLUMNS else 1


def cut(experts: int, num: int) -> list[tuple[int, int]]:
    """(begin, end) of each piece."""
    return [(i * experts // num, (i + 1) * experts // num) for i in range(num)]


def packed_shape(num_slots: Any, num_experts: int, group_size: int) -> tuple[Any, int]:
    """``num_slots`` may be symbolic."""
    return ROWS.counts + 3 * group_size + 2 + 2 * ((num_slots + num_experts - 1) // num_experts), num_experts


def overflow(packed: Tensor) -> Tensor:
    return (packed[ROWS.overflow] != 0).any()


def ends_of(packed: Tensor, group_size: int) -> Tensor:
    """int32 [E / R], the ends of this rank's experts: each is where the next one begins.

    It reads no rank: torch keeps traced gradients for all ranks whose forward graphs are equal.
    """
    return packed[ROWS.ends, : packed.shape[1] // group_size].to(torch.int32)


def totals(packed: Tensor) -> Tensor:
    """int64 [E], the rows of all ranks for each expert, dropped ones too."""
    return packed[ROWS.totals].clone()


def counts_of(expert_ids: Tensor, num_experts: int) -> Tensor:
    """int64 [E] of int64 expert_ids [num_slots]."""
    counts = expert_ids.new_zeros(num_experts + 1)
    return counts.scatter_add_(0, expert_ids + 1, torch.ones_like(expert_ids))[1:]


def sizes_of(packed: Tensor) -> list[int]:
    """[num_slots, k, capacity] of the dispatch. On a GPU the host waits for them."""
    found: list[int] = packed[ROWS.sizes : ROWS.returned, 0].tolist()
    return found


def pack(expert_ids: Tensor, k: int, counts: Tensor, rank: int, capacity: int, alignment: int) -> Tensor:
    """A routing tensor of this rank's expert_ids, int64 [num_slots], from the counts of all ranks, [R, E]."""
    (group_size, num_experts), num_slots = counts.shape, expert_ids.numel()
    rows = _kept_rows(counts.sum(0).view(group_size, -1), capacity, alignment)
    ends = _aligned(rows, alignment).cumsum(1)
    first = (ends - _aligned(rows, alignment)).flatten()
    before = counts.cumsum(0) - counts
    kept = (rows.flatten() - before).clamp(min=0).minimum(counts)

    order = expert_ids.argsort(stable=True)
    by_expert = expert_ids[order]
    own = counts[rank]
    begins = own.cumsum(0) - own + (num_slots - own.sum())
    clamped = by_expert.clamp(min=0)
    index = torch.arange(num_slots, device=counts.device) - begins[clamped]  # among the rank's rows of the expert
    row = first[clamped] + before[rank][clamped] + index
    place = clamped // (num_experts // group_size) * capacity + row
    has_place = (by_expert >= 0) & (index < kept[rank][clamped])
    shifts = kept.cumsum(1) - kept - first - (kept.cumsum(0) - kept)
    of_choices = torch.stack([place.masked_fill(~has_place, -1), row + shifts[rank][clamped]])

    packed = counts.new_zeros(packed_shape(num_slots, num_experts, group_size))
    packed[ROWS.overflow] = (counts != kept).any()
    for i, size in enumerate((num_slots, k, capacity)):
        packed[ROWS.sizes + i].fill_(size)
    packed[ROWS.ends, : num_experts // group_size] = ends[rank]
    packed[ROWS.totals] = counts.sum(0)
    filled = first + rows.flatten()
    packed[ROWS.returned, :group_size] = kept.sum(1)
    rows_of_all = torch.cat([counts, kept, first[None], filled[None], shifts])
    packed[ROWS.counts : ROWS.counts + len(rows_of_all)] = rows_of_all
    packed[ROWS.counts + len(rows_of_all) :].view(2, -1)[:, order] = of_choices
    return packed


def _kept_rows(totals: Tensor, capacity: int, alignment: int) -> Tensor:
    """The rows that each expert keeps, of ``totals`` [R, E / R]: all, or as many as the level of its rank.

    The fullest experts of a rank are cut to one level, in units of ``alignment`` rows; units that are left over go to
    the first of them.
    """
    room, units = capacity // alignment, _aligned(totals, alignment) // alignment
    ranked = units.sort(1).values
    below = ranked.cumsum(1) - ranked
    higher = torch.arange(ranked.shape[1], 0, -1, device=units.device)  # experts with at least as many
    full = below + ranked * higher > room
    level = (room - below).div(higher, rounding_mode="floor").masked_fill(~full, -1).amax(1, keepdim=True)
    level = level.masked_fill(~full.any(1, keepdim=True), room)
    fits, is_cut = units.minimum(level), units > level
    spare = room - fits.sum(1, keepdim=True)
    fits += is_cut & (is_cut.cumsum(1) <= spare)
    return totals.minimum(fits * alignment)


def _aligned(rows: Tensor, alignment: int) -> Tensor:
    return (rows + alignment - 1).div(alignment, rounding_mode="floor") * alignment
