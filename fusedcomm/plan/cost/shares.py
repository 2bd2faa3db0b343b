"""What each rank of a call computes and moves: the sizes that the cost model's formulas take.

Where parts differ in size so do the shares of the ranks. Each rank knows those of all, so that all find the slowest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fusedcomm.plan.geometry.cut import Cut
from fusedcomm.plan.geometry.exchange import FEW_ROWS, Exchange


class Share(NamedTuple):
    """One rank's. Elements are those of the tensor next to the collective."""

    num_batches: int
    num_rows: int
    k: int
    ns: tuple[int, ...]  # N of each w
    chunk_numel: float  # elements to or from a peer, whichever are more; the mean over peers
    num_products: int  # matmuls of `chunked`: what several ranks get is multiplied once
    num_copies: int  # ranks that get a copy of such a product
    part: float  # what of the split dim one of them takes, on average
    at_once: bool  # whether one matmul makes all chunks


class Traffic(NamedTuple):
    """Elements that a rank sends and receives, with its own chunk, for each element of the dims that are not cut."""

    sent: int
    received: int
    own: int

    def to_a_peer(self, group_size: int) -> float:
        return (max(self.sent, self.received) - self.own) / (group_size - 1)


def traffic_of(cut: Cut) -> list[Traffic]:
    """By rank."""
    alone = (1,) * cut.group_size
    gathered, scattered = (alone if parts is None else parts.sizes for parts in (cut.gathered, cut.scattered))
    return [Traffic(g * sum(scattered), sum(gathered) * s, g * s) for g, s in zip(gathered, scattered, strict=True)]


def mean_to_a_peer(traffic: list[Traffic]) -> float:
    """Elements from one rank to another, the mean over all pairs."""
    return sum(each.sent - each.own for each in traffic) / len(traffic) / (len(traffic) - 1)


def shares_of(exchange: Exchange) -> list[Share]:
    """The different shares of the ranks, the same on all of them."""
    size = exchange.group_size
    if exchange.cut is None:
        sizes = exchange.num_batches, exchange.num_rows, exchange.k, _ns(exchange, exchange.shape)
        return [Share(*sizes, exchange.chunk_numel, size, 0, 1 / size, exchange.few_rows)]
    parts = exchange.cut.gathered if exchange.gathers else exchange.cut.scattered
    assert parts is not None  # it is the dim that is split
    receivers = parts.receivers
    num_products = max(len(receivers), 1)
    num_copies = sum(len(ranks) for ranks in receivers.values() if len(ranks) > 1)
    part = sum(size for _, size in receivers) / max(parts.total, 1) / num_products
    nb, nl, found = exchange.num_batch_dims, exchange.num_lead, []
    for rank, traffic in enumerate(traffic_of(exchange.cut)):
        shape = exchange.shape_on(rank)
        batches, rows, columns = math.prod(shape[:nb]), math.prod(shape[nb:nl]), math.prod(shape[nl:])
        few_rows = exchange.splits_rows and rows < FEW_ROWS * size
        at_once = few_rows or (not exchange.gathers and parts.overlaps)
        sizes = batches, rows, columns if exchange.gathers else exchange.k, _ns(exchange, shape)
        chunk_numel = exchange.outer_numel * traffic.to_a_peer(size)
        found.append(Share(*sizes, chunk_numel, num_products, num_copies, part, at_once))
    return list(dict.fromkeys(found))


def _ns(exchange: Exchange, shape: list[int]) -> tuple[int, ...]:
    return (
        tuple(out[-1] for out in exchange.out_shapes) if exchange.gathers else (math.prod(shape[exchange.num_lead :]),)
    )
