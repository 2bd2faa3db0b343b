"""docs/generate: what it writes follows from the sources, and the public docstrings say what a caller must know."""

import dataclasses
import importlib
import inspect
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedcomm
from docs.generate import api
from docs.generate.__main__ import main
from fusedcomm.launch.ranks import RankPool

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"^Example, on each of 2 ranks::\n\n((?:    .*\n|\n)+)", re.M)


def public() -> Iterator[tuple[str, Any]]:
    """The names that the reference has, and what they are."""
    for module in api.MODULES:
        found = importlib.import_module(module)
        for name in found.__all__:
            each = getattr(found, name)
            if not inspect.ismodule(each) and inspect.getmodule(each).__name__.startswith("fusedcomm"):
                yield f"{module}.{name}", each
    for dotted in (each for names in api.RETURNED.values() for each in names):
        module, _, name = dotted.rpartition(".")
        yield dotted, getattr(importlib.import_module(module), name)


def members(of: Any) -> Iterator[tuple[str, Any]]:
    """A class's own public methods, bound as they are called."""
    for name, found in vars(of).items() if inspect.isclass(of) else ():
        if not name.startswith("_") and callable(getattr(of, name)) and getattr(of, name).__doc__:
            yield f"{of.__name__}.{name}", getattr(of, name) if isinstance(found, classmethod | staticmethod) else found


PUBLIC = dict(public())
CALLED = {name: each for name, each in PUBLIC.items() if not dataclasses.is_dataclass(each)}  # what users call
MEMBERS = dict(pair for each in PUBLIC.values() for pair in members(each))


def entries(docstring: str, heading: str) -> set[str]:
    section = re.search(rf"^{heading}:\n((?:    .*\n?)+)", docstring, re.M)
    names = re.findall(r"^    (\w+(?:, \w+)*): ", section[1], re.M) if section else []
    return set(", ".join(names).split(", ")) if names else set()


def parameters(of: Any) -> list[str]:
    named = inspect.signature(of).parameters.values()
    return [each.name for each in named if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "kernels")
    for folder in ("fusedcomm", "kernels", "bench", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    return tmp_path


def test_stale_pages_are_named_and_written_anew(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All others are as generated, or they would be named too."""
    for file, old, new in (
        ("fusedcomm/memory/members.py", "Free the workspaces", "Free all workspaces"),
        ("fusedcomm/files.py", "\nimport ", "\nimport fusedcomm.env\nimport "),
    ):
        text = (copy / file).read_text()
        assert old in text
        (copy / file).write_text(text.replace(old, new, 1))
    (copy / "docs/api/gone.md").write_text("")
    assert main(["--check"], copy) == 1
    stale = ["docs/api/README.md", "docs/api/fusedcomm.md", "docs/architecture.md"]
    expected = [f"{path} is stale: run make docs" for path in stale]
    expected.append("docs/api/gone.md is about no public module any more: run make docs")
    assert capsys.readouterr().err.splitlines() == expected
    assert main([], copy) == 0
    assert not (copy / "docs/api/gone.md").exists()
    assert "Free all workspaces" in (copy / "docs/api/fusedcomm.md").read_text()
    assert "room_files --> room_env" in (copy / "docs/architecture.md").read_text()


def test_every_public_name_has_an_entry() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / api.FOLDER).glob("[!R]*.md"))
    headings = re.findall(r"^##+ `([\w.]+)`$", text, re.M)
    assert sorted(headings) == sorted([*(name.rpartition(".")[2] for name in PUBLIC), *MEMBERS])


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_docstring_names_parameters_and_attributes(name: str) -> None:
    each = PUBLIC[name]
    docstring = inspect.getdoc(each) or ""
    assert docstring
    is_class = inspect.isclass(each)
    if name in CALLED and not (is_class and issubclass(each, Exception)):
        assert entries(docstring, "Args") == set(parameters(each))
    if is_class:
        fields = {field.name for field in dataclasses.fields(each)} if dataclasses.is_dataclass(each) else set()
        named = {key for key in fields | properties(each) if not key.startswith("_")}
        assert named <= set().union(*(entries(inspect.getdoc(base) or "", "Attributes") for base in each.__mro__))


def properties(of: type) -> set[str]:
    return {key for key, value in vars(of).items() if isinstance(value, property | cached_property)}


def examples() -> dict[str, str]:
    found = {name: EXAMPLE.findall(inspect.getdoc(each) + "\n") for name, each in PUBLIC.items()}
    return {name: inspect.cleandoc("\n" + code[0]) for name, code in found.items() if code}


def run_examples(rank: int, found: dict[str, str]) -> None:
    for name, code in found.items():
        exec(compile(code, f"the example of {name}", "exec"), {"torch": torch, "fusedcomm": fusedcomm})


def test_examples_in_docstrings_run(ranks: Callable[[int], RankPool]) -> None:
    found = examples()
    assert len(found) > 10
    ranks(2).run(run_examples, found)
