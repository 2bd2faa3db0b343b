"""The native part, where it is built for this Python and torch, and from the sources that a checkout has: symmetric
memory and prepared calls on CPUs.
"""

from types import ModuleType

import torch  # noqa: F401 it loads the libraries that the native part needs

native: ModuleType | None
try:
    import fusedcomm.kernels.cpu.native as _native
    from fusedcomm.kernels.cpu import sources

    if sources.digest() not in (None, getattr(_native, "SOURCES", "")):
        raise ImportError("built from other sources than the checkout has now")
    native, error = _native, ""
except ImportError as failed:
    native, error = None, "it was not built" if isinstance(failed, ModuleNotFoundError) else str(failed)


def loaded() -> ModuleType:
    """The native part, for code that does not run without it."""
    assert native is not None, error
    return native
