"""--help of every command has an example that can be called."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusedcomm import tools

COMMANDS = [each.stem for each in Path(tools.__path__[0]).glob("*.py") if "def add_parser(" in each.read_text()]


def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        for each in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield each
            yield from below(each)


ROOT = argparse.ArgumentParser(prog="fusedcomm")
ADDED = ROOT.add_subparsers()
for command in COMMANDS:
    importlib.import_module(f"fusedcomm.tools.{command}").add_parser(ADDED)
PARSERS = {parser.prog: parser for parser in below(ROOT)}


@pytest.mark.parametrize("prog", PARSERS)
def test_the_example_of_every_command_can_be_called(prog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = str(PARSERS[prog].epilog)
    assert example.startswith(f"example: {prog}")
    for name in COMMANDS:
        monkeypatch.setattr(importlib.import_module(f"fusedcomm.tools.{name}"), "run", lambda args: 0)
    for command in example.removeprefix("example: ").split(" && "):
        assert tools.main(shlex.split(command)[1:]) == 0
