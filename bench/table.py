"""Rows of `fusedcomm bench` as a table, a summary and JSON. The columns are explained in docs/benchmark.md."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fusedcomm.bench.measure import OpRow
from fusedcomm.launch.console import Column, Table

OTHERS = "--json has them"
LOCAL_MATMUL = "the local matmul is [rows, K] @ [K, N]; with batches, rows is batches x rows of each"
PASS = "forward, backward alone, or both; a backward has two matmuls"
ALGORITHM = "asked for; behind the colon the one that ran, if that differs"
NCCL_TESTS = "as nccl-tests has it"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1e-2 else f"{seconds * 1e3:.1f}"


def num_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


OP_COLUMNS = (
    Column("rows", LOCAL_MATMUL, lambda r: f"{r.batch} x {r.rows // r.batch}" if r.batch else str(r.rows)),
    Column("K", LOCAL_MATMUL, lambda r: str(r.k)),
    Column("N", LOCAL_MATMUL, lambda r: str(r.n)),
    Column("dtype", "the dtype of all tensors", lambda r: r.dtype, left=True),
    Column("pass", PASS, lambda r: r.direction, left=True),
    Column("exchanged", f"bytes that the collective moves, {NCCL_TESTS}", lambda r: num_bytes(r.num_bytes), drop=5),
    Column(
        "algorithm",
        ALGORITHM,
        lambda r: r.algorithm if r.algorithm == r.planned else f"{r.algorithm}: {r.planned}",
        left=True,
    ),
    Column("matmul\nalone ms", "the roof: no exchange at all", lambda r: _ms(r.roof.median), drop=2),
    Column("collective\nalone ms", "with the copies that it needs", lambda r: _ms(r.collective.median), drop=6),
    Column("baseline\nms", "today's program: matmul and collective, unfused", lambda r: _ms(r.baseline.median), drop=1),
    Column("fusedcomm\nms", "the op, all of it", lambda r: _ms(r.ours.median)),
    Column(
        "spread\n%",
        "standard deviation of fusedcomm ms over rounds, of its mean",
        lambda r: f"{100 * r.ours.variation:.0f}",
        drop=4,
    ),
    Column("speed-up", "baseline ms / fusedcomm ms", lambda r: f"{r.ratio:.2f}"),
    Column(
        "above\nmatmul %",
        "how much longer fusedcomm ms is than matmul alone ms",
        lambda r: f"{r.percent_over_roof:.0f}",
        drop=3,
    ),
    Column("exposed\nms", "fusedcomm ms - matmul alone ms: communication not hidden", lambda r: _ms(r.exposed), drop=7),
    Column(
        "overlap\nshare",
        "(matmul + collective - fusedcomm) / the smaller of the first two: 1: it is hidden, 0: nothing is",
        lambda r: "-" if r.overlap_efficiency is None else f"{r.overlap_efficiency:.2f}",
        drop=8,
    ),
    Column("TFLOP/s", "flops of all matmuls / fusedcomm ms", lambda r: f"{r.tflops:.3g}", drop=9),
    Column("algbw\nGB/s", "exchanged / fusedcomm ms", lambda r: f"{r.algbw:.3g}", drop=10),
    Column("busbw\nGB/s", f"what crosses a link, {NCCL_TESTS}", lambda r: f"{r.busbw:.3g}", drop=11),
)


def table(rows: Sequence[OpRow], title: str) -> Table:
    """The rows of one op. A `Legend` explains all tables of a run at once."""
    return Table(OP_COLUMNS, rows, title, OTHERS, has_legend=False)


SUMMARY_COLUMNS = (
    Column("op", "over all its sizes and dtypes", lambda line: line["op"], left=True),
    Column("pass", PASS, lambda line: line["direction"], left=True),
    Column("algorithm", ALGORITHM, lambda line: line["algorithm"], left=True),
    Column("cases", "how many rows of the tables above", lambda line: str(line["num_rows"]), drop=1),
    Column("mean\nspeed-up", "geometric mean of speed-up", lambda line: f"{line['speedup_mean']:.2f}"),
    Column("lowest\nspeed-up", "the smallest speed-up", lambda line: f"{line['speedup_minimum']:.2f}"),
    Column(
        "time /\nmatmul",
        "median of fusedcomm ms / matmul alone ms; 1 is the best there is",
        lambda line: f"{line['over_roof_median']:.2f}",
    ),
    Column(
        "possible\nspeed-up",
        "geometric mean of baseline ms / matmul alone ms: what an exchange that costs nothing would give",
        lambda line: f"{line['free_exchange']:.2f}",
    ),
)


def summary(rows: Sequence[OpRow]) -> list[dict[str, Any]]:
    """A line for every op, direction and algorithm, over sizes and dtypes."""
    groups: dict[tuple[str, str, str], list[OpRow]] = {}
    for row in rows:
        groups.setdefault((row.op, row.direction, row.algorithm), []).append(row)
    return [
        {
            "op": op,
            "direction": direction,
            "algorithm": algorithm,
            "num_rows": len(each),
            "speedup_mean": statistics.geometric_mean([row.ratio for row in each]),
            "speedup_minimum": min(row.ratio for row in each),
            "over_roof_median": statistics.median(row.ours.median / row.roof.median for row in each),
            "free_exchange": statistics.geometric_mean([row.baseline.median / row.roof.median for row in each]),
        }
        for (op, direction, algorithm), each in groups.items()
    ]


def report(row: Any) -> dict[str, Any]:
    """Every field and every derived figure of a row."""
    derived = {name: getattr(row, name) for name in vars(type(row)) if isinstance(vars(type(row))[name], property)}
    return asdict(row) | derived
