"""Docstrings as Markdown: paragraphs, code behind ``::``, and sections as ``Args:`` with an entry per name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby

Link = Callable[[str], str | None]  # from a name to where it stands, if it does

SECTIONS = {"Args": "Parameters"}  # other headings stay as they are
_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):\n(.*)", re.S)
_ENTRY = re.compile(r"([\w.]+(?:, [\w.]+)*): (.*)", re.S)
_SPAN = re.compile(r"(?<!`)`([\w./]+)(\(\))?`(?!`)")


def markdown(docstring: str, link: Link) -> str:
    """A docstring as Markdown. ``link`` makes links of names in single backticks; double ones become single."""
    return "\n\n".join(_parts(docstring, link))


def summary(docstring: str, link: Link) -> str:
    """The first sentence of a docstring."""
    first = re.match(r"(.*?[.:])(?=\s|$)", " ".join(docstring.split("\n\n")[0].split()) + " ")
    return _inline(first[1].rstrip(":") + "." * first[1].endswith(":") if first else docstring, link)


def _parts(docstring: str, link: Link) -> Iterator[str]:
    is_code = False
    for indented, block in _blocks(docstring):
        if indented:
            yield f"```{'python' if is_code else ''}\n{block}\n```"
        elif section := _SECTION.match(block):
            yield f"**{SECTIONS.get(section[1], section[1])}**"
            yield _entries(section[2], link)
        else:
            yield _inline(block.removesuffix("::") + ":" * block.endswith("::"), link)
        is_code = block.endswith("::")


def _blocks(docstring: str) -> Iterator[tuple[bool, str]]:
    """Paragraphs, sections and indented blocks; the latter with blank lines inside and without their indentation."""
    blocks = [block.strip("\n") for block in re.split(r"\n\n+", docstring) if block.strip()]
    for indented, group in groupby(blocks, lambda block: block.startswith("    ")):
        found = list(group)
        if indented:
            lines = "\n\n".join(found).split("\n")
            yield True, "\n".join(line.removeprefix("    ") for line in lines)
        else:
            yield from ((False, block) for block in found)


def _entries(text: str, link: Link) -> str:
    """A list with an item per name, whose further lines are indented deeper; without names, as in Returns, a text."""
    lines = []
    for line in text.split("\n"):
        content = line.strip()
        entry = None if line.startswith("     ") else _ENTRY.match(content)
        if entry:
            names = ", ".join(_named(name, link) for name in entry[1].split(", "))
            lines.append(f"- {names}: {_inline(entry[2], link)}")
        else:
            lines.append("  " * line.startswith("     ") + _inline(content, link))
    return "\n".join(lines)


def _named(name: str, link: Link) -> str:
    target = link(name)
    return f"`{name}`" if target is None else f"[`{name}`]({target})"


def _inline(text: str, link: Link) -> str:
    def linked(span: re.Match[str]) -> str:
        target = link(span[1])
        return span[0] if target is None else f"[{span[0]}]({target})"

    return re.sub(r"``(.+?)``", r"`\1`", _SPAN.sub(linked, text))
