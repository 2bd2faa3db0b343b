"""The figures in docs/ are those of the files in benchmarks/results/."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import redistribution
from tests.helpers.problems import OPS
from tests.package.test_docs import ROOT, page, table_rows

NUM_VARIANTS = 7
TRACED, TORCH, TORCH_BUCKETED, MOVED, UNFUSED, FUSED, BOUND = range(NUM_VARIANTS)  # a graph's rows in overlap.json


def results(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def goal(report: Any, name: str) -> float:
    return next(each["value"] for each in report["goals"] if each["name"] == name)


def rounded(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def tables(name: str, first_heading: str, num_cells: int) -> list[list[str]]:
    return [row for row in table_rows(page(name), first_heading) if len(row) == num_cells]


def test_speeds_of_the_ops() -> None:
    summaries = {each["op"]: each for each in results("cpu-2-ranks-ops")["summary"]}
    fields = ("speedup_mean", "speedup_minimum", "over_roof_median", "free_exchange")
    expected = []
    for op in OPS:
        ragged = goal(results(f"cpu-2-ranks-ragged-{op}"), "ragged/aligned speed of auto, minimum")
        figures = [*(summaries[op][field] for field in fields), ragged]
        expected.append([f"`{op}`", *(f"{figure:.2f}" for figure in figures)])
    assert sorted(table_rows(page("benchmark"), "op")) == sorted(expected)
    quoted = [row for row in table_rows((ROOT / "README.md").read_text(), "op") if len(row) == 5]
    assert sorted(quoted) == sorted([op, mean, least, free, median] for op, mean, least, median, free, _ in expected)


def test_what_a_call_costs() -> None:
    expected = []
    for each in results("cpu-2-ranks-overhead")["ops"]:
        calls = {call["name"]: call for call in each["calls"]}
        compared = [("chunked", "hot", "baseline"), ("chunked", "cold", "baseline"), ("chunked", "cpu", "empty op")]
        compared += [("unfused", "hot", "baseline"), ("unfused", "cold", "baseline")]
        ratios = [calls[of][time]["median"] / calls[to][time]["median"] for of, time, to in compared]
        expected.append([f"`{each['op']}`", *(f"{ratio:.2f}" for ratio in ratios)])
    assert list(table_rows(page("benchmark"), "op, 4 x 16 @ 16 x 8")) == expected


def text(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['p10']:.2f} to {ratio['p90']:.2f})"


def test_speeds_of_uneven_sizes() -> None:
    rows = results("cpu-2-ranks-uneven")["rows"]
    expected = [
        [f"`{row['program']}`", row["dtype"], text(row["cost"]), text(row["padded_over_uneven"])] for row in rows
    ]
    assert list(table_rows(page("benchmark"), "projection")) == expected


def test_speeds_of_blocks_of_real_models() -> None:
    expected = []
    for row in results("cpu-2-ranks-model-blocks-xeon")["rows"]:
        ratios = [row[name] for name in ("plain_over_compiled", "unmoved_over_compiled", "plain_over_removed")]
        expected.append([f"`{row['block']}`", f"{row['fused']} of {row['exchanges']}", *map(text, ratios)])
    assert sorted(table_rows(page("benchmark"), "block, float32")) == sorted(expected)


def test_speeds_of_parallel_styles() -> None:
    report = results("cpu-2-ranks-parallel-styles")
    expected = [
        [f"`{row['model']}`", text(row["torch_over_fused"]), text(row["torch_over_removed"]), f"{goal['bound']}"]
        for row, goal in zip(report["rows"], report["goals"], strict=True)
    ]
    assert list(table_rows(page("benchmark"), "model under styles")) == expected


def overlap_rows(cells: Callable[[list[Any]], list[str]]) -> Iterator[list[str]]:
    """A row per graph, whose variants are given by their position: an old file has other names for them."""
    rows = results("overlap")["rows"]
    for first in range(0, len(rows), NUM_VARIANTS):
        variants, case = rows[first : first + NUM_VARIANTS], rows[first]["case"]
        assert all(each["case"] == case for each in variants)
        yield [f"{case['model']} {case['part']}", str(case["layers"]), *cells(variants)]


COMPARED = (TRACED, TORCH, TORCH_BUCKETED, UNFUSED, FUSED)


def test_simulated_times_of_overlap() -> None:
    exposed = overlap_rows(lambda row: [rounded(row[each]["exposed_ms"]) for each in COMPARED])
    total = overlap_rows(lambda row: [rounded(row[each]["total_ms"]) for each in (*COMPARED, BOUND)])
    first, second = tables("overlap", "graph", 7), tables("overlap", "graph", 8)
    assert first == list(exposed) and second == list(total)
    for row in (*first, *second):  # what the page says of all graphs
        torch, bucketed, _, fused = map(float, row[3:7])
        assert fused < min(torch, bucketed), row


def test_what_else_overlap_hides_and_takes() -> None:
    def cells(row: list[Any]) -> list[str]:
        traced, torch, moved = row[TRACED], row[TORCH], row[MOVED]
        counts = [str(each) for each in (traced["collectives"], traced["hideable"], torch["hidden"], moved["hidden"])]
        peaks = [f"{row[each]['peak_over_percent'] + 0.0:+.1f}" for each in (TORCH, FUSED)]
        seconds = [f"{row[each]['pass_s']:.1f}" for each in (TORCH, TORCH_BUCKETED, FUSED)]
        return [*counts, *peaks, *seconds]

    assert tables("overlap", "graph", 11) == list(overlap_rows(cells))


def test_counts_of_redistribution() -> None:
    report = results("redistribution")
    expected = [
        [
            f"({', '.join(map(str, row['mesh_shape']))})",
            " x ".join(map(str, row["shape"])),
            str(row["pairs"]),
            f"{row['fewer_percent']:.0f} %",
            *(f"{row[each]:.2f}" for each in ("torch_collectives", "collectives", "bytes_ratio", "time_ratio")),
        ]
        for torch in (redistribution.FLATTENED, redistribution.PLAIN)
        for row in report["rows"]
        if row["torch"] == torch
    ]
    assert len(expected) == 12 and list(table_rows(page("redistribution"), "mesh")) == expected
    assert all(each["met"] for each in report["goals"])


def test_times_across_hosts() -> None:
    report = results("cpu-2-hosts")
    by_op: dict[str, list[str]] = {}
    for row in report["rows"]:
        cell = f"{row['speedup']['auto']:.2f}, {row['over_bound']:.2f}, {row['num_pieces']}"
        by_op.setdefault(f"`{row['op']}`", []).append(cell)
    rows = tables("benchmark", "wire / matmul, asked", 6)
    assert {name: cells for name, *cells in rows} == by_op
