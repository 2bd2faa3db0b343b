"""Injects faults into ranks on this machine's CPUs, and prints the cells that fail.

python -m tests.faults '*/kill/*' --json faults.json
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fusedcomm.launch.provenance import run_facts
from tests.faults.cells import select
from tests.faults.judge import Verdict
from tests.faults.matrix import WORKERS, run_cells


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.faults", description=__doc__)
    about = "cells whose name, or successive parts of it, match a pattern of the shell (default: all cells)"
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help=about)
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"cells at a time (default: {WORKERS})")
    parser.add_argument("--list", action="store_true", help="print the names of the cells, and run none")
    parser.add_argument("--json", type=Path, help="write every verdict to this file")
    args = parser.parse_args(argv)
    if not (cells := select(args.patterns)):
        parser.error(f"PATTERN must match a cell (--list prints their names), got {' '.join(args.patterns)}")
    if args.list:
        print(*cells, sep="\n")
        return 0
    start = time.monotonic()
    verdicts = run_cells(cells, workers=args.workers, on_verdict=_report)
    print(total := summary(verdicts), f"{time.monotonic() - start:.0f} s", sep="; ")
    if args.json:
        found = {"total": total, "cells": [asdict(verdict) for verdict in verdicts]}
        args.json.write_text(json.dumps(run_facts() | found, indent=2) + "\n")
    return int(not all(verdict.survived for verdict in verdicts))


def _report(verdict: Verdict) -> None:
    for text in verdict.found:
        print(f"FAILED {verdict.cell}: {text}", flush=True)


def summary(verdicts: Sequence[Verdict]) -> str:
    survived, hangs = sum(each.survived for each in verdicts), sum(each.hung for each in verdicts)
    wrong = sum(each.wrong_numbers for each in verdicts)
    worst = max((each.worst for each in verdicts if each.worst is not None), default=0.0)
    return (
        f"{survived} of {len(verdicts)} cells survived, {wrong} wrong numbers, {hangs} hangs, "
        f"worst time to an error {worst:.2f} time-outs"
    )


if __name__ == "__main__":
    sys.exit(main())
