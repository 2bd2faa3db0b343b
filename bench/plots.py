"""PNGs of a bench: the ratio over sizes, the roofline, and what every rank did over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedcomm.bench.measure import OpRow
from fusedcomm.bench.trace import TraceRange

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120
COLOURS = {
    "matmul": "#4477aa",
    "matmul for a peer": "#66ccee",
    "copy": "#bbbbbb",
    "collective": "#cc6677",
    "push": "#ddaa33",
    "wait": "#aa4499",
}
LABELS = {
    "matmul": "matmul",
    "matmul for a peer": "matmul whose result goes to another rank",
    "copy": "copy in local memory",
    "collective": "collective",
    "push": "push: copy to another rank",
    "wait": "wait for data",
}
COMPUTES = ("matmul", "matmul for a peer", "copy")  # the others are communication
LEAVES, ARRIVES = "data leave: stored and signalled", "data have arrived: the wait for the signal is over"
SIZE_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#000000", "#999933")
PASS_MARKERS = {"forward": "o", "backward": "s", "both": "^"}
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


def write_all(folder: Path, rows: Sequence[OpRow], lanes: Mapping[str, Sequence[TraceRange]]) -> list[Path]:
    """ratio.png, roofline.png, and lanes-<op>.png of every op in ``lanes``."""
    figures = {"ratio": ratio(rows), "roofline": roofline(rows)} if rows else {}
    for op, each in lanes.items():
        mine = [row for row in rows if row.op == op]
        last = [row for row in mine if row.algorithm == mine[0].algorithm][-1]  # the row that was traced
        title = f"{op} {_size(last)}, {last.dtype}, {last.direction}, {last.group_size} ranks"
        figures[f"lanes-{op}"] = lanes_over_time(each, f"{title}; speed-up {last.ratio:.2f}")
    files = []
    for name, figure in figures.items():
        files.append(folder / f"{name}.png")
        write(files[-1], figure)
    return files


def write(file: Path, figure: Figure) -> None:
    figure.savefig(file, dpi=DPI, format="png")


def ratio(rows: Sequence[OpRow]) -> Figure:
    """The speed-up against the bytes exchanged, with a panel per op."""
    ops = list(dict.fromkeys(row.op for row in rows))
    figure = _figure(3.4 * len(ops) + 1.2, 4.0)
    figure.suptitle(f"Speed-up of fusedcomm over the unfused program, {rows[0].group_size} ranks", fontsize=11)
    panels: Any = figure.subplots(1, len(ops), sharey=True, squeeze=False)[0]
    for axes, op in zip(panels, ops, strict=True):
        lines: dict[str, list[OpRow]] = {}
        for row in rows:
            if row.op == op:
                lines.setdefault(f"{row.dtype}, {row.direction}, {row.algorithm}", []).append(row)
        for i, (label, each) in enumerate(lines.items()):
            each = sorted(each, key=lambda row: row.num_bytes)
            points = [row.num_bytes / 2**20 for row in each], [row.ratio for row in each]
            axes.plot(*points, "os^vDx"[i % 6], label=label, color=f"C{i}", linestyle="-", linewidth=0.8)
        axes.axhline(1.0, color="black", linewidth=0.8)
        if any(row.num_bytes for row in rows if row.op == op):  # else a log axis has no place for the points
            _powers_of_two(axes)
        axes.set(title=op, xlabel="exchanged, MiB")
        axes.legend(fontsize=7, frameon=False)
    panels[0].set_ylim(0, 1.1 * max(1.0, *(row.ratio for row in rows)))
    panels[0].set_ylabel("time of the unfused program / time of the op\n(above 1: fusedcomm is faster)", fontsize=8)
    return figure


def roofline(rows: Sequence[OpRow]) -> Figure:
    """Matmul rate against flops per byte exchanged, as shares of the best matmul alone; a panel per op and dtype.

    The roof is min(1, intensity * bandwidth / rate), with the best rate of the matmul alone and the best bandwidth of
    the collective alone.
    """
    cases = list(dict.fromkeys((row.op, row.dtype) for row in rows))
    figure = _figure(9.5, 3.6 * len(cases) + 0.6)
    panels: Any = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    for axes, case in zip(panels, cases, strict=True):
        _roofline_panel(axes, [row for row in rows if (row.op, row.dtype) == case])
    return figure


def _roofline_panel(axes: Axes, rows: Sequence[OpRow]) -> None:
    axes.set_title(f"{_op_title(rows)}: {_speed_ups(rows)}", fontsize=9, loc="left")
    axes.set(xlabel="flops per byte exchanged", ylabel="rate / best rate\nof the matmul alone")
    rows = [row for row in rows if row.num_bytes]
    if not rows:
        return
    rate = max(row.flops / row.roof.median for row in rows)
    bandwidth = max(row.num_bytes / row.collective.median for row in rows)
    intensities = [row.flops / row.num_bytes for row in rows]
    low, high = min(intensities) / 2, max(intensities) * 2
    curve = [low * (high / low) ** (i / 99) for i in range(100)]
    axes.plot(
        curve,
        [min(1.0, i * bandwidth / rate) for i in curve],
        color="black",
        linewidth=1,
        label="roof: the matmul alone, or the collective alone",
    )
    sizes: dict[str, list[OpRow]] = {}
    for row in rows:
        sizes.setdefault(f"{_size(row)}, {row.algorithm}", []).append(row)
    for i, (size, each) in enumerate(sizes.items()):
        colour = SIZE_COLOURS[i % len(SIZE_COLOURS)]
        axes.plot([], [], "s", color=colour, label=f"{size}: {_speed_ups(each)}")
        for row in each:
            # Points stand side by side, so that sizes with as many flops per byte do not hide each other
            x = row.flops / row.num_bytes * 1.04 ** (i - (len(sizes) - 1) / 2)
            before, after = (row.flops / time.median / rate for time in (row.baseline, row.ours))
            marker: dict[str, Any] = {"marker": PASS_MARKERS[row.direction], "color": colour, "markersize": 6}
            axes.plot([x, x], [before, after], color=colour, linewidth=0.8)
            axes.plot([x], [before], markerfacecolor="white", **marker)
            axes.plot([x], [after], **marker)
    for direction in dict.fromkeys(row.direction for row in rows):
        axes.plot(
            [], [], PASS_MARKERS[direction], color="black", label=f"{direction}: filled fusedcomm, hollow unfused"
        )
    _powers_of_two(axes)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _op_title(rows: Sequence[OpRow]) -> str:
    sizes = {_size(row) for row in rows}
    size = f" {sizes.pop()}" if len(sizes) == 1 else ""
    return f"{rows[0].op}{size}, {rows[0].dtype}, {rows[0].group_size} ranks"


def _size(row: OpRow) -> str:
    rows = f"{row.batch} x {row.rows // row.batch}" if row.batch else str(row.rows)
    return f"[{rows}, {row.k}] @ [{row.k}, {row.n}]"


def _speed_ups(rows: Sequence[OpRow]) -> str:
    """The speed-up, or the least and the most where there are several."""
    found = sorted(row.ratio for row in rows)
    return f"speed-up {found[0]:.2f}" + (f" to {found[-1]:.2f}" if len(found) > 1 else "")


def lanes_over_time(ranges: Sequence[TraceRange], title: str, unit: str = "ms") -> Figure:
    """For each rank what computes and, below it, what communicates, with the first variant above the second.

    An arrow goes from where a rank's data leave to where the other rank has them. On a CPU a chunk's matmul stores into
    the memory of the rank that the chunk is for, and nothing is copied: only marks and arrows show that data move.
    """
    variants = list(dict.fromkeys(each.variant for each in ranges))
    ranks = sorted({each.rank for each in ranges})
    figure = _figure(10.0, 1.5 + len(variants) * (0.6 * len(ranks) + 0.5))
    figure.suptitle(title, fontsize=10)
    panels: Any = figure.subplots(len(variants), 1, sharex=True, squeeze=False)[:, 0]
    kinds: set[str] = set()
    for axes, variant in zip(panels, variants, strict=True):
        kinds |= _draw_lanes(axes, [each for each in ranges if each.variant == variant], ranks)
        end = max(each.end for each in ranges if each.variant == variant)
        axes.set_title(f"{variant}: {end:.3g} {unit}", fontsize=9, loc="left")
    panels[-1].set_xlabel(f"time since the first rank began, {unit}")
    panels[-1].set_xlim(left=0)
    _legend_of_lanes(figure, kinds)
    return figure


def _draw_lanes(axes: Axes, ranges: Sequence[TraceRange], ranks: Sequence[int]) -> set[str]:
    """Draw one variant. Returns what a legend must explain."""
    compute = {rank: -2.4 * row for row, rank in enumerate(ranks)}
    kinds, visible = set(), max(each.end for each in ranges) / 500
    for rank in ranks:
        mine = sorted((each for each in ranges if each.rank == rank), key=lambda each: each.start)
        for each, then in zip(mine, [*mine[1:], None], strict=True):
            kind = each.lane
            if kind == "push" and each.peer == rank:
                continue  # a rank's own part
            if kind == "matmul" and then is not None and then.lane == "push" and then.peer == each.peer != rank:
                kind = "matmul for a peer"
            y = compute[rank] - (kind not in COMPUTES)
            axes.barh(
                y,
                each.end - each.start,
                left=each.start,
                height=0.9,
                color=COLOURS[kind],
                edgecolor="white",
                linewidth=0.5,
            )
            kinds |= {kind} if each.end - each.start > visible else set()
    for left, arrived in _transfers(ranges):
        start, end = (left.end, compute[left.rank] - 1), (arrived.end, compute[arrived.rank] - 1)
        axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": "black", "linewidth": 0.9})
        axes.plot(*start, "^", color=COLOURS["push"], markeredgecolor="black", markersize=7, clip_on=False)
        axes.plot(*end, "D", color=COLOURS["wait"], markeredgecolor="black", markersize=5, clip_on=False)
        kinds |= {LEAVES, ARRIVES}
    ticks = [compute[rank] - i for rank in ranks for i in (0, 1)]
    axes.set_yticks(ticks, [text for rank in ranks for text in (f"rank {rank}  computes", "exchanges")], fontsize=7)
    axes.set_ylim(min(ticks) - 0.7, max(ticks) + 0.7)
    for rank in ranks[1:]:
        axes.axhline(compute[rank] + 0.7, color="#dddddd", linewidth=0.8)
    return kinds


def _transfers(ranges: Sequence[TraceRange]) -> list[tuple[TraceRange, TraceRange]]:
    """Pushes, each with the wait of the rank that it goes to: both come in the order of their rounds."""
    found: dict[tuple[str, int, int], list[TraceRange]] = {}
    for each in sorted(ranges, key=lambda each: each.start):
        if each.peer is not None and each.peer != each.rank and each.lane in ("push", "wait"):
            pair = (each.rank, each.peer) if each.lane == "push" else (each.peer, each.rank)
            found.setdefault((each.lane, *pair), []).append(each)
    pushes = [(key[1:], each) for key, each in found.items() if key[0] == "push"]
    return [pair for key, each in pushes for pair in zip(each, found.get(("wait", *key), []), strict=False)]


def _legend_of_lanes(figure: Figure, kinds: set[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=COLOURS[kind], label=LABELS[kind]) for kind in COLOURS if kind in kinds]
    for label, marker, kind in ((LEAVES, "^", "push"), (ARRIVES, "D", "wait")):
        if label in kinds:
            look: dict[str, Any] = {"color": COLOURS[kind], "markeredgecolor": "black", "linestyle": ""}
            handles.append(Line2D([], [], marker=marker, label=label, **look))
    figure.legend(handles=handles, fontsize=7, ncols=4, frameon=False, loc="outside lower center")


def _powers_of_two(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


def _figure(width: float, height: float) -> Figure:
    """A figure without pyplot, so without a window or global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
