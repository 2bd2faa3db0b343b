"""Tables: all that a command prints fit the width there is, drop whole columns, and explain what they show."""

from __future__ import annotations

import io
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from fusedcomm.launch import console
from fusedcomm.launch.console import Column, Table
from fusedcomm.tools import tune

ROOT = Path(__file__).parents[2]


def rendered(renderable: Any, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, color_system=None).print(renderable, crop=False)
    return file.getvalue().splitlines()


def column(head: str, drop: int = 0) -> Column:
    return Column(head, f"about {head}", lambda row: row, drop=drop, left=True)


def test_the_least_important_columns_go_first_and_the_others_stay_whole() -> None:
    made = Table([column("a"), column("b", drop=1), column("c", drop=2), column("x", drop=1)], ["x" * 9])
    shown = {300: "abcx", 42: "abcx", 41: "abx", 30: "a", 1: "a"}
    assert {width: "".join(each.head for each in made.shown(width)) for width in shown} == shown
    assert rendered(made, 4)[3] == "x" * 9  # what always stays is whole, though it is wider than the terminal
    text = " ".join(" ".join(rendered(made, 41)).split())
    assert "left out at 41 columns: c" in text and "about a" in text and "about c" not in text
    assert max(map(len, rendered(made, 80))) <= 80 and "left out" not in " ".join(rendered(made, 80))


def test_markup_in_a_cell_is_text() -> None:
    assert "[16, 8] @ [8]" in "\n".join(rendered(Table([Column("a", "b", lambda row: row)], ["[16, 8] @ [8]"]), 60))
    shown = Table([Column("a", "b", lambda row: Text(row, style="bold"))], ["[x]"])
    assert "[x]" in "\n".join(rendered(shown, 60))


def test_the_width_is_that_of_columns_also_where_output_is_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console.stdout().width == 100  # pytest's stdout is no terminal
    monkeypatch.setenv("COLUMNS", "133")
    assert console.stdout().width == 133


def test_no_command_cuts_lines_of_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "5")
    console.show(Table([column("a")], ["123456789"], has_legend=False))
    assert "123456789" in capsys.readouterr().out
    tune._stored(Namespace(reset=False, json=None), "cpu", 2)
    assert re.search(r"\nchunk_overhead +2  us", capsys.readouterr().out)
    files = [*(ROOT / "fusedcomm").rglob("*.py"), *(ROOT / "bench").glob("*.py")]
    printed = re.compile(r"print\([^\n]*(table\(|Table\(|tables|Legend\()|crop=", re.IGNORECASE)
    assert [file.name for file in files if printed.search(file.read_text())] == ["console.py"]
