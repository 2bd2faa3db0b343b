"""matmul_reduce_scatter against matmul, reduce_scatter_tensor; and the matmul alone. Options: benchmarks/op_sweep.py.

y = sum of every rank's x @ w       x [rows, K], w [K, N] on every rank, y [rows / R, N]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import op_sweep
from fusedcomm.bench.op_programs import PROGRAMS

BENCH = PROGRAMS["matmul_reduce_scatter"]


def main(argv: Sequence[str] | None = None) -> int:
    return op_sweep.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
