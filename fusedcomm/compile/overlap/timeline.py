"""The timeline of a graph: compute, waits for each collective, and memory; as a trace and as a picture."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"compute": "#004488", "collective": "#ddaa33", "exposed": "#bb5566"}  # different in grey, too
_LABELS = {
    "compute": "compute",
    "collective": "collective beside compute: hidden",
    "exposed": "exposed: compute waits for the collective",
}


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
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("plots need matplotlib: pip install matplotlib, or fusedcomm[bench]") from None

        num_lanes = 1 + len(_groups(self))
        figure = Figure(figsize=(9.0, 2.4 + 0.3 * num_lanes), layout="constrained")
        lanes, memory = figure.subplots(2, 1, sharex=True, height_ratios=(0.4 + 0.3 * num_lanes, 1.1))
        _draw_lanes(lanes, self)
        _draw_memory(memory, self)
        figure.legend(fontsize=8, ncols=len(_LABELS), frameon=False, loc="outside lower center")
        figure.savefig(file, dpi=150)


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


def _draw_lanes(axes: Axes, timeline: Timeline) -> None:
    rows = {lane: -row for row, lane in enumerate(_groups(timeline), start=1)}
    of = {line.node: line for line in timeline.collectives}
    bars: dict[str, list[tuple[int, float, float]]] = {
        "compute": [(0, start, end) for _, start, end in timeline.compute],
        "collective": [(rows[line.link, line.group], line.start_ms, line.end_ms) for line in of.values()],
        "exposed": [(0, start, end) for _, start, end in timeline.waits],
    }
    for node, start, end in timeline.waits:
        line = of[node]
        if line.start_ms < end and start < line.end_ms:  # the collective may have been in its group's queue first
            during = max(start, line.start_ms), min(end, line.end_ms)
            bars["exposed"].append((rows[line.link, line.group], *during))
    for what, label in _LABELS.items():
        y, left, right = zip(*bars[what], strict=True) if bars[what] else ((), (), ())
        widths = [end - start for start, end in zip(left, right, strict=True)]
        axes.barh(y, widths, 0.8, left, color=_COLOURS[what], edgecolor=_COLOURS[what], linewidth=0.3, label=label)
    hidden = sum(line.hidden for line in timeline.collectives)
    parts = f"{timeline.compute_ms:.4g} ms of compute + {timeline.exposed_ms:.4g} ms exposed"
    title = f"{timeline.total_ms:.4g} ms = {parts}; {hidden} of {len(timeline.collectives)} collectives hidden"
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_yticks([0, *rows.values()], ["compute", *(_label(*lane)[:32] for lane in rows)], fontsize=8)


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.ticker import EngFormatter

    times, held = zip(*timeline.memory, strict=True)
    axes.fill_between([*times, timeline.total_ms], [*held, held[-1]], step="post", color="#bbbbbb", linewidth=0)
    axes.axhline(timeline.peak_bytes, color="black", linewidth=0.8, linestyle="--")
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.set_ylabel("memory", fontsize=8)
    axes.set_xlabel("estimated time, ms")
    axes.set_xlim(0, timeline.total_ms or 1.0)
    axes.tick_params(labelsize=8)
