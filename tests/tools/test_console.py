"""Tables: all that a command prints fit the width there is, drop whole columns, and explain what they show."""

from __future__ import annotations

import io
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from fusedcomm.bench import table
from fusedcomm.bench.all_to_all import command, suite
from fusedcomm.bench.measure import OpRow
from fusedcomm.bench.plain import COLLECTIVES, CollectiveRow
from fusedcomm.bench.timing import Timing
from fusedcomm.cli import demo, doctor, faults, postmortem, selftest, tune
from fusedcomm.cli import demo_problem as names
from fusedcomm.compile.reports import CollectiveReport, CompileReport
from fusedcomm.cost.model import DEFAULTS, TUNED
from fusedcomm.doctor.findings import Finding
from fusedcomm.doctor.postmortem import GroupReport, Postmortem, RecordedCall
from fusedcomm.launch import console
from fusedcomm.launch.console import Column, Table
from fusedcomm.testing.faults.cells import OPS
from fusedcomm.testing.selftest import CHECKS, CheckResult

ROOT = Path(__file__).parents[2]
WIDTHS = (100, 80)
LATE = Timing(1.2345, 1.1, 1.3, 1.4, 0.03)


def op_row(**other: Any) -> OpRow:
    """A row with figures as wide as they come."""
    sizes = {"rows": 65536, "k": 16384, "n": 16384, "batch": 0, "group_size": 8, "num_bytes": 1 << 30, "flops": 10**15}
    names = {"op": OPS[0], "dtype": "bfloat16", "direction": "backward", "algorithm": "auto", "planned": "chunked"}
    times = {"roof": LATE, "collective": LATE, "baseline": LATE, "ours": LATE}
    return OpRow(**(names | sizes | times | {"plan": ""} | other))


def collective_row(op: str) -> CollectiveRow:
    return CollectiveRow(op, "bfloat16", 8, 1 << 30, LATE, LATE)


def suite_row(case: str, variant: str) -> suite.SuiteRow:
    return suite.SuiteRow(case, variant, "", LATE, LATE, LATE, 0.5, 0.01, 0.2, 1.5)


def call(rank: int) -> RecordedCall:
    return RecordedCall(
        op="matmul_reduce_scatter", group="0", ranks=[0, 1], device="cpu", resets=0, number=123, arguments={},
        dtype="float32", algorithm="chunked", state="waiting", error=None, peers=[], rounds=None, started=0.0,
        seconds=12.3, waiting_for=1 - rank, waiting_s=12.0,
    )  # fmt: skip


def explained() -> CompileReport:
    node, where = "all_gather_into_tensor_coalesced_12", "/somewhere/else/that/is/long/ulysses_attention.py:41"
    lines = [
        CollectiveReport("backward", "fused", "all_to_all", where, node, "matmul_all_to_all", saving_us=122.3),
        CollectiveReport("inference", "overlapped", "all_gather", where, node, reason="moved apart from its wait"),
    ]
    return CompileReport(lines)


FINDINGS = [
    Finding(section, "cpu unfused", level, "it is there " * 9, "update " * 20)
    for section, level in (("settings", "ok"), ("settings", "warning"), ("algorithms", "absent"), ("ranks", "error"))
]
REPORT = Postmortem([], [], [GroupReport("0", (0, 1), {0: call(0), 1: call(1)}, [])], [])
TABLES: dict[str, Callable[[], Table]] = {
    "bench of an op": lambda: table.table([op_row(), op_row(batch=16)], "matmul_all_to_all"),
    "bench of a collective": lambda: table.table([collective_row(op) for op in COLLECTIVES], "all_reduce"),
    "summary of a bench": lambda: table.summary_table(table.summary([op_row(op=op) for op in OPS])),
    "bench all-to-all": lambda: command.table([suite_row("competing", "serialised"), suite_row("fused", "")]),
    "demo": lambda: demo._table(dict.fromkeys((names.DTENSOR, names.UNFUSED, names.OURS, names.ROOF), LATE)),
    "doctor": lambda: doctor.findings_table(FINDINGS),
    "explain": lambda: explained().__rich__(),
    "faults": lambda: faults.table(
        [faults.FaultRow("stopped for ever", "chunked", 120, 119, 0, 1, 1.25, dict.fromkeys(OPS, "119/120"))]
    ),
    "postmortem": lambda: postmortem.table(REPORT),
    "selftest": lambda: selftest.table([CheckResult(c.name, c.proves, "skipped", "no " * 30) for c in CHECKS.values()]),
    "tune": lambda: tune._table(replace(DEFAULTS["cuda"], source=TUNED), DEFAULTS["cuda"]),
}


def rendered(renderable: Any, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, color_system=None).print(renderable, crop=False)
    return file.getvalue().splitlines()


def head_of(lines: list[str]) -> list[str]:
    """What stands above the rule."""
    rule = next(i for i, line in enumerate(lines) if line and not line.strip("─"))
    above = [i for i in range(rule) if not lines[i].strip()]
    return lines[max(above) + 1 : rule]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TABLES)
def test_every_table_fits_and_explains_what_it_shows(name: str, width: int) -> None:
    made = TABLES[name]()
    lines = rendered(made if made.has_legend else replace(made, has_legend=True), width)
    assert max(map(len, lines)) <= width
    shown, head = made.shown(width), head_of(lines)
    num_lines = max(column.head.count("\n") for column in made.columns if column in shown) + 1
    assert len(head) == num_lines + bool(made.title)  # no head was wrapped
    text = " ".join(" ".join(lines).split())
    legend = text[text.rindex("─") :]
    for column in made.columns:
        assert column.about and column.name
        if column in shown:
            assert all(part in " ".join(head) for part in column.head.split("\n"))
            assert column.name in legend and " ".join(column.about.split()) in legend
        else:
            assert column.name in legend[: legend.index("have them") if "have them" in legend else legend.index("has")]
    assert (f"left out at {width} columns: " in text) == (len(shown) < len(made.columns))
    assert "…" not in text


@pytest.mark.parametrize("name", TABLES)
def test_with_enough_width_nothing_is_left_out_and_heads_are_told_apart(name: str) -> None:
    made = TABLES[name]()
    assert made.shown(300) == list(made.columns) and "left out" not in "\n".join(rendered(made, 300))
    assert len({column.name for column in made.columns}) == len(made.columns)


def column(head: str, drop: int = 0, about: str = "about", folds: int = 0) -> Column:
    return Column(head, f"{about} {head}", lambda row: row, drop=drop, folds=folds, left=True)


def test_the_least_important_columns_go_first_and_the_others_stay_whole() -> None:
    made = Table([column("a"), column("b", drop=1), column("c", drop=2), column("d", drop=1)], ["x" * 9])
    assert [[each.head for each in made.shown(width)] for width in (42, 41, 30, 20, 9, 1)] == [
        ["a", "b", "c", "d"],
        ["a", "b", "d"],
        ["a"],
        ["a"],
        ["a"],
        ["a"],
    ]
    assert rendered(made, 4)[3] == "x" * 9  # what always stays is whole, though it is wider than the terminal


def test_markup_in_a_cell_is_text() -> None:
    assert "[16, 8] @ [8]" in "\n".join(rendered(Table([Column("a", "b", lambda row: row)], ["[16, 8] @ [8]"]), 60))
    shown = Table([Column("a", "b", lambda row: Text(row, style="bold"))], ["[x]"])
    assert "[x]" in "\n".join(rendered(shown, 60))


def test_the_width_is_that_of_columns_also_where_output_is_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console.stdout().width == 100  # pytest's stdout is no terminal
    monkeypatch.setenv("COLUMNS", "133")
    assert console.stdout().width == 133
    monkeypatch.setenv("COLUMNS", "72")
    assert max(map(len, str(explained()).splitlines())) <= 79  # str too; what always stays takes 79
    assert max(map(len, str(explained()).splitlines())) < 100


def test_no_command_cuts_lines_of_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "5")
    console.show(Table([column("a")], ["123456789"], has_legend=False))
    assert "123456789" in capsys.readouterr().out
    tune._stored(Namespace(reset=False, json=None), "cpu", 2)
    assert re.search(r"\nchunk_overhead +2  us", capsys.readouterr().out)
    files = [*(ROOT / "fusedcomm").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    printed = re.compile(r"print\([^\n]*(table\(|Table\(|tables|Legend\()|crop=", re.IGNORECASE)
    assert [file.name for file in files if printed.search(file.read_text())] == ["console.py"]
