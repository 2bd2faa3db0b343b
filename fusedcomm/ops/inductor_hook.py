"""Registers the lowerings of the ops with Inductor as soon as a program imports it, which takes a second.

Inductor asks nobody for lowerings, and a graph can be compiled without `fusedcomm.compile`. So the import of Inductor's
table of lowerings is when the ops' are registered.
"""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

log = logging.getLogger("fusedcomm")

TABLE = "torch._inductor.lowering"


def install() -> None:
    """Called once, when all ops are defined."""
    if TABLE in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterTable())


def _register() -> None:
    """If `lowering` itself imports the table, it is half imported now: then it registers at its own end."""
    try:
        from fusedcomm.ops import lowering  # noqa: F401
    except Exception as error:  # a program without these ops must still compile
        log.warning("Inductor lowers the ops of fusedcomm as plain fallbacks, in no fixed order: %s", error)


class _AfterTable:
    """A finder that finds the table where it is. It is removed once the table is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == TABLE else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: Any) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _register()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
