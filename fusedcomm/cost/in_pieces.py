"""How long `pipelined` takes, and into how many pieces it cuts a call.

In p pieces there are two rows of p steps, one behind the other: what the device computes and copies for a piece, c, and
the piece on the wire, w. A push begins with c and a gather with w:

    steps   c + w + (p - 1) max(c, w)
    host    p (overhead of a piece + R overheads of a chunk)
    time    steps + host on a CPU, which does both; max(steps, host) + host / p on a GPU, whose host runs ahead

c has the matmuls of a piece, R of a chunk each, or one where K is gathered, and what is copied or added. Beside a
matmul on a GPU runs NCCL, which takes some of its SMs. On a CPU sockets copy what is sent and received. Few rows are
multiplied at once, with nothing beside. w has the latency of its collective, and parts as large as the largest.
"""

from __future__ import annotations

import functools

from fusedcomm.cost.links import sent_bytes
from fusedcomm.cost.model import ITEMSIZE, Constants, TimedCall
from fusedcomm.cost.shares import shares_of
from fusedcomm.geometry.exchange import Exchange

NUM_PIECES = (2, 4, 8, 16, 32)  # that are compared
_SLOWER_BESIDE_NCCL = 8 / 7  # a GPU's collectives take some 16 of its 132 SMs
_COLLECTIVES = {"reduce_scatter": ("all_to_all",), "all_reduce": ("all_to_all", "all_gather")}  # the ranks add up
_WITH_SUMS = {"all_reduce": ("reduce_scatter", "all_gather")}  # the backend does


@functools.lru_cache(maxsize=1024)
def fastest(
    op: str, exchange: Exchange, dtype: str, constants: Constants, backend_sums: bool = False
) -> tuple[int, float]:
    """Into how many pieces a call is cut, and its seconds. Sizes must be plain ints."""
    nums = sorted({len(exchange.for_all.pieces(num)) for num in NUM_PIECES})
    times = {num: seconds(op, exchange, dtype, constants, num, backend_sums) for num in nums}
    num_pieces = min(times, key=times.__getitem__)
    return num_pieces, times[num_pieces]


def seconds(
    op: str, exchange: Exchange, dtype: str, constants: Constants, num_pieces: int, backend_sums: bool = False
) -> float:
    """The seconds of a call in so many pieces. ``backend_sums``: whether the backend adds."""
    calls = [TimedCall(op, exchange, share, dtype, constants) for share in shares_of(exchange)]
    return max(_InPieces(call, num_pieces, backend_sums).seconds() for call in calls)


class _InPieces:
    """The formulas above for the share of one rank."""

    def __init__(self, call: TimedCall, num_pieces: int, backend_sums: bool) -> None:
        self.call, self.num_pieces, self.backend_sums = call, num_pieces, backend_sums
        self.constants, self.exchange, self.share = call.constants, call.exchange, call.share
        self.on_cpu, self.num_ranks = call.constants.device_type == "cpu", call.num_ranks
        self.padded_bytes = call.exchange.chunk_numel * ITEMSIZE[call.dtype] / num_pieces

    def seconds(self) -> float:
        compute, wire, num_pieces = self._matmuls() + self._placing(), self._wire(), self.num_pieces
        steps = compute + wire + (num_pieces - 1) * max(compute, wire)
        host = num_pieces * (self.constants.piece_overhead + self.num_ranks * self.constants.chunk_overhead)
        alone = self.call.matmul() if self.share.at_once else 0.0
        return alone + (steps + host if self.on_cpu else max(steps, host) + host / num_pieces)

    def _wire(self) -> float:
        kinds = (_WITH_SUMS if self.backend_sums else _COLLECTIVES).get(self.call.kind, (self.call.kind,))
        return sum(self.constants.collective(kind, self.padded_bytes, self.num_ranks) for kind in kinds)

    def _matmuls(self) -> float:
        if self.on_cpu:
            return self._matmuls_alone() + self.constants.copy(
                2 * sent_bytes(self.call.kind, self.padded_bytes, self.num_ranks)
            )
        return _SLOWER_BESIDE_NCCL * self._matmuls_alone()

    def _matmuls_alone(self) -> float:
        call, share, constants = self.call, self.share, self.constants
        if share.at_once:
            return 0.0
        if self.exchange.gathers and self.exchange.splits_columns:
            sizes = (share.num_batches, share.num_rows / self.num_pieces, share.k)
            return sum(constants.matmul(call.dtype, *sizes, n) for n in call.ns)
        batches, m, k, part = call.chunk()
        rows = m / self.num_pieces
        each = sum(constants.matmul(call.dtype, batches, rows, k, n * part) for n in call.ns)
        return share.num_products * each

    def _placing(self) -> float:
        """What is packed, unpacked and added."""
        unpack, num_ranks = self.constants.unpack, self.num_ranks
        num_bytes, kind = self.call.chunk_bytes / self.num_pieces, self.call.kind
        peers, everyone = (num_ranks - 1) * num_bytes, num_ranks * num_bytes
        if self.exchange.gathers:
            packed = unpack(peers) if kind == "all_to_all" else 0.0
            return packed + (unpack(everyone) if self.exchange.splits_columns or self.share.at_once else 0.0)
        packed = unpack(everyone) if self.share.at_once else 0.0
        placed = unpack(peers) if kind != "reduce_scatter" else 0.0
        return packed + placed + (self._adding(num_bytes) if kind != "all_to_all" else 0.0)

    def _adding(self, num_bytes: float) -> float:
        """A CPU's caches hold the sum; on a GPU it is read and written once for every rank, in float32."""
        if self.backend_sums:
            return self.constants.unpack(num_bytes)
        if self.on_cpu:
            return self.constants.unpack((self.num_ranks + 1) / 2 * num_bytes)
        itemsize = ITEMSIZE[self.call.dtype]
        moved = 2 * (4 + itemsize) + (self.num_ranks - 1) * (8 + itemsize)  # bytes for each element
        return self.constants.unpack(num_bytes * moved / 2 / itemsize) + self.num_ranks * self.constants.copy_overhead
