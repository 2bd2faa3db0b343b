"""The picture of what a fused op does: a schedule that is drawn, not measured, by the plots of `fusedcomm bench`.

    python -m fusedcomm.bench.picture [FILE]      docs/pictures/fused-over-time.png

matmul_all_to_all as `chunked` runs it on GPUs, below the unfused program. Times are in units of the local matmul.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fusedcomm.bench import plots
from fusedcomm.bench.trace import TraceRange

FILE = Path(__file__).parents[1] / "docs" / "pictures" / "fused-over-time.png"
UNFUSED, FUSED = "unfused: matmul, copy, all_to_all, copy", "fusedcomm: each chunk leaves while the next is computed"
NUM_RANKS = 3
CHUNK = 1 / NUM_RANKS  # the share of the matmul that one chunk takes
COPY = 0.09  # time to put each rank's part together, or what has arrived into its place
TRANSFER = 0.24  # time to send one chunk


def unfused(rank: int) -> Iterator[TraceRange]:
    now = 0.0
    transfers = (NUM_RANKS - 1) * TRANSFER
    for lane, duration in (("matmul", 1.0), ("copy", COPY), ("collective", transfers), ("copy", COPY)):
        yield TraceRange(UNFUSED, rank, lane, now, now + duration)
        now += duration


def fused(rank: int) -> Iterator[TraceRange]:
    """A rank's ranges: the next rank's chunk comes first, the own one last; a link carries one chunk at a time."""
    peers = [(rank + step) % NUM_RANKS for step in range(1, NUM_RANKS)]
    sent = 0.0
    arrivals = []
    for i, peer in enumerate(peers):
        computed = (i + 1) * CHUNK
        yield TraceRange(FUSED, rank, "matmul", i * CHUNK, computed, peer)
        start = max(computed, sent)
        sent = start + TRANSFER
        yield TraceRange(FUSED, rank, "push", start, sent, peer)
        arrivals.append((sent, (rank - i - 1) % NUM_RANKS))  # all ranks do the same, so a chunk comes as one leaves
    yield TraceRange(FUSED, rank, "matmul", 1.0 - CHUNK, 1.0, rank)
    now = 1.0
    for arrived, src_rank in arrivals:
        yield TraceRange(FUSED, rank, "wait", now, max(now, arrived), src_rank)
        now = max(now, arrived)
        yield TraceRange(FUSED, rank, "copy", now, now + CHUNK * COPY, src_rank)
        now += CHUNK * COPY


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fusedcomm.bench.picture", description="Draws a schedule; nothing is run.")
    parser.add_argument("file", nargs="?", type=Path, default=FILE, help="the PNG")
    args = parser.parse_args(argv)
    ranges = [each for run in (unfused, fused) for rank in range(NUM_RANKS) for each in run(rank)]
    title = f"matmul_all_to_all on {NUM_RANKS} ranks: a schedule, drawn, not measured"
    plots.write(args.file, plots.lanes_over_time(ranges, title, "times the local matmul"))
    print(args.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
