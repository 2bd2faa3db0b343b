"""The API reference: a page per public module, made of the signatures and docstrings in the sources.

A name is public if the ``__all__`` of its module has it; beside these stand the classes that public functions return.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from docs.generate.docstrings import Link, markdown, summary

FOLDER = "docs/api"
NOTE = "<!-- written by `make docs` from the docstrings -->"
MODULES = (
    "fusedcomm",
    "fusedcomm.parallel",
    "fusedcomm.nn",
    "fusedcomm.moe",
    "fusedcomm.inference",
    "fusedcomm.compile",
    "fusedcomm.compile.overlap",
    "fusedcomm.symm_mem",
)
ERRORS = "fusedcomm.memory.errors"  # its names are in fusedcomm, and have a page of their own
# Headings by the room that defines a name, in the order of the page; a page whose names are of one room has none.
SECTIONS = {
    "ops": "Ops",
    "plan": "The choice of an algorithm",
    "redistribution": "DTensors",
    "memory": "Memory, errors and NCCL",
    "run": "Copies to the host",
}
# What public functions return, and what the pages name besides.
RETURNED = {
    "fusedcomm": ("fusedcomm.redistribution.search.RedistributionPlan",),
    "fusedcomm.compile": ("fusedcomm.compile.reports.CompileReport", "fusedcomm.compile.reports.CollectiveReport"),
    "fusedcomm.compile.overlap": (
        "fusedcomm.compile.overlap.timeline.Timeline",
        "fusedcomm.compile.overlap.timeline.Line",
        "fusedcomm.compile.overlap.simulator.simulate",
    ),
}
MOST_COLUMNS = 100  # a longer signature takes several lines

Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Source:
    """A module, as its file shows it."""

    name: str
    file: Path

    @property
    def path(self) -> str:
        """The file's path from the root of the repository."""
        return self.name.replace(".", "/") + ("/__init__.py" if self.file.stem == "__init__" else ".py")

    @cached_property
    def text(self) -> str:
        return self.file.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def public(self) -> list[str]:
        """The names in ``__all__``."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
        raise ValueError(f"{self.file} must have __all__")

    @cached_property
    def imported(self) -> dict[str, str]:
        """The modules from which names are imported, by name."""
        found = [node for node in self.tree.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in found for alias in node.names}

    def definition(self, name: str) -> Definition | None:
        """The last definition of a name: those before it are overloads."""
        found = [node for node in self.tree.body if isinstance(node, Definition) and node.name == name]
        return found[-1] if found else None


@dataclass(frozen=True)
class Entry:
    """A function, class or member of a page."""

    name: str  # what users write behind the module's name, for members Class.member
    module: str  # the module by which users reach it
    source: Source
    node: Definition

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def bases(self) -> list[str]:
        """The classes that it inherits from, without private ones."""

        def named(node: Definition | None) -> Iterator[str]:
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                name = ast.unparse(base)
                yield from named(self.source.definition(name)) if name.startswith("_") else (name,)

        return list(named(self.node))

    @property
    def decorators(self) -> set[str]:
        return {ast.unparse(each) for each in self.node.decorator_list}

    def members(self) -> Iterator[Entry]:
        """Methods with a docstring of their own; others are those of a base. Properties stand under Attributes."""
        for node in self.node.body if isinstance(self.node, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
                member = Entry(f"{self.name}.{node.name}", self.module, self.source, node)
                if not member.decorators & {"property", "cached_property"}:
                    yield member

    @property
    def signature(self) -> str:
        """How it is called; nothing for classes whose objects fusedcomm makes."""
        is_member = "." in self.name
        node = self._constructor(self.node) if isinstance(self.node, ast.ClassDef) else self.node
        if node is None:
            return ""
        has_self = isinstance(self.node, ast.ClassDef) or (is_member and "staticmethod" not in self.decorators)
        parameters = list(self._parameters(node.args))[has_self:]
        name = self.name if is_member else f"{self.module}.{self.name}"
        returns = f" -> {ast.unparse(node.returns)}" if node is self.node and node.returns else ""
        line = f"{name}({', '.join(parameters)}){returns}"
        if len(line) <= MOST_COLUMNS:
            return line
        return "\n".join([f"{name}(", *(f"    {each}," for each in parameters), f"){returns}"])

    def _constructor(self, node: ast.ClassDef) -> ast.FunctionDef | None:
        """``__init__``, which may be that of a base in the same module."""
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                return each
        bases = (self.source.definition(ast.unparse(base)) for base in node.bases)
        found = (self._constructor(base) for base in bases if isinstance(base, ast.ClassDef))
        return next((each for each in found if each is not None), None)

    def _parameters(self, args: ast.arguments) -> Iterator[str]:
        plain = [*args.posonlyargs, *args.args]
        defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
        yield from (self._parameter(arg, default) for arg, default in zip(plain, defaults, strict=True))
        if args.vararg:
            yield f"*{self._parameter(args.vararg, None)}"
        elif args.kwonlyargs:
            yield "*"
        pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
        yield from (self._parameter(arg, default) for arg, default in pairs)
        if args.kwarg:
            yield f"**{self._parameter(args.kwarg, None)}"

    def _parameter(self, arg: ast.arg, default: ast.expr | None) -> str:
        annotation = f": {ast.unparse(arg.annotation)}" if arg.annotation else ""
        if default is None:
            return arg.arg + annotation
        text = ast.get_source_segment(self.source.text, default)  # it keeps the quotes that the source has
        return f"{arg.arg}{annotation} = {text}" if annotation else f"{arg.arg}={text}"


@dataclass(frozen=True)
class Page:
    """A page, and what stands on it."""

    title: str
    docstring: str
    entries: list[Entry]

    @property
    def file(self) -> str:
        return f"{self.title.rpartition('.')[2]}.md"

    def sections(self) -> Iterator[tuple[str | None, list[Entry]]]:
        rooms = {each.name: each.source.name.split(".")[1] for each in self.entries}
        if len(set(rooms.values())) == 1:
            yield None, self.entries
            return
        missing = set(rooms.values()) - set(SECTIONS)
        if missing:
            raise ValueError(f"SECTIONS must have every room of {self.title}, got none for {sorted(missing)}")
        for room, heading in SECTIONS.items():
            yield heading, [each for each in self.entries if rooms[each.name] == room]


def pages(root: Path) -> dict[str, str]:
    """The texts of all pages by path."""
    found = list(_pages(root))
    anchors = {}
    for page in found:
        for each in page.entries:
            for entry in (each, *each.members()):
                anchor = f"{page.file}#{entry.name.replace('.', '').lower()}"
                anchors[entry.name] = anchors[f"{entry.module}.{entry.name}"] = anchor
        anchors.setdefault(page.title, page.file)
    texts = {page.file: _text(page, anchors) for page in found}
    return {f"{FOLDER}/{file}": text for file, text in ({"README.md": _index(found, anchors)} | texts).items()}


def _pages(root: Path) -> Iterator[Page]:
    @cache
    def source(name: str) -> Source:
        path = root / name.replace(".", "/")
        return Source(name, path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))

    def entry(module: str, defined_in: str, name: str) -> Entry | None:
        """What stands on a page for a name; None for a module, and for what another package defines."""
        if not defined_in.startswith("fusedcomm"):
            return None
        node = source(defined_in).definition(name)
        return None if node is None else Entry(name, module, source(defined_in), node)

    for module in MODULES:
        here = source(module)
        named = [(module, here.imported.get(name, module), name) for name in here.public]
        for dotted in RETURNED.get(module, ()):
            defined_in, _, name = dotted.rpartition(".")
            named.append((defined_in, defined_in, name))
        found = [each for names in named if (each := entry(*names))]
        docstring = ast.get_docstring(here.tree) or ""
        yield Page(module, docstring, [each for each in found if each.source.name != ERRORS])
        errors = [each for each in found if each.source.name == ERRORS]
        if errors:
            yield Page(ERRORS, ast.get_docstring(errors[0].source.tree) or "", errors)


def _text(page: Page, anchors: dict[str, str]) -> str:
    def link(name: str) -> str | None:
        target = anchors.get(name)
        if target is None:
            return f"../../{name}" if "/" in name else None
        return target.removeprefix(page.file) if "#" in target else target

    parts = [NOTE, f"# {page.title}", markdown(page.docstring, link)]
    for heading, entries in page.sections():
        level = "##" if heading is None else "###"
        parts += [f"## {heading}"] if heading else []
        for entry in entries:
            parts += _entry(entry, level, link)
            for member in entry.members():
                parts += _entry(member, f"{level}#", _of_class(link, entry.name))
    return "\n\n".join(part for part in parts if part) + "\n"


def _of_class(link: Link, name: str) -> Link:
    return lambda other: link(f"{name}.{other}") or link(other)


def _entry(entry: Entry, level: str, link: Link) -> list[str]:
    signature = f"```python\n{entry.signature}\n```" if entry.signature else ""
    parts = [f"{level} `{entry.name}`", signature, markdown(entry.docstring, link)]
    if "." not in entry.name:
        bases = [f"[`{base}`]({link(base)})" for base in entry.bases if link(base)]
        path = entry.source.path
        parts.append(f"Base: {', '.join(bases)}. " * bool(bases) + f"Source: [{path}](../../{path})")
    return parts


def _index(found: list[Page], anchors: dict[str, str]) -> str:
    parts = [
        NOTE,
        "# API reference",
        "The docstrings of the public names, as `help()` shows them. [Stability](../stability.md) says which of them "
        "keep their interface from release to release. R is the number of ranks of a group.",
    ]
    for page in found:
        rows = [f"## [{page.title}]({page.file})", "", "| name | what it is |", "|---|---|"]
        for entry in (entry for _, entries in page.sections() for entry in entries):
            what = summary(entry.docstring, anchors.get).replace("|", "\\|")
            rows.append(f"| [`{entry.name}`]({anchors[entry.name]}) | {what} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"
