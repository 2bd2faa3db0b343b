"""PNGs of a bench: the ratio over sizes, the roofline, and what every rank did over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedcomm.bench.measure import OpRow
from fusedcomm.bench.trace import Range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120
COLOURS = {"matmul": "#4477aa", "copy": "#bbbbbb", "collective": "#cc6677", "push": "#ddaa33", "wait": "#aa4499"}
COMPUTES = ("matmul", "copy")  # lanes of compute; the others are of communication
MISSING = "plots need matplotlib: pip install matplotlib, or fusedcomm[bench]"


def missing() -> str | None:
    """Why nothing can be plotted, or None."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return MISSING
    return None


def not_writable(folder: Path) -> str | None:
    """Why ``folder`` cannot be made, or None once it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return None


def write_all(folder: Path, rows: Sequence[OpRow], lanes: Mapping[str, Sequence[Range]]) -> list[Path]:
    """ratio.png, roofline.png, and lanes-<op>.png of every op in ``lanes``."""
    figures = {"ratio": ratio(rows), "roofline": roofline(rows)} if rows else {}
    figures |= {f"lanes-{op}": lanes_over_time(each, op) for op, each in lanes.items()}
    files = []
    for name, figure in figures.items():
        files.append(folder / f"{name}.png")
        write(files[-1], figure)
    return files


def write(file: Path, figure: Figure) -> None:
    figure.savefig(file, dpi=DPI, format="png")


def ratio(rows: Sequence[OpRow]) -> Figure:
    """baseline / ours over the bytes exchanged, a panel per op."""
    ops = list(dict.fromkeys(row.op for row in rows))
    figure = _figure(3.4 * len(ops) + 1.2, 3.8)
    panels: Any = figure.subplots(1, len(ops), sharey=True, squeeze=False)[0]
    for axes, op in zip(panels, ops, strict=True):
        lines: dict[str, list[OpRow]] = {}
        for row in rows:
            if row.op == op:
                lines.setdefault(f"{row.dtype} {row.direction} {row.algorithm}", []).append(row)
        for i, (label, each) in enumerate(lines.items()):
            each = sorted(each, key=lambda row: row.num_bytes)
            points = [row.num_bytes / 2**20 for row in each], [row.ratio for row in each]
            axes.plot(*points, "os^vDx"[i % 6], label=label, color=f"C{i}", linestyle="-", linewidth=0.8)
        axes.axhline(1.0, color="black", linewidth=0.8)
        _powers_of_two(axes)
        axes.set(title=op, xlabel="MiB exchanged")
        axes.legend(fontsize=7, frameon=False)
    panels[0].set_ylabel("baseline / ours")
    return figure


def roofline(rows: Sequence[OpRow]) -> Figure:
    """Matmul rate over flops per byte exchanged, as shares of the best matmul alone; a panel per dtype.

    The roof is min(1, intensity * bandwidth / rate): the best matmul rate, and the best rate of the collective alone.
    """
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    figure = _figure(4.6 * len(dtypes) + 0.6, 4.0)
    panels: Any = figure.subplots(1, len(dtypes), squeeze=False)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        _roofline_panel(axes, [row for row in rows if row.dtype == dtype and row.num_bytes], dtype)
    return figure


def _roofline_panel(axes: Axes, rows: Sequence[OpRow], dtype: str) -> None:
    axes.set(title=dtype, xlabel="flops per byte exchanged", ylabel="rate / best rate of the matmul alone")
    if not rows:
        return
    rate = max(row.flops / row.roof.median for row in rows)
    bandwidth = max(row.num_bytes / row.collective.median for row in rows)
    intensities = [row.flops / row.num_bytes for row in rows]
    low, high = min(intensities) / 2, max(intensities) * 2
    curve = [low * (high / low) ** (i / 99) for i in range(100)]
    axes.plot(curve, [min(1.0, i * bandwidth / rate) for i in curve], color="black", linewidth=1, label="roof")
    for name, marker, colour in (("baseline", "x", "#cc6677"), ("ours", "o", "#4477aa")):
        rates = [row.flops / getattr(row, name).median / rate for row in rows]
        axes.plot(intensities, rates, marker, color=colour, markersize=5, label=name)
    _powers_of_two(axes)
    axes.set_ylim(0, 1.1)
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def lanes_over_time(ranges: Sequence[Range], title: str) -> Figure:
    """Per rank what computes and what communicates, the first variant above the second."""
    variants = list(dict.fromkeys(each.variant for each in ranges))
    ranks = sorted({each.rank for each in ranges})
    figure = _figure(9.0, 1.0 + len(variants) * (0.55 * len(ranks) + 0.5))
    panels: Any = figure.subplots(len(variants), 1, sharex=True, squeeze=False)[:, 0]
    for axes, variant in zip(panels, variants, strict=True):
        for row, rank in enumerate(ranks):
            for each in ranges:
                if (each.variant, each.rank) == (variant, rank):
                    y = -2 * row - (each.lane not in COMPUTES)
                    axes.barh(y, each.end - each.start, left=each.start, height=0.8, color=COLOURS[each.lane])
        axes.set_yticks([-i for i in range(2 * len(ranks))])
        labels = [f"rank {rank} {lane}" for rank in ranks for lane in ("compute", "communication")]
        axes.set_yticklabels(labels, fontsize=7)
        axes.set_title(f"{title}: {variant}", fontsize=9, loc="left")
    panels[-1].set_xlabel("ms")
    panels[-1].set_xlim(left=0)
    _legend_of_lanes(panels[0])
    return figure


def _legend_of_lanes(axes: Axes) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=lane) for lane, colour in COLOURS.items()]
    axes.legend(
        handles=handles, fontsize=7, ncols=len(handles), frameon=False, loc="lower right", bbox_to_anchor=(1, 1)
    )


def _powers_of_two(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


def _figure(width: float, height: float) -> Figure:
    """Without pyplot: no window, no state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
