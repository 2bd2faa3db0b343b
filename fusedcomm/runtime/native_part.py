"""The native part, where it is built for this Python and torch, and from the sources that a checkout has: symmetric
memory and prepared calls on CPUs.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

native: ModuleType | None
try:
    from fusedcomm.kernels.cpu import native as _native
    from fusedcomm.kernels.cpu import sources

    if sources.digest() not in (None, getattr(_native, "SOURCES", "")):
        raise ImportError("built from other sources than the checkout has now")
    native, error = _native, ""
except ImportError as failed:
    built = importlib.util.find_spec("fusedcomm.kernels.cpu.native") is not None
    native, error = None, str(failed) if built else "it was not built"


def loaded() -> ModuleType:
    """The native part, for code that does not run without it."""
    assert native is not None, error
    return native
