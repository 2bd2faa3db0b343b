"""all_to_all_matmul against all_to_all_single, unpack, matmul; and the matmul alone. Options: benchmarks/op_sweep.py.

y = exchanged @ w       x [R * rows, K / R] on every rank, exchanged [rows, K], w [K, N]
rows of x are scattered, columns gathered: the way back from attention in Ulysses
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import op_sweep
from fusedcomm.bench.op_programs import PROGRAMS

BENCH = PROGRAMS["all_to_all_matmul"]


def main(argv: Sequence[str] | None = None) -> int:
    return op_sweep.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
