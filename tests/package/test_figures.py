"""The figures in docs/ are those of the files in benchmarks/results/."""

import json
from collections.abc import Callable, Iterator
from statistics import median
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


def text_of(name: str) -> str:
    """A page without its line breaks."""
    return " ".join(page(name).split())


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

    ratios = [(row["ours"]["median"] / row["roof"]["median"], row) for row in results("cpu-2-ranks-ops")["rows"]]
    most, row = max(ratios, key=lambda each: each[0])
    case = f"`{row['op']}` of {row['rows']} x {row['k']} x {row['n']} in {row['dtype']}: it takes {most:.2f} times"
    assert f"Farthest from the matmul alone is {case} as long." in (ROOT / "README.md").read_text()


def test_what_a_call_costs() -> None:
    expected, hots, colds = [], [], []
    for each in results("cpu-2-ranks-overhead")["ops"]:
        calls = {call["name"]: call for call in each["calls"]}
        compared = [("chunked", "hot", "baseline"), ("chunked", "cold", "baseline"), ("chunked", "cpu", "empty op")]
        compared += [("unfused", "hot", "baseline"), ("unfused", "cold", "baseline")]
        ratios = [calls[of][time]["median"] / calls[to][time]["median"] for of, time, to in compared]
        expected.append([f"`{each['op']}`", *(f"{ratio:.2f}" for ratio in ratios)])
        hots.append(ratios[0])
        colds.append(ratios[1])
    assert list(table_rows(page("benchmark"), "op, 4 x 16 @ 16 x 8")) == expected
    small = f"takes {min(hots):.2f} to {max(hots):.2f} of the time of a small matmul and its collective"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{small}, and {min(colds):.2f} to {max(colds):.2f} with cold caches." in readme


def test_speeds_at_decode_sizes() -> None:
    reports = [results(f"cpu-2-ranks-decode-{op}") for op in OPS]
    means = [goal(each, "base/auto, geometric mean") for each in reports]
    least = min(goal(each, "base/auto, minimum") for each in reports)
    text = f"between {min(means):.2f} and {max(means):.2f}, depending on the op, and the least is {least:.2f}"
    assert text in text_of("benchmark")


def test_what_a_ulysses_block_recovers() -> None:
    rows = list(table_rows(page("benchmark"), "machine"))
    assert len(rows) == 4
    for machine, dtype, pages, share, spread, file in rows:
        report = results(file.removesuffix(".json"))
        assert all(word in report["machine"]["cpu"] for word in machine.removeprefix("2 cores of an ").split())
        assert report["huge_pages"] == (pages == "huge for all")
        row = next(each for each in report["rows"] if each["dtype"] == dtype)
        assert share == f"{row['gain']:.2f}"
        assert spread == " to ".join(f"{each:.2f}" for each in row["drawn_anew"])


def test_what_a_ulysses_block_recovers_of_a_bound_with_barriers() -> None:
    report = results("cpu-2-ranks-ulysses-block-barriers")
    (row,) = report["rows"]
    low, high = row["drawn_anew"]
    assert f"recovers {row['gain']:.2f} of it in {row['dtype']} ({low:.2f} to {high:.2f} with rounds" in text_of(
        "benchmark"
    )
    assert f"{report['rounds']} rounds, 2 cores of an {report['machine']['cpu']}" in text_of("benchmark")
    assert row["gain"] > 1
    quoted = f"recovers all in float32 on an AMD EPYC ({low * 100:.0f} to {high * 100:.0f} %)"
    assert quoted in (ROOT / "README.md").read_text()


def test_speeds_in_float32_alone() -> None:
    def listed(field: str) -> str:
        *others, last = (f"{each[field]:.2f}" for each in results("cpu-2-ranks-ops-float32")["summary"])
        return f"{', '.join(others)} and {last}"

    page_text = text_of("benchmark")
    assert f"the means were {listed('speedup_mean')} in the order of the table" in page_text
    assert f"a free exchange would give {listed('free_exchange')}." in page_text
    assert f"The times over the roof were {listed('over_roof_median')}." in page_text


def text(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['p10']:.2f} to {ratio['p90']:.2f})"


def test_speeds_of_uneven_sizes() -> None:
    rows = results("cpu-2-ranks-uneven")["rows"]
    expected = [
        [f"`{row['program']}`", row["dtype"], text(row["cost"]), text(row["padded_over_uneven"])] for row in rows
    ]
    assert list(table_rows(page("benchmark"), "projection")) == expected


def test_memory_of_a_training_step() -> None:
    expected = []
    for row in results("cpu-2-ranks-step-memory")["rows"]:
        ratios = sorted(a / b for a, b in zip(row["heap"], row["no_heap"], strict=True))
        megabytes = [f"{median(row[name]) / 2**20:.0f}" for name in ("heap", "no_heap")]
        expected.append([row["point"], *megabytes, f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"])
    assert list(table_rows(page("benchmark"), "behind the")) == expected


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
    said = f"medians of {report['rounds']} rounds on 2 cores of an {report['machine']['cpu'].split(' @')[0]}"
    assert said in text_of("benchmark"), said


def test_speeds_under_torch_compile() -> None:
    rows = results("cpu-2-ranks-compile")["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]

    def medians(ratio: str) -> list[str]:
        return [f"{row[ratio]['median']:.2f}" for row in rows]

    plain, exchange, by_hand = map(medians, ("plain_over_compiled", "plain_over_exchange", "op_over_compiled"))
    text = text_of("benchmark")
    assert f"runs {plain[0]} times faster in float32, and {plain[1]} times in bfloat16" in text
    assert f"{exchange[0]} and {exchange[1]} times, comes from exchanging parts" in text
    assert f"takes {by_hand[0]} and {by_hand[1]} times as long as the compiled program" in text
    (percent,) = (each["value"] for each in results("cpu-compile-time")["goals"] if "% of compile" in each["name"])
    assert f"The passes take {percent:.1f} % of the time that compiling 32 layers takes" in text
    per_layer = {f"{each['ms_per_layer']:.0f}" for each in results("cpu-compile-pass-time")["pass"]}
    assert per_layer == {"14"} and "The passes take 14 ms of compile time" in text


def test_host_time_of_launches() -> None:
    reports = [results(f"cpu-launches-triton-{version}") for version in ("3.9", "3.6")]
    expected = [
        [name, *(text for each in reports for text in (f"{each['us'][name]:.0f}", f"{each['ratio'][name]:.1f}"))]
        for name in reports[0]["us"]
    ]
    assert list(table_rows(page("benchmark"), "launch")) == expected
    assert reports[0]["machine"]["cpu"] == reports[1]["machine"]["cpu"]


def test_speeds_with_other_pages() -> None:
    reports = [results(f"cpu-2-ranks-{pages}-pages") for pages in ("default", "huge")]
    mean = [f"{goal(each, 'base/auto, geometric mean'):.2f}" for each in reports]
    least = [f"{goal(each, 'base/auto, minimum'):.2f}" for each in reports]
    text = f"was {mean[0]} by default and {mean[1]} with huge pages for all; the least was {least[0]} and {least[1]}."
    assert text in text_of("benchmark")


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
    for row in (*first, *second):  # what the page says of all 17 graphs
        torch, bucketed, _, fused = map(float, row[3:7])
        assert fused < min(torch, bucketed), row
    assert "On each of the 17 graphs" in page("overlap") and len(first) == 17


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
    equal, planned = (goal(report, f"unfused / planned, {name}minimum") for name in ("wire as matmul, ", ""))
    text = text_of("benchmark")
    assert f"at least {equal:.2f} times as fast" in text and f"slower than {planned:.2f} of it" in text
    assert f"planned / bound is {goal(report, 'planned / bound, maximum'):.3f}" in text
