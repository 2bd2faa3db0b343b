"""matmul_all_reduce against matmul, all_reduce in place; and against the matmul alone. Options: benchmarks/op_sweep.py.

y = sum of every rank's x @ w       x [rows, K], w [K, N] on every rank, y [rows, N]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import op_sweep
from fusedcomm.bench.op_programs import PROGRAMS

BENCH = PROGRAMS["matmul_all_reduce"]


def main(argv: Sequence[str] | None = None) -> int:
    return op_sweep.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
