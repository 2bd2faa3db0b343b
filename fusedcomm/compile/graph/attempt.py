"""Passes never break a program: a failure leaves the graph as it was."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

from fusedcomm.compile.graph.layout import CannotFuse


def attempt(what: str, act: Callable[..., Any], *args: Any, reasons: list[str] | None = None) -> Any:
    """``act(*args)``, or None if it cannot be done; ``reasons`` then gets why. A failure nobody expects warns once."""
    try:
        return act(*args)
    except CannotFuse as reason:
        text = f"{what}: {reason}"
    except Exception as error:
        text = f"{what}: {type(error).__name__}: {error}"
        _warn_once(what, f"{type(error).__name__}: {error}")
    if reasons is not None:
        reasons.append(text)
    return None


@functools.cache
def _warn_once(what: str, error: str) -> None:
    warnings.warn(f"fusedcomm.compile: {what} failed, and the graph is left as it was: {error}", stacklevel=2)
