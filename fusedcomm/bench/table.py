"""Rows of `fusedcomm bench` as a table, a summary, CSV and JSON. The columns are explained in docs/benchmark.md."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from fusedcomm.bench.measure import OpRow
from fusedcomm.bench.plain import CollectiveRow
from fusedcomm.bench.timing import Timing

AnyRow = OpRow | CollectiveRow
Column = tuple[str, Callable[[Any], str]]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1e-2 else f"{seconds * 1e3:.1f}"


def num_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


OP_COLUMNS: Sequence[Column] = (
    ("rows", lambda r: f"{r.batch} x {r.rows // r.batch}" if r.batch else str(r.rows)),
    ("K", lambda r: str(r.k)),
    ("N", lambda r: str(r.n)),
    ("dtype", lambda r: r.dtype),
    ("pass", lambda r: r.direction),
    ("size", lambda r: num_bytes(r.num_bytes)),
    ("algorithm", lambda r: r.algorithm if r.algorithm == r.planned else f"{r.algorithm}: {r.planned}"),
    ("roof\nms", lambda r: _ms(r.roof.median)),
    ("collective\nms", lambda r: _ms(r.collective.median)),
    ("baseline\nms", lambda r: _ms(r.baseline.median)),
    ("ours\nms", lambda r: _ms(r.ours.median)),
    ("+-\n%", lambda r: f"{100 * r.ours.variation:.0f}"),
    ("baseline\n/ ours", lambda r: f"{r.ratio:.2f}"),
    ("over\nroof %", lambda r: f"{r.percent_over_roof:.0f}"),
    ("exposed\nms", lambda r: _ms(r.exposed)),
    ("overlap", lambda r: "-" if r.overlap_efficiency is None else f"{r.overlap_efficiency:.2f}"),
    ("TFLOP/s", lambda r: f"{r.tflops:.3g}"),
    ("algbw\nGB/s", lambda r: f"{r.algbw:.3g}"),
    ("busbw\nGB/s", lambda r: f"{r.busbw:.3g}"),
)
COLLECTIVE_COLUMNS: Sequence[Column] = (
    ("collective", lambda r: r.op),
    ("dtype", lambda r: r.dtype),
    ("size", lambda r: num_bytes(r.num_bytes)),
    ("copy\nms", lambda r: _ms(r.copy.median)),
    ("P10\nms", lambda r: _ms(r.time.p10)),
    ("P50\nms", lambda r: _ms(r.time.median)),
    ("P90\nms", lambda r: _ms(r.time.p90)),
    ("P99\nms", lambda r: _ms(r.time.p99)),
    ("+-\n%", lambda r: f"{100 * r.time.variation:.0f}"),
    ("over\ncopy", lambda r: f"{r.over_copy:.2f}"),
    ("algbw\nGB/s", lambda r: f"{r.algbw:.3g}"),
    ("busbw\nGB/s", lambda r: f"{r.busbw:.3g}"),
)
TEXT = ("dtype", "pass", "algorithm", "collective")


def table(rows: Sequence[AnyRow], title: str) -> Table:
    """The rows of one op, or of plain collectives."""
    columns = OP_COLUMNS if isinstance(rows[0], OpRow) else COLLECTIVE_COLUMNS
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, _ in columns:
        made.add_column(heading, justify="left" if heading in TEXT else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(text(row) for _, text in columns))
    return made


SUMMARY_COLUMNS = {
    "speedup_mean": "speed-up,\ngeometric mean",
    "speedup_minimum": "speed-up,\nminimum",
    "over_roof_median": "time / roof,\nmedian",
    "free_exchange": "a free exchange\nwould give",
}


def summary(rows: Sequence[AnyRow]) -> list[dict[str, Any]]:
    """A line for every op, direction and algorithm, over sizes and dtypes."""
    groups: dict[tuple[str, str, str], list[OpRow]] = {}
    for row in rows:
        if isinstance(row, OpRow):
            groups.setdefault((row.op, row.direction, row.algorithm), []).append(row)
    return [
        {
            "op": op,
            "direction": direction,
            "algorithm": algorithm,
            "num_rows": len(each),
            "speedup_mean": _geometric_mean([row.ratio for row in each]),
            "speedup_minimum": min(row.ratio for row in each),
            "over_roof_median": statistics.median(row.ours.median / row.roof.median for row in each),
            "free_exchange": _geometric_mean([row.baseline.median / row.roof.median for row in each]),
        }
        for (op, direction, algorithm), each in groups.items()
    ]


def summary_table(lines: Sequence[dict[str, Any]]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("op", "pass", "algorithm"):
        made.add_column(heading, no_wrap=True)
    for heading in ("rows", *SUMMARY_COLUMNS.values()):
        made.add_column(heading, justify="right")
    for line in lines:
        ratios = (f"{line[name]:.2f}" for name in SUMMARY_COLUMNS)
        made.add_row(line["op"], line["direction"], line["algorithm"], str(line["num_rows"]), *ratios)
    return made


def report(row: AnyRow) -> dict[str, Any]:
    """Every field and every derived figure of a row."""
    derived = {name: getattr(row, name) for name in vars(type(row)) if isinstance(vars(type(row))[name], property)}
    return asdict(row) | derived


def write_csv(file: str, rows: Sequence[AnyRow]) -> None:
    """A line per row; of a time the columns <name>_median, <name>_p10 and so on, in seconds."""
    lines = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for line in lines for name in line))
    with open(file, "w", newline="") as opened:
        writer = csv.DictWriter(opened, names)
        writer.writeheader()
        writer.writerows(lines)


def _flat(row: AnyRow) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for name, value in report(row).items():
        if isinstance(getattr(row, name), Timing):
            line |= {f"{name}_{which}": seconds for which, seconds in value.items()}
        else:
            line[name] = value
    return line


def _geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))
