"""Tables: all that a command prints fit the width there is, drop whole columns, and explain what they show."""

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
from rich.console import Console
from torch import Tensor

import fusedcomm
from fusedcomm import tools
from fusedcomm.bench.start_program import ProgramSizes
from fusedcomm.launch import console
from fusedcomm.launch.console import Column, Table
from fusedcomm.memory import redact
from fusedcomm.testing import RankPool
from fusedcomm.tools import demo, main, tune
from fusedcomm.tools.demo import DTENSOR, OURS, ROOF, UNFUSED

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
    assert "[16, 8] @ [8]" in "\n".join(rendered(Table([Column("a", "b", lambda row: row)], ["[16, 8] @ [8]"]), 60))


def test_no_command_cuts_lines_of_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "5")
    console.show(Table([column("a")], ["123456789"], has_legend=False))
    assert "123456789" in capsys.readouterr().out
    tune._stored(Namespace(reset=False, json=None), "cpu", 2)
    assert re.search(r"\nchunk_overhead +2  us", capsys.readouterr().out)


# What a report that strangers may see hides, apart from the commands that show it: test_doctor.py has those.
def test_a_host_is_hidden_with_its_domain_and_so_is_the_head_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "head3.corp.example")
    monkeypatch.setenv("HOSTNAME", "node17")
    for module in ("socket.gethostname", "platform.node"):
        monkeypatch.setattr(module, lambda: "node17")
    hidden = redact.redact({"environment": {}, "text": "head3.corp.example, head3 node17.corp.example:1 on node17."})
    assert hidden["text"] == "<host>, <host> <host>:1 on <host>."
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")  # the first part of an address is no host
    assert redact.redact({"environment": {}, "text": "10 of 10.1.2.3"})["text"] == "10 of <address>"


# `fusedcomm demo` as a user sees it: table, JSON, exit codes.
SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "demo.json").read_text())


def small_demo_with_one_wrong_element(rank: int, wrong_rank: int | None, *options: str) -> tuple[int, str, str]:
    """Run a small demo, with one wrong element on ``wrong_rank``. This rank has RANK and a group, as under torchrun."""
    ours = fusedcomm.matmul_all_to_all

    def wrong(*args: object, **kwargs: object) -> Tensor:
        y = ours(*args, **kwargs)  # type: ignore[arg-type]
        if rank == wrong_rank:
            y[0, 3, 1, 2] += 1
        return y

    small = mock.patch.object(demo, "sizes_of", lambda *args: ProgramSizes(1, 2, 9, 16, 64, 16))
    planted = mock.patch.object(fusedcomm, "matmul_all_to_all", wrong)
    out, err = io.StringIO(), io.StringIO()
    with small, planted, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["demo", "--rounds", "2", "--device", "cpu", *options])
    return code, out.getvalue(), err.getvalue()


def test_wrong_values_on_one_rank_end_every_rank_with_code_1(ranks: Callable[[int], RankPool]) -> None:
    for code, out, err in ranks(2).run(small_demo_with_one_wrong_element, 1):
        assert code == 1
        assert "'fusedcomm' gave wrong values: rank 1: pair 0: 1 of" in err
        assert "first at [0, 3, 1, 2]" in err
        assert not out


def test_in_ranks_of_torchrun_rank_0_prints_a_table_and_writes_json(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    file, trace = tmp_path / "demo.json", tmp_path / "trace.json"
    files = ["--json", str(file), "--trace", str(trace)]
    found = ranks(2).run(small_demo_with_one_wrong_element, None, *files)
    (code_0, out_0, _), (code_1, out_1, _) = found
    assert (code_0, code_1, out_1) == (0, 0, "")
    for text in (DTENSOR, UNFUSED, OURS, ROOF, "values equal on all ranks", "plan of fusedcomm"):
        assert text in out_0

    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {f"variant: {UNFUSED}", f"variant: {OURS}", "fusedcomm.wait rank 0"} <= names
    report = json.loads(file.read_text())
    jsonschema.validate(report, SCHEMA)
    # On the CPU wheel "+cpu" is in the metadata of some installs and missing in others
    torch_version = importlib.metadata.version("torch")
    assert report["versions"]["torch"].split("+")[0] == torch_version.split("+")[0]
    assert report["machine"]["cpus"] == os.cpu_count()
    assert (report["world_size"], report["rounds"]) == (2, 2)
    assert {"command", "date", "commit", "problem", "device", "plan"} <= set(report)
    ours, unfused = report["times"][OURS], report["times"][UNFUSED]
    assert set(report["times"]) == set(report["ratios"]) == {DTENSOR, UNFUSED, OURS, ROOF}
    assert report["ratios"][OURS]["faster_than_matmul_and_all_to_all"] == pytest.approx(
        unfused["median"] / ours["median"]
    )
    assert ours["p10"] <= ours["median"] <= ours["p90"]


COMMANDS = [each.stem for each in Path(tools.__path__[0]).glob("*.py") if "def add_parser(" in each.read_text()]


def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        for each in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield each
            yield from below(each)


CLONE = argparse.ArgumentParser(prog="fusedcomm")
ADDED = CLONE.add_subparsers()
for command in COMMANDS:
    importlib.import_module(f"fusedcomm.tools.{command}").add_parser(ADDED)
PARSERS = {parser.prog: parser for parser in below(CLONE)}


@pytest.mark.parametrize("prog", PARSERS)
def test_the_example_of_every_command_can_be_called(prog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = str(PARSERS[prog].epilog)
    assert example.startswith(f"example: {prog}")
    for name in COMMANDS:
        monkeypatch.setattr(importlib.import_module(f"fusedcomm.tools.{name}"), "run", lambda args: 0)
    for command in example.removeprefix("example: ").split(" && "):
        assert tools.main(shlex.split(command)[1:]) == 0
