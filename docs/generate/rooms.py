"""The map of the rooms, drawn from the imports, as a section of docs/architecture.md between two markers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docs.generate.imports import LAYERS, arrows, modules, room

PAGE = "docs/architecture.md"
BEGIN, END = "<!-- rooms: written by `make docs` -->", "<!-- end of rooms -->"


def pages(root: Path) -> dict[str, str]:
    """The page by its path, with the section as the imports are now."""
    return {PAGE: replaced(root, PAGE, BEGIN, END, drawn(root))}


def replaced(root: Path, page: str, begin: str, end: str, section: str) -> str:
    """The text of a page with another section between two markers."""
    around = re.split(f"{re.escape(begin)}.*?{re.escape(end)}", (root / page).read_text(), flags=re.S)
    if len(around) != 2:
        raise ValueError(f"{page} must have one section between {begin} and {end}, got {len(around) - 1}")
    return f"{begin}\n\n{section}\n\n{end}".join(around)


def drawn(root: Path) -> str:
    """The graph, and a table with a line per room, highest first."""
    graph = arrows(root)
    described = {each: _what(file) for each, file in _doors(root).items()}
    lines = ["```mermaid", "flowchart TD"]
    for each in reversed(LAYERS):
        label = _path(each, root).removeprefix("fusedcomm/")
        lines.append(f'    {_id(each)}["{label}"]')
    for each, targets in reduced(graph).items():
        lines += [f"    {_id(each)} --> {_id(target)}" for target in targets]
    lines += ["```", "", "| room | what it is |", "|---|---|"]
    for each in reversed(LAYERS):
        path = _path(each, root)
        lines.append(f"| [`{path}`](../{path}) | {described[each]} |")
    return "\n".join(lines)


def reduced(graph: dict[str, set[str]]) -> dict[str, list[str]]:
    """The arrows that do not follow from others, highest room first: the transitive reduction."""
    below: dict[str, set[str]] = {}
    for each in LAYERS:
        below[each] = graph[each].union(*(below.get(target, set()) for target in graph[each]))
    follows = {each: set().union(*(below[target] for target in graph[each])) for each in LAYERS}
    return {each: _in_order(graph[each] - follows[each]) for each in reversed(LAYERS) if graph[each]}


def _in_order(rooms: set[str]) -> list[str]:
    return sorted(rooms, key=LAYERS.index, reverse=True)


def _id(name: str) -> str:
    """The name of a node, because Mermaid takes some words, as `end`, for its own."""
    return f"room_{name.strip('_')}"


def _path(name: str, root: Path) -> str:
    if name in ("bench", "kernels"):
        return f"{name}/"
    return f"fusedcomm/{name}/" if (root / "fusedcomm" / name).is_dir() else f"fusedcomm/{name}.py"


def _doors(root: Path) -> dict[str, Path]:
    """The files whose docstrings say what a room is, by room."""
    return {room(name): file for name, file in modules(root).items() if name.count(".") <= 1}


def _what(file: Path) -> str:
    """The first paragraph of the docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return re.sub("::$", ".", " ".join(docstring.split("\n\n")[0].split())).replace("``", "`").replace("|", "\\|")
