"""Inductor gets to know the lowerings of the ops as soon as a program imports it, which takes a second.

Inductor asks nobody for lowerings, and a graph can be compiled without `fusedcomm.compile`; so the import of its table
is what they wait for.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

TABLE = "torch._inductor.lowering"


def install() -> None:
    """Called once, when all ops are defined."""
    if TABLE in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterTable())


def _register() -> None:
    """Also where `lowering` itself is what imports the table, and so is half imported: it registers at its end."""
    from fusedcomm.ops import lowering  # noqa: F401


class _AfterTable:
    """A finder that finds nothing by itself; it is gone when the table is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: Any) -> None:
                run(module)
                _register()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
