"""Compiled graphs are kept by a key that changes with every source that can change a graph."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

import fusedcomm
from fusedcomm import files


def key_of(package: Path) -> str:
    spec = importlib.util.spec_from_file_location("files_of_the_copy", package / "files.py")
    assert spec is not None and spec.loader is not None
    copy: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy.cache_key("a fact")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    source = Path(fusedcomm.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "kernels")
    return Path(shutil.copytree(source, tmp_path / "fusedcomm", ignore=ignored))


@pytest.mark.parametrize("edited", ["plan/geometry/spans.py", "plan/cost/model.py", "compile/graph/sort.py", "env.py"])
def test_an_edit_of_what_makes_graphs_changes_the_key(package: Path, edited: str) -> None:
    before = key_of(package)
    with open(package / edited, "a") as file:
        file.write("# another program\n")
    assert key_of(package) != before


def test_a_new_file_changes_the_key_and_a_tool_does_not(package: Path) -> None:
    before = key_of(package)
    assert before == key_of(package) == files.cache_key("a fact") != files.cache_key("another fact")
    for edited in ("tools/explain.py", "launch/console.py", "testing/virtual.py"):
        with open(package / edited, "a") as file:
            file.write("# another tool\n")
    assert key_of(package) == before
    (package / "compile" / "new_pass.py").write_text("")
    assert key_of(package) != before


def test_all_passes_go_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedcomm.compile.overlap.inductor_order import KeepOrder
    from fusedcomm.compile.passes import FusedcommPass, OrderPass, Settings
    from fusedcomm.compile.reports import CompileReport

    passes: list[Any] = [FusedcommPass(Settings(), CompileReport()), OrderPass(Settings()), KeepOrder(None)]
    before = [each.uuid() for each in passes]
    assert before == [each.uuid() for each in passes]
    monkeypatch.setattr(files, "_sources_digest", lambda: "other sources")
    assert not set(before) & {each.uuid() for each in passes}
