"""The timeline of a graph: compute, waits for each collective, and memory; as a trace and as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Span = tuple[float, float]  # ms
COLOURS = {"compute": "#004488", "collective": "#ddaa33", "exposed": "#bb5566"}  # different in grey, too
_LABELS = {
    "compute": "compute",
    "collective": "collective beside compute: hidden",
    "exposed": "exposed: compute waits for the collective",
}
_LINKS = {"intra": "inside a node", "inter": "between nodes"}
_PIXELS = 1500  # about how many the time axis of a picture has
_DPI = 150
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}


@dataclass(frozen=True)
class Line:
    """One collective, or one op of fusedcomm, on a `Timeline`.

    Attributes:
        node: the name of the node that starts it.
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", ..., or the name of the op.
        group: the name of its group.
        link: "intra" inside a node, "inter" between nodes.
        start_ms: when it begins.
        end_ms: when it has ended.
        alone_ms: its time with the link to itself.
        wire_ms: the part of alone_ms that groups on one link share.
        exposed_ms: time that the compute stream waits for it.
        hidden_by: the names of the nodes that compute meanwhile.
        hidden: whether at most 1 % of alone_ms is exposed.
    """

    node: str
    kind: str
    group: str
    link: str
    start_ms: float
    end_ms: float
    alone_ms: float
    wire_ms: float
    exposed_ms: float
    hidden_by: tuple[str, ...] = ()

    @property
    def hidden(self) -> bool:
        return self.exposed_ms <= 0.01 * self.alone_ms


@dataclass(frozen=True)
class Timeline:
    """The compute, transfers and waits of a graph over time, in ms: ``total_ms = compute_ms + exposed_ms``.

    Attributes:
        total_ms: from the beginning of the graph to its end.
        compute_ms: time that the compute stream computes.
        exposed_ms: time that the compute stream waits for collectives.
        collectives: a list of `Line`.
        peak_bytes: the most memory that is held at one time.
        compute: (name, start, end) of the nodes that compute.
        waits: (name, start, end) of the waits that are exposed.
        memory: (ms, bytes held from then on).
        comm_ms: the time of all collectives, each alone.
        bound_ms: a lower bound of any order: all compute, all transfers of one link, or all of one group.
    """

    total_ms: float
    compute_ms: float
    exposed_ms: float
    collectives: list[Line]
    peak_bytes: int
    compute: list[tuple[str, float, float]] = field(repr=False, default_factory=list)
    waits: list[tuple[str, float, float]] = field(repr=False, default_factory=list)
    memory: list[tuple[float, int]] = field(repr=False, default_factory=list)

    @property
    def comm_ms(self) -> float:
        """The time of all collectives, each alone on its link."""
        return sum(line.alone_ms for line in self.collectives)

    @property
    def bound_ms(self) -> float:
        """No order is faster than this: the time of all compute, of all transfers of one link, or of one group."""
        busy: dict[tuple[str, str], float] = {}
        for line in self.collectives:
            for who, ms in ((("link", line.link), line.wire_ms), (("group", line.group), line.alone_ms)):
                busy[who] = busy.get(who, 0.0) + ms
        return max(self.compute_ms, *busy.values()) if busy else self.compute_ms

    def to_trace(self, file: str | os.PathLike[str] | IO[str]) -> None:
        """Write the timeline as a trace for chrome://tracing or Perfetto.

        Args:
            file: a path or a text file.
        """
        with open(file, "w") if isinstance(file, str | os.PathLike) else nullcontext(file) as out:
            json.dump({"displayTimeUnit": "ms", "traceEvents": _trace_events(self)}, out)

    def plot(self, file: Any) -> None:
        """Write a picture of the timeline.

        Args:
            file: a path, with the format as its suffix, or a binary file for a PNG.

        Raises:
            ImportError: there is no matplotlib.
        """
        _draw({"": self}, file, "")


def plot_both(before: Timeline, after: Timeline, file: Any, title: str = "") -> None:
    """Write both, one above the other, with the same axes of time and memory; the rest is as in `Timeline.plot`."""
    _draw({"before: ": before, "after: ": after}, file, title)


def _trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Events of Chrome's trace format, in microseconds."""
    lanes = {lane: tid for tid, lane in enumerate(_groups(timeline), start=1)}
    events: list[dict[str, Any]] = [_name("process_name", 0, "timeline"), _name("thread_name", 0, "compute stream")]
    events += [_name("thread_name", tid, _label(*lane)) for lane, tid in lanes.items()]
    events += [_slice(name, "compute", 0, start, end) for name, start, end in timeline.compute]
    events += [_slice(f"exposed: {name}", "exposed", 0, start, end) for name, start, end in timeline.waits]
    for line in timeline.collectives:
        args = {"alone_ms": line.alone_ms, "exposed_ms": line.exposed_ms, "hidden_by": list(line.hidden_by)}
        tid = lanes[line.link, line.group]
        events.append(_slice(line.node, line.kind, tid, line.start_ms, line.end_ms) | {"args": args})
    for ms, num_bytes in timeline.memory:
        events.append({"ph": "C", "name": "memory", "pid": 0, "ts": 1e3 * ms, "args": {"bytes": num_bytes}})
    return events


def _groups(timeline: Timeline) -> list[tuple[str, str]]:
    return sorted({(line.link, line.group) for line in timeline.collectives})


def _label(link: str, group: str) -> str:
    return f"{link}: group {group}"


def _name(what: str, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": tid, "args": {"name": name}}


def _slice(name: str, category: str, tid: int, start_ms: float, end_ms: float) -> dict[str, Any]:
    times = {"ts": 1e3 * start_ms, "dur": 1e3 * (end_ms - start_ms)}
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": tid} | times


# the picture


def _draw(timelines: Mapping[str, Timeline], file: Any, title: str) -> None:
    try:
        from matplotlib import patches
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install matplotlib, or fusedcomm[bench]") from None

    heights = [h for each in timelines.values() for h in (0.4 + 0.3 * (1 + len(_groups(each))), 1.1)]
    figure = Figure(figsize=(9.0, sum(heights) + 0.6 + 0.3 * bool(title)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels: Any = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    total_ms = max(each.total_ms for each in timelines.values()) or 1.0
    most = max(each.peak_bytes for each in timelines.values())
    for i, (which, timeline) in enumerate(timelines.items()):
        _draw_lanes(panels[2 * i], timeline, total_ms / _PIXELS)
        panels[2 * i].set_title(which + _summary(timeline), fontsize=9, loc="left")
        _draw_memory(panels[2 * i + 1], timeline, total_ms / _PIXELS, most)
    panels[-1].set_xlim(0, total_ms)
    panels[-1].set_xlabel("estimated time, ms")
    handles = [patches.Patch(color=colour, label=_LABELS[what]) for what, colour in COLOURS.items()]
    figure.legend(handles=handles, fontsize=8, ncols=len(handles), frameon=False, loc="outside lower center")
    figure.savefig(file, dpi=_DPI)


def _summary(timeline: Timeline) -> str:
    hidden = sum(line.hidden for line in timeline.collectives)
    parts = f"{timeline.compute_ms:.4g} ms of compute + {timeline.exposed_ms:.4g} ms exposed"
    return f"{timeline.total_ms:.4g} ms = {parts}; {hidden} of {len(timeline.collectives)} collectives hidden"


def _draw_lanes(axes: Axes, timeline: Timeline, pixel: float) -> None:
    groups = _groups(timeline)
    rows = {group: -row for row, group in enumerate(groups, start=1)}
    of = {line.node: line for line in timeline.collectives}
    spans: dict[tuple[float, str], list[Span]] = {
        (0, "compute"): [(start, end) for _, start, end in timeline.compute],
        (0, "exposed"): [(start, end) for _, start, end in timeline.waits],
    }
    for line in timeline.collectives:
        spans.setdefault((rows[line.link, line.group], "collective"), []).append((line.start_ms, line.end_ms))
    for node, start, end in timeline.waits:
        line = of[node]
        if line.start_ms < end and start < line.end_ms:  # the collective may have been in its group's queue first
            during = max(start, line.start_ms), min(end, line.end_ms)
            spans.setdefault((rows[line.link, line.group], "exposed"), []).append(during)
    for (y, what), each in spans.items():
        bars = [(start, end - start) for start, end in _merged(each, pixel)]
        edges = [0.3 if ms > 8 * pixel else 0.0 for _, ms in bars]
        axes.broken_barh(bars, (y - 0.4, 0.8), facecolors=COLOURS[what], edgecolor="white", linewidth=edges)
    axes.set_yticks(
        range(0, -len(groups) - 1, -1),
        ["compute", *(f"{_LINKS.get(link, link)}: group {group}"[:32] for link, group in groups)],
        fontsize=8,
    )
    axes.set_ylim(-len(groups) - 0.5, 0.5)


def _merged(spans: Iterable[Span], pixel: float) -> list[Span]:
    """The spans in order of time. A span narrower than a pixel is joined to its neighbour."""
    found: list[Span] = []
    for start, end in sorted(spans):
        narrow = found and (end - start < pixel or found[-1][1] - found[-1][0] < pixel)
        if narrow and start - found[-1][1] < pixel / 2:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _draw_memory(axes: Axes, timeline: Timeline, pixel: float, most: int) -> None:
    """``most``: the bytes at the top of the axis."""
    unit, size = next((unit, size) for unit, size in _UNITS.items() if most >= size or size == 1)
    points = _most_per_pixel(timeline.memory, pixel)
    times = [ms for ms, _ in points] + [timeline.total_ms]
    values = [num_bytes / size for _, num_bytes in points]
    values += values[-1:] or [0.0]
    axes.fill_between(times, values, step="post", color="#bbbbbb", linewidth=0)
    peak = timeline.peak_bytes / size
    at = next((ms for ms, num_bytes in timeline.memory if num_bytes == timeline.peak_bytes), 0.0)
    axes.axhline(peak, color="black", linewidth=0.8, linestyle="--")
    axes.plot([at], [peak], "v", color="black", markersize=5, clip_on=False)
    axes.set_ylim(0, 1.4 * max(most, 1) / size)
    axes.text(0.005, peak, f"peak {peak:.4g} {unit}", transform=axes.get_yaxis_transform(), va="bottom", fontsize=8)
    axes.set_ylabel(f"memory\n{unit}", fontsize=8)
    axes.tick_params(labelsize=8)


def _most_per_pixel(memory: Sequence[tuple[float, int]], pixel: float) -> list[tuple[float, int]]:
    """The most memory in each pixel's time, then the memory at its end."""
    found: list[tuple[float, int]] = []
    column, last = -1, 0
    for ms, num_bytes in memory:
        if int(ms / pixel) > column:
            if found and last < found[-1][1]:
                found.append((min(ms, found[-1][0] + pixel), last))
            column = int(ms / pixel)
            found.append((ms, num_bytes))
        else:
            found[-1] = found[-1][0], max(num_bytes, found[-1][1])
        last = num_bytes
    return [*found, (memory[-1][0], last)] if memory else found
