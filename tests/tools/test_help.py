"""--help of every command: what it does, its exit code, an example that can be called, and defaults of options."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusedcomm import cli

NO_DEFAULT = (None, False, argparse.SUPPRESS)
COMMANDS = [each.stem for each in Path(cli.__path__[0]).glob("*.py") if "def add_parser(" in each.read_text()]


def parsers() -> Iterator[argparse.ArgumentParser]:
    root = argparse.ArgumentParser(prog="fusedcomm")
    commands = root.add_subparsers()
    for name in COMMANDS:
        importlib.import_module(f"fusedcomm.cli.{name}").add_parser(commands)
    left = list(commands.choices.values())
    while left:
        parser = left.pop()
        yield parser
        left += [each for action in nested(parser) for each in action.choices.values()]


def nested(parser: argparse.ArgumentParser) -> Iterator[argparse._SubParsersAction[argparse.ArgumentParser]]:
    yield from (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))


PARSERS = {parser.prog: parser for parser in parsers()}


@pytest.mark.parametrize("prog", PARSERS)
def test_every_option_is_explained_with_its_default(prog: str) -> None:
    for action in PARSERS[prog]._actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        assert action.help, f"{prog}: {action.option_strings or action.dest} has no help"
        if not any(action.default is each for each in NO_DEFAULT):
            assert "(default: " in action.help, f"{prog}: {action.option_strings}: {action.help}"


@pytest.mark.parametrize("prog", PARSERS)
def test_every_command_says_what_it_prints_its_exit_code_and_an_example(
    prog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, example = str(PARSERS[prog].description), str(PARSERS[prog].epilog)
    assert "rint" in description and "Exit code: " in description
    assert example.startswith(f"example: {prog}")
    for name in COMMANDS:
        monkeypatch.setattr(importlib.import_module(f"fusedcomm.cli.{name}"), "run", lambda args: 0)
    for command in example.removeprefix("example: ").split(" && "):
        assert cli.main(shlex.split(command)[1:]) == 0


def test_without_a_command_there_is_an_overview(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main([]) == 0
    overview = capsys.readouterr().out
    assert max(map(len, overview.splitlines())) <= 100
    for name in COMMANDS:
        assert re.search(rf"\n    {name}\s", overview)
    for text in ("as one PyTorch op", "first steps:", "fusedcomm doctor"):
        assert text in overview
