"""What the pictures of `fusedcomm bench` and `fusedcomm demo` show: every mark has a meaning, and a legend says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fusedcomm.bench import plots
from fusedcomm.bench.measure import OpRow
from fusedcomm.bench.timing import Timing

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


@pytest.mark.filterwarnings("error")  # matplotlib warns where an axis has no place for points
def test_passes_that_exchange_nothing_have_a_speed_up_and_no_place_on_the_axis(tmp_path: Path) -> None:
    nothing = replace(row(SIZES[0], "backward"), num_bytes=0)
    for rows in ([nothing], [nothing, row(SIZES[1], "forward")]):
        assert len(plots.write_all(tmp_path, rows, {})) == 2
        (axes,) = plots.roofline(rows).axes
        assert "speed-up 1.50" in axes.get_title(loc="left")
        assert len([line for line in axes.lines if len(line.get_xdata()) == 1]) == 2 * (len(rows) - 1)  # type: ignore[arg-type]
