"""all_gather_matmul against all_gather_into_tensor, matmul; and the matmul alone. Options: benchmarks/op_sweep.py.

y = gathered @ w        x [rows / R, K] on every rank, gathered [rows, K], w [K, N]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import op_sweep
from fusedcomm.bench.op_programs import PROGRAMS

BENCH = PROGRAMS["all_gather_matmul"]


def main(argv: Sequence[str] | None = None) -> int:
    return op_sweep.main(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
