"""What the pictures of `fusedcomm bench` and `fusedcomm demo` show: every mark has a meaning, and a legend says it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from benchmarks import picture
from fusedcomm.bench import plots
from fusedcomm.bench.measure import OpRow
from fusedcomm.bench.timing import Timing
from fusedcomm.bench.trace import TraceRange

PASSES = ("forward", "backward", "both")
SIZES = ((512, 256, 1024), (1024, 256, 2048))  # as many flops per byte: the same place on the axis


def seconds(median: float) -> Timing:
    return Timing(median, median, median, median, 0.0)


def row(size: tuple[int, int, int], direction: str, dtype: str = "float32", ratio: float = 1.5) -> OpRow:
    rows, k, n = size
    times = {"roof": seconds(1.0), "collective": seconds(0.5), "baseline": seconds(1.2 * ratio), "ours": seconds(1.2)}
    return OpRow(
        *("matmul_all_to_all", rows, k, n, 0, dtype, direction, "auto", "chunked", "", 2),
        num_bytes=4 * rows * n,
        flops=2 * rows * k * n,
        **times,
    )


def cpu_call(variant: str = "fusedcomm", num_ranks: int = 2) -> list[TraceRange]:
    """The ranges of a `chunked` call on a CPU, whose pushes and waits take no time."""
    found = []
    for rank in range(num_ranks):
        peers = [(rank + step) % num_ranks for step in range(1, num_ranks)]
        for i, peer in enumerate([*peers, rank]):
            found.append(TraceRange(variant, rank, "matmul", 10.0 * i, 10.0 * i + 9.9, peer))
            found.append(TraceRange(variant, rank, "push", 10.0 * i + 9.9, 10.0 * i + 9.901, peer))
        end = 10.0 * num_ranks
        for peer in peers:
            found.append(TraceRange(variant, rank, "wait", end, end + 0.001, peer))
            found.append(TraceRange(variant, rank, "copy", end + 0.001, end + 1.0, peer))
            end += 1.0
    return found


def legend_of(figure: Figure) -> list[str]:
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    return [text.get_text() for legend in legends if legend is not None for text in legend.get_texts()]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_data_that_leave_and_arrive_have_marks_where_no_copy_is_seen(num_ranks: int) -> None:
    figure = plots.lanes_over_time(cpu_call(num_ranks=num_ranks), "title")
    (axes,) = figure.axes
    arrows: Any = [each for each in axes.texts if hasattr(each, "arrow_patch")]
    assert len(arrows) == num_ranks * (num_ranks - 1)
    lanes = dict(zip((text.get_text() for text in axes.get_yticklabels()), axes.get_yticks(), strict=False))
    assert [name for name in lanes if name.endswith("computes")] == [f"rank {r}  computes" for r in range(num_ranks)]
    marked = {float(line.get_ydata()[0]) for line in axes.lines if line.get_marker() in "^D"}  # type: ignore[index]
    exchanges = {float(axes.get_yticks()[2 * r + 1]) for r in range(num_ranks)}
    assert marked == exchanges  # no lane is empty
    assert {each.xy[1] for each in arrows} == {each.xyann[1] for each in arrows} == exchanges
    assert all(each.xyann[0] < each.xy[0] and each.xyann[1] != each.xy[1] for each in arrows)
    legend = legend_of(figure)
    assert {plots.LEAVES, plots.ARRIVES, plots.LABELS["matmul for a peer"]} <= set(legend)
    assert plots.LABELS["push"] not in legend  # no push is wide enough to be seen
    assert figure.get_suptitle() == "title" and "fusedcomm: " in axes.get_title(loc="left")
    assert axes.get_xlabel().endswith(", ms")


def test_the_matmul_of_what_a_rank_keeps_looks_different() -> None:
    (axes,) = plots.lanes_over_time(cpu_call(), "").axes
    colours = [tuple(bar.get_facecolor()) for bar in axes.patches if bar.get_width() > 9]  # type: ignore[attr-defined]
    assert len(colours) == 4 and len(set(colours)) == 2


def test_a_push_is_paired_with_the_wait_of_its_round() -> None:
    def lane(rank: int, name: str, start: float, peer: int) -> TraceRange:
        return TraceRange("v", rank, name, start, start + 1, peer)

    first, second = lane(0, "push", 0, 1), lane(0, "push", 10, 1)
    waits = [lane(1, "wait", 12, 0), lane(1, "wait", 5, 0)]
    # A push to the rank itself, a wait without a push, and compute
    others = [lane(1, "push", 0, 1), lane(0, "wait", 3, 1), lane(0, "matmul", 0, 1)]
    assert plots._transfers([second, first, *waits, *others]) == [(first, waits[1]), (second, waits[0])]


def test_passes_sizes_and_programs_have_marks_of_their_own() -> None:
    rows = [row(size, direction) for size, direction in itertools.product(SIZES, PASSES)]
    (axes,) = plots.roofline(rows).axes
    points = [line for line in axes.lines if len(line.get_xdata()) == 1]  # type: ignore[arg-type]
    looks = {(str(p.get_marker()), str(p.get_color()), str(p.get_markerfacecolor())) for p in points}
    assert len(points) == len(looks) == 2 * len(rows)
    assert len({(float(p.get_xdata()[0]), float(p.get_ydata()[0])) for p in points}) == len(SIZES) * 2  # type: ignore[index]
    legend = legend_of(plots.roofline(rows))
    assert [text for text in legend if text.startswith("[512, 256] @ [256, 1024], auto: speed-up 1.50")]
    assert len([text for text in legend if "hollow unfused" in text]) == len(PASSES)


def test_titles_say_op_shape_dtype_and_speed_up() -> None:
    figure = plots.roofline([row(SIZES[0], "forward", "bfloat16"), row(SIZES[0], "both", "bfloat16", ratio=0.75)])
    title = figure.axes[0].get_title(loc="left")
    assert title == "matmul_all_to_all [512, 256] @ [256, 1024], bfloat16, 2 ranks: speed-up 0.75 to 1.50"
    both = plots.roofline([row(size, "forward", dtype) for size in SIZES for dtype in ("float32", "bfloat16")])
    assert [axes.get_title(loc="left").split(",")[1] for axes in both.axes] == [" float32", " bfloat16"]
    ratio = plots.ratio([row(SIZES[0], "forward", ratio=7.0), row(SIZES[1], "forward")])
    assert ratio.axes[0].get_ylim()[1] > 7  # the fastest row is inside the axes


def test_lanes_of_a_bench_are_titled_with_the_last_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = []
    monkeypatch.setattr(plots, "write", lambda file, figure: titles.append(figure.get_suptitle()))
    plots.write_all(tmp_path, [row(size, "forward") for size in SIZES], {"matmul_all_to_all": cpu_call()})
    assert titles[-1] == "matmul_all_to_all [1024, 256] @ [256, 2048], float32, forward, 2 ranks; speed-up 1.50"


def test_the_drawn_schedule_holds_together(tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    assert picture.main([str(file)]) == 0
    assert 10_000 < file.stat().st_size < 150_000 and picture.FILE.stat().st_size < 150_000
    for rank in range(picture.NUM_RANKS):
        mine = list(picture.fused(rank))
        pushes = [each for each in mine if each.lane == "push"]
        computed = {each.peer: each.end for each in mine if each.lane == "matmul"}
        assert all(each.start >= computed[each.peer] for each in pushes)  # a chunk leaves once it is there
        assert sum(each.end - each.start for each in mine if each.lane == "matmul") == pytest.approx(1.0)
        for each in (each for each in mine if each.lane == "wait"):
            (push,) = [p for p in picture.fused(each.peer or 0) if p.lane == "push" and p.peer == rank]
            assert each.end >= push.end  # nothing is used before it has arrived
        assert mine[-1].end < list(picture.unfused(rank))[-1].end


@pytest.mark.filterwarnings("error")  # matplotlib warns where an axis has no place for points
def test_passes_that_exchange_nothing_have_a_speed_up_and_no_place_on_the_axis(tmp_path: Path) -> None:
    nothing = replace(row(SIZES[0], "backward"), num_bytes=0)
    for rows in ([nothing], [nothing, row(SIZES[1], "forward")]):
        assert len(plots.write_all(tmp_path, rows, {})) == 2
        (axes,) = plots.roofline(rows).axes
        assert "speed-up 1.50" in axes.get_title(loc="left")
        assert len([line for line in axes.lines if len(line.get_xdata()) == 1]) == 2 * (len(rows) - 1)  # type: ignore[arg-type]
