"""matmul_all_to_all against matmul, pack, all_to_all_single; and the matmul alone. Options: benchmarks/op_sweep.py.

y = x @ w               x [rows, K], w [K, N] on every rank
columns of y are scattered, rows gathered
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import op_sweep
from fusedcomm.bench.op_programs import PROGRAMS

BENCH = PROGRAMS["matmul_all_to_all"]


def main(argv: Sequence[str] | None = None) -> int:
    return op_sweep.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
