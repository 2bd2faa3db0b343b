"""Parameters by tier: `make test` runs those without a mark, CI the `thorough` ones too, `make nightly` the rest."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


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
