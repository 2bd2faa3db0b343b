"""The figures in docs/ are those of the files in bench/results/."""

import json
from typing import Any

from tests.helpers.problems import OPS
from tests.package.test_docs import ROOT, page, table_rows


def results(name: str) -> Any:
    return json.loads((ROOT / f"bench/results/{name}.json").read_text())


def goal(report: Any, name: str) -> float:
    return next(each["value"] for each in report["goals"] if each["name"] == name)


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
