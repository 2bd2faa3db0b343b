"""32-bit products of run-time values in Triton's intermediate code: what could wrap where a tensor is large."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

_PRODUCT = re.compile(
    r"= arith\.muli (%[\w.#]+), (%[\w.#]+)(?: overflow<\w+>)? : (?:tensor<[\dx]*x)?i32>? loc\((#\w+)\)"
)
_CONSTANT = re.compile(r"(%[\w.]+) = arith\.constant ")
_PLACE = re.compile(r"^(#\w+) = loc\((.*)\)$", re.MULTILINE)
_FILE = re.compile(r'^"(.*)":(\d+):\d+$')


def narrow_products(ttir: str) -> list[str]:
    """``"file: line of source"`` of each, sorted. A product with a constant, as of a tile with its size, is none."""
    places, constants = dict(_PLACE.findall(ttir)), set(_CONSTANT.findall(ttir))
    found = [place for a, b, place in _PRODUCT.findall(ttir) if not {a, b} & constants]
    return sorted({_source(place, places) for place in found})


def _source(place: str, places: dict[str, str]) -> str:
    """The innermost line of a place: of a call it is the line of the callee, not of the caller."""
    text = places[place]
    if match := _FILE.match(text):
        file, line = match.groups()
        return f"{Path(file).name}: {linecache.getline(file, int(line)).strip()}"
    inner = re.search(r"#\w+", text)
    return _source(inner.group(), places) if inner else "unknown"
