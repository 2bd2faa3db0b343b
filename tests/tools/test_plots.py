"""What the pictures of `fusedcomm bench` and `fusedcomm demo` show: every mark has a meaning, and a legend says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import picture
from fusedcomm.bench import plots
from fusedcomm.bench.measure import OpRow
from fusedcomm.bench.timing import Timing
from fusedcomm.bench.trace import TraceRange

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


def test_a_push_is_paired_with_the_wait_of_its_round() -> None:
    def lane(rank: int, name: str, start: float, peer: int) -> TraceRange:
        return TraceRange("v", rank, name, start, start + 1, peer)

    first, second = lane(0, "push", 0, 1), lane(0, "push", 10, 1)
    waits = [lane(1, "wait", 12, 0), lane(1, "wait", 5, 0)]
    # A push to the rank itself, a wait without a push, and compute
    others = [lane(1, "push", 0, 1), lane(0, "wait", 3, 1), lane(0, "matmul", 0, 1)]
    assert plots._transfers([second, first, *waits, *others]) == [(first, waits[1]), (second, waits[0])]


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
