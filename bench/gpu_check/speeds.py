"""The table of speeds: the numbers of each row, by case, and their goals."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Row:
    """``cases`` and ``keys``: patterns of "part/case" and of names in its result.

    Numbers are in ``unit``, or relative to the case's number ``over``.
    """

    name: str
    cases: str
    keys: str
    goal: str
    bound: str  # what keeps an H200 from more
    over: str = ""
    unit: str = ""
    more_is_better: bool = False
    noise: float = 0.05  # smaller relative differences count as equal


_TILES = "a tile's end where K is short, a kernel's start and end where it is small, L2 lines where rows straddle them"
_SUMS, _RATE = "sums in float32, for which tensor cores stop", ("", "TB/s", True)
_MOVED = "what cannot run beside the matmul: copy-outs and sums behind it, a pack in front"
_HOST = "calls of the driver", "torch.mm", "", False, 0.25
TABLE = [
    Row("push over cuBLAS", "kernel speed/push *", "ratio", "0.97; 0.95 at K 1024; 0.8 small", _TILES, "", "", True),
    Row("gather over cuBLAS", "kernel speed/gather [!o]*", "ratio", "0.97; 0.93 at K 1024", _TILES, "", "", True),
    Row("scaled over cuBLAS", "scaled/*", "ratio", "0.9", _SUMS, more_is_better=True),
    Row("pack and unpack", "kernel speed/*pack", "[!rgm]*", "0.95 of a copy", "unknown, not programs an SM", *_RATE),
    Row("reduce", "kernel speed/reduce *", "[!rgm]*", "0.9 of a copy", "3 of 30 us: epoch, poll, end", *_RATE),
    Row("tail over matmul, add and norm", "tail speed/*", "* over local", "2 of few rows", "polls and launches"),
    Row("moe over a copy", "moe speed/*", "* ratio", "0.9", "routing in a dispatch", more_is_better=True),
    Row("whole op over its matmuls", "op speed/*", "* over roof", "fused 1.10, 1.12, 1.06, 1.12, 1.20", _MOVED),
    Row("host time over torch.mm, fused", "host time/2 ranks fused", "*", "push 2; gather 4", *_HOST),
    Row("host time over torch.mm, chunked", "host time/2 ranks chunked", "*", "7 with 8 ranks", *_HOST),
    Row("start program over its matmuls", "start program/*", "* over roof", "forward 1.08, backward 1.15", _MOVED),
]


def numbers(row: Row, found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The row's numbers by label. ``found``: results by "part/case"."""
    for case, facts in found.items():
        if not fnmatchcase(case, row.cases) or not isinstance(facts, dict):
            continue
        flat = dict(_flat(facts))
        unit = flat.pop(row.over) if row.over in flat else 1.0
        for key, number in flat.items():
            if fnmatchcase(key, row.keys):
                yield case.partition("/")[2] + f", {key}" * (key != "ratio"), number / unit


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key} ")
        elif isinstance(value, list):
            yield from ((f"{prefix}{key} {i}", float(each)) for i, each in enumerate(value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + key, float(value)


def lines(found: Mapping[str, Any]) -> list[str]:
    """A line of each row that has numbers."""
    texts = []
    for row in TABLE:
        if each := list(numbers(row, found)):
            said = "; ".join(f"{label}: {number:.3g}{' ' * bool(row.unit)}{row.unit}" for label, number in each)
            texts.append(f"{row.name}: {said} (goal: {row.goal}; bound: {row.bound})")
    return texts


def worse(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The numbers that both have and that have become worse by more than the row's noise."""
    texts = []
    for row in TABLE:
        old = dict(numbers(row, before))
        for label, number in numbers(row, now):
            if label not in old or min(number, old[label]) <= 0:
                continue
            factor = old[label] / number if row.more_is_better else number / old[label]
            if factor > 1 + row.noise:
                texts.append(f"{row.name}: {label}: {number:.3g}, was {old[label]:.3g}")
    return texts
