"""Seconds of `pipelined`, and into how many pieces it cuts a call.

p pieces are two rows of p steps, one behind the other: matmuls and copies of a piece, c, and the piece on the wire, w.
A push begins with c, a gather with w. Few rows are multiplied at once, with nothing beside.

    steps   c + w + (p - 1) max(c, w); a GPU's matmuls, m, take min(m, w) longer beside the wire: grids of cuBLAS on
            Hopper are persistent, so the share of SMs that NCCL holds comes last (pytorch/pytorch issue 143988)
    host    p (overhead of a piece + R overheads of a chunk)
    time    steps + host on a CPU, whose sockets copy what is sent and received too; max(steps, host) + host / p on a
            GPU, whose host runs ahead
"""

import functools

from fusedcomm.plan.cost.links import sent_bytes
from fusedcomm.plan.cost.model import ITEMSIZE, Constants, TimedCall
from fusedcomm.plan.geometry.exchange import Exchange

NUM_PIECES = (2, 4, 8, 16, 32)  # that are compared
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
    call = TimedCall(op, exchange, dtype, constants)
    chunk_bytes, num_ranks = call.chunk_bytes / num_pieces, call.num_ranks
    kinds = (_WITH_SUMS if backend_sums else _COLLECTIVES).get(call.kind, (call.kind,))
    wire = sum(constants.collective(kind, chunk_bytes, num_ranks) for kind in kinds)
    matmuls = _matmuls(call, num_pieces)
    compute = matmuls + _placing(call, chunk_bytes, backend_sums)
    if constants.on_cpu:
        compute += constants.copy(2 * sent_bytes(call.kind, chunk_bytes, num_ranks))
    beside = 0.0 if constants.on_cpu else min(matmuls, wire)
    steps = compute + wire + (num_pieces - 1) * max(compute + beside, wire)
    host = num_pieces * (constants.piece_overhead + num_ranks * constants.chunk_overhead)
    alone = call.matmul() if call.at_once else 0.0
    return alone + (steps + host if constants.on_cpu else max(steps, host) + host / num_pieces)


def _matmuls(call: TimedCall, num_pieces: int) -> float:
    """The matmuls of one piece: R of a chunk each, or one where K is gathered."""
    if call.at_once:
        return 0.0
    if call.exchange.gathers and call.exchange.splits_columns:
        return call.matmul(num_pieces)
    return call.num_ranks * call.chunk_matmul(pieces=num_pieces)


def _placing(call: TimedCall, num_bytes: float, backend_sums: bool) -> float:
    """The bytes packed, unpacked and added for one piece, of which ``num_bytes`` go to a peer."""
    unpack, kind, at_once = call.constants.unpack, call.kind, call.at_once
    peers, everyone = (call.num_ranks - 1) * num_bytes, call.num_ranks * num_bytes
    if call.exchange.gathers:
        packed = unpack(peers) if kind == "all_to_all" else 0.0
        return packed + (unpack(everyone) if call.exchange.splits_columns or at_once else 0.0)
    placed = (unpack(everyone) if at_once else 0.0) + (unpack(peers) if kind != "reduce_scatter" else 0.0)
    if kind == "all_to_all":
        return placed
    if backend_sums:
        return placed + unpack(num_bytes)
    if call.constants.on_cpu:  # its caches hold the sum
        return placed + call.constants.reduce(num_bytes, call.num_ranks)
    itemsize = ITEMSIZE[call.dtype]  # a GPU reads and writes the sum once for every rank, in float32
    moved = 2 * (4 + itemsize) + (call.num_ranks - 1) * (8 + itemsize)  # bytes for each element
    return placed + unpack(num_bytes * moved / 2 / itemsize) + call.num_ranks * call.constants.copy_overhead
