"""Sentences have their subject first: none in docstrings, comments and docs begins with `Of`, no comment
with `of`, and `ours` is no noun.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.helpers.thorough import thorough_but

ROOT = Path(__file__).parents[2]
PLACES = ["*.md", "docs", "fusedcomm", "kernels", "examples", "benchmarks"]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
UNWANTED = re.compile(r"\bOf\b|\b[Oo]urs\b|^(#|//) *of\b")
CODE = re.compile(r"^```.*?^```$|^ {4}[^\n]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def prose(suffix: str, text: str) -> list[str]:
    """What people read in a file, by line or comment, without code in backticks or blocks."""
    if suffix == ".md":
        return CODE.sub("", text).splitlines()
    if suffix != ".py":
        return re.findall(r"//.*", text)
    docs = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [CODE.sub("", each) for each in (*docs, *(t.string for t in tokens if t.type == tokenize.COMMENT))]


def unwanted(suffix: str, text: str) -> list[str]:
    return [line for line in prose(suffix, text) if UNWANTED.search(line)]


@pytest.mark.parametrize("place", thorough_but(PLACES, [*PLACES, "tests"]))
def test_sentences_have_their_subject_first(place: str) -> None:
    files = [*ROOT.glob("*.md")] if place == "*.md" else [*(ROOT / place).rglob("*.*")]
    read = [file for file in files if file.suffix in (".md", ".py", ".h", ".cpp")]
    found = {str(file.relative_to(ROOT)): unwanted(file.suffix, file.read_text()) for file in read}
    assert found and {name: lines for name, lines in found.items() if lines} == {}


def test_others_are_found() -> None:
    assert len(unwanted(".py", '"""A. Of x."""\nours = "Of"  # as `ours`\n# Ours is.\n')) == 2
    assert len(unwanted(".md", "Of `x`.\n\n    Of\n\n| a | Of b |\n")) == 2
    assert len(unwanted(".py", "a = 1  # of b\n# what is left\n# of b\n")) == 2
    assert len(unwanted(".cpp", 'f("Of");  // selects ours\n//  of a\n// made of b\n')) == 2
