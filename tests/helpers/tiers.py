"""Parameters by tier: `make test` runs two of a test's, CI those and the `thorough` ones, `make nightly` the rest."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any
from zlib import crc32

import pytest

QUICK = 2


def mark_thorough(items: Iterable[pytest.Item]) -> None:
    """Mark all but ``QUICK`` of each test's parameters that are collected; which ones, the test's name says."""
    tests = defaultdict(list)
    for item in items:
        if not (item.get_closest_marker("thorough") or item.get_closest_marker("nightly")):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, found in tests.items():
        first, step = crc32(name.encode()), len(found) / QUICK
        quick = {int(first + i * step) % len(found) for i in range(QUICK)}
        for i, item in enumerate(found):
            if i not in quick:
                item.add_marker(pytest.mark.thorough)


def thorough_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """``values`` as parameters, marked `thorough` unless they are among the ``quick`` ones."""
    values = list(values)
    assert all(value in values for value in quick), f"{quick} must be among {values}"
    return [pytest.param(value, marks=() if value in quick else pytest.mark.thorough) for value in values]


def nightly_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """``values``, or tuples of them, as parameters, marked `nightly` unless they are among the ``kept`` ones."""
    values = list(values)
    assert all(value in values for value in kept), f"{kept} must be among {values}"
    params = [(value if isinstance(value, tuple) else (value,), value in kept) for value in values]
    return [pytest.param(*each, marks=() if is_kept else pytest.mark.nightly) for each, is_kept in params]
